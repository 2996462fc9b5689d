"""How a process starts and stops: its folder, its socket, its signals, and why it cannot."""

import asyncio
import fcntl
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from batchline.settings import Settings

log = logging.getLogger(__name__)


class StartupError(Exception):
    """Why the service cannot start, and what to do, for a person to read."""


def stop_on_signals(stop: Callable[[], None]) -> None:
    """The first signal lets what is in flight finish; a second one ends the process at once."""
    loop = asyncio.get_running_loop()

    def hear(number: signal.Signals) -> None:
        log.info("stopping; lines in flight may finish", extra={"signal": number.name})
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, os._exit, 128 + each)
        stop()

    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, hear, each)


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"The data folder {folder} cannot be made: {error.strerror}") from error


@contextmanager
def folder_lock(folder: Path) -> Iterator[TextIO]:
    """One process a folder; the lock goes with the process, however it ends. In it stand the process and, once it
    listens, its URL."""
    with (folder / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise StartupError(
                f"The data folder {folder} is served by another process (pid {lock.readline().strip() or 'unknown'}). "
                "Stop that one, or choose another folder with --data-dir."
            ) from None
        write_lock(lock, os.getpid())
        yield lock


def write_lock(lock: TextIO, *lines: object) -> None:
    lock.truncate(0)
    lock.write("".join(f"{line}\n" for line in lines))
    lock.flush()


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def listening_socket(settings: Settings) -> Iterator[socket.socket]:
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
