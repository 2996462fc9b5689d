"""Starts and stops a process: its data folder, its socket and its signals."""

import asyncio
import ctypes
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

from batchline.locks import try_lock
from batchline.settings import Settings

log = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_MAX_DEFAULT_CONNECTIONS = 4096
"""A connection that sends no credentials can hold about 320 KB."""
_M_MMAP_THRESHOLD = -3
_MAPPED_BYTES = 1024 * 1024
"""glibc maps larger blocks by themselves at first, and raises this size up to 32 MiB when one of them is freed."""


class StartupError(Exception):
    """The service cannot start. The text tells a person the cause and the remedy."""


class FolderTaken(StartupError):
    """Another process serves the data folder."""


def stop_on_signals(stop: Callable[[], None]) -> None:
    """Call ``stop`` at the first SIGTERM or SIGINT, so that lines in flight can finish; exit at once at the second."""
    loop = asyncio.get_running_loop()

    def on_signal(received: signal.Signals) -> None:
        log.info("stopping; lines in flight may finish", extra={"signal": received.name})
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, os._exit, 128 + number)
        stop()

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal, number)


def raise_descriptor_limit() -> int:
    """Raise the number of file descriptors that the process may have to its hard limit, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        log.warning("failed to raise the limit of file descriptors", extra={"limit": soft, "hard_limit": hard})
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def return_freed_memory() -> None:
    """Let the process give the memory of large blocks, such as answers of many megabytes, back as soon as it is freed.

    glibc would keep them in its heap after a while: a process that has held 300 MB of answers would have 500 MB for
    ever. Other C libraries do not have the setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def connection_limit(settings: Settings, *, descriptors: int) -> int:
    """Return how many connections clients may have open.

    They never get more than half of the descriptors. The rest is for upstreams, files and the database, so that a
    running batch does not depend on how many clients connect.
    """
    half = descriptors // 2 if descriptors != resource.RLIM_INFINITY else _MAX_DEFAULT_CONNECTIONS
    return max(1, min(settings.max_connections or _MAX_DEFAULT_CONNECTIONS, half))


def make_folder(folder: Path) -> None:
    """Create the data folder if it does not exist. Raise StartupError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"The data folder {folder} cannot be created: {error.strerror}") from error


@contextmanager
def folder_lock(folder: Path) -> Iterator[TextIO]:
    """Hold the lock of a data folder, which one process at a time can hold. Raise FolderTaken.

    The lock ends with the process, however that ends. Its file holds the process id and, once the process listens,
    its URL.
    """
    with (folder / "lock").open("a+") as lock:
        try:
            try_lock(lock)
        except OSError:
            lock.seek(0)
            raise FolderTaken(
                f"The data folder {folder} is served by another process (pid {lock.readline().strip() or 'unknown'}). "
                "Stop that one, or choose another folder with --data-dir."
            ) from None
        write_lock(lock, os.getpid())
        yield lock


@contextmanager
def own_folder(settings: Settings) -> Iterator[TextIO | None]:
    """Lock the data folder, unless everything is kept in PostgreSQL and a bucket."""
    shared = settings.database_url is not None and settings.storage_url is not None
    with nullcontext() if shared else folder_lock(settings.data_dir) as lock:
        yield lock


def write_lock(lock: TextIO, *lines: object) -> None:
    """Replace the content of the lock's file."""
    lock.truncate(0)
    lock.write("".join(f"{line}\n" for line in lines))
    lock.flush()


def url_of(sock: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def listening_socket(settings: Settings) -> Iterator[socket.socket]:
    """Listen on the host and port of the settings. Raise StartupError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        sock = socket.create_server((settings.host, settings.port), family=family, backlog=1024)
    except OSError as error:
        raise StartupError(
            f"Cannot listen on {settings.host} port {settings.port}: {error.strerror}. "
            "Choose another with --host and --port."
        ) from error
    with sock:
        yield sock
