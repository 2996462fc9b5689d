"""The data folder, the socket and the signals of a process: F1, F5."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from batchline.app.startup import (
    StartupError,
    connection_limit,
    folder_lock,
    listening_socket,
    make_folder,
    stop_on_signals,
    url_of,
    write_lock,
)
from batchline.settings import Settings


def test_a_data_folder_is_private_and_made_with_its_parents(tmp_path: Path) -> None:
    """F1: it holds the inputs and results of every project."""
    folder = tmp_path / "parent" / "data"
    make_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    make_folder(folder)


def test_a_data_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """F5: the message names the folder and the cause."""
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match=r"The data folder .*/file/data cannot be created: Not a directory"):
        make_folder(tmp_path / "file" / "data")


def test_a_locked_folder_is_refused_and_its_holder_named(tmp_path: Path) -> None:
    """F1: one process per folder; the lock ends with the block."""
    with folder_lock(tmp_path), pytest.raises(StartupError, match=rf"\(pid {os.getpid()}\).*--data-dir"):
        _lock_and_release(tmp_path)
    _lock_and_release(tmp_path)


def _lock_and_release(folder: Path) -> None:
    with folder_lock(folder):
        pass


def test_the_lock_names_the_process_and_then_its_url(tmp_path: Path) -> None:
    """`batchline run` reads where the service of a folder listens."""
    with folder_lock(tmp_path) as lock:
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
        write_lock(lock, 7, "http://127.0.0.1:8000")
        assert (tmp_path / "lock").read_text() == "7\nhttp://127.0.0.1:8000\n"


def test_a_socket_listens_on_the_host_and_port_of_the_settings() -> None:
    with listening_socket(Settings(host="127.0.0.1", port=0)) as sock:
        port = sock.getsockname()[1]
        assert url_of(sock) == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port)).close()


def test_a_port_in_use_is_refused_with_the_flags_that_change_it() -> None:
    """F5"""
    with listening_socket(Settings(host="127.0.0.1", port=0)) as taken:
        port = taken.getsockname()[1]
        message = rf"Cannot listen on 127\.0\.0\.1 port {port}: .*--host and --port"
        with pytest.raises(StartupError, match=message), listening_socket(Settings(host="127.0.0.1", port=port)):
            pass


@pytest.mark.anyio
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_stops_the_process(number: signal.Signals) -> None:
    """F5: SIGTERM and Ctrl-C let lines in flight finish."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    stop_on_signals(stopped.set)
    try:
        os.kill(os.getpid(), number)
        await stopped.wait()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGINT)


@pytest.mark.parametrize(
    ("setting", "descriptors", "limit"),
    [
        (None, 256, 128),
        (None, 1_048_576, 4096),
        (50_000, 1_048_576, 50_000),
        (50_000, 1024, 512),
        (10, 1024, 10),
        (None, 1, 1),
        (None, resource.RLIM_INFINITY, 4096),
    ],
)
def test_connections_of_clients_never_get_more_than_half_of_the_descriptors(
    setting: int | None, descriptors: int, limit: int
) -> None:
    """A14"""
    assert connection_limit(Settings(max_connections=setting), descriptors=descriptors) == limit


_HOLD_LARGE_BLOCKS = """
import psutil
from batchline.app.startup import return_freed_memory

return_freed_memory()
before = psutil.Process().memory_info().rss
bytes(20_000_000)  # When glibc frees a block that it had mapped, it takes blocks up to that size from its heap.
blocks, between = [], []
for _ in range(12):
    blocks.append(b"x" * 15_000_000)
    between.append(b"x" * 100_000)  # It keeps the heap from shrinking.
blocks.clear()
print((psutil.Process().memory_info().rss - before) // 1_000_000)
"""


def test_the_memory_of_large_answers_is_given_back() -> None:
    """Without the setting, the 180 MB would stay with the process."""
    program = subprocess.run([sys.executable, "-c", _HOLD_LARGE_BLOCKS], capture_output=True, text=True, check=True)
    assert int(program.stdout) < 60
