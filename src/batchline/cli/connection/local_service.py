"""Finds the service that runs on a data folder, or starts one for as long as a command needs it.

A service holds the lock of its folder and writes its pid, its URL and its description into the lock file.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from msgspec import DecodeError, Struct
from msgspec.json import decode as decode_json

from batchline.cli.roles import FOLDER_TAKEN
from batchline.cli.text import format_size
from batchline.client.client import is_batchline, is_healthy
from batchline.locks import AlreadyLocked, try_lock
from batchline.service_description import ServiceDescription
from batchline.settings import Settings

WITHOUT_WORKER = "--without-worker"
"""The argument of a service that answers requests but runs no line."""
PROGRESS_FD = "--progress-fd="
"""The argument before the descriptor to which a service writes what it downloads and how much of it."""

_POLL_SECONDS = 0.05
_HEALTH_TIMEOUT_SECONDS = 5.0
_LOG_TAIL_BYTES = 4096
_MAX_LOG_BYTES = 10 * 1024 * 1024
_PIPE_BYTES = 64 * 1024


class ServiceEnded(Exception):
    """The service ended or did not start. The message gives the reason and the remedy, for the user."""


class OnWait(Protocol):
    """Gets what is waited for, and how much of it is done if that is known."""

    def __call__(self, text: str, *, fraction: float | None = None) -> None: ...


class LockHolder(Struct, frozen=True):
    """The service that holds the lock of a folder."""

    pid: int
    url: str | None
    """None until the service listens."""
    description: ServiceDescription | None = None
    """None until the service listens, and for a service of an earlier version."""


class LocalService:
    """The service on one data folder."""

    def __init__(
        self,
        path: Path,
        *,
        environment: Mapping[str, str],
        runs_lines: bool,
        pause: Callable[[float], None],
        on_wait: OnWait,
        on_found: Callable[[LockHolder], None],
    ) -> None:
        """``environment`` has the settings of a service that this command starts; ``runs_lines`` says if it runs lines.

        ``on_wait`` gets what is waited for. ``on_found`` gets a service that another process started, before it is
        used, and raises if it must not be.
        """
        self._path, self._environment, self._runs_lines = path, dict(environment), runs_lines
        self._pause, self._on_wait, self._on_found = pause, on_wait, on_found
        self._child: subprocess.Popen[bytes] | None = None
        self._child_url = ""
        self.log = path / "run.log"

    @property
    def is_own(self) -> bool:
        """Whether this command started the service."""
        return self._child is not None

    @property
    def holder(self) -> LockHolder | None:
        """The service that holds the folder now, or None if none does."""
        return _read_holder(self._path / "lock") if self.is_own else find_holder(self._path)

    def url(self) -> str:
        """Return the URL of the service; wait for it or start it if needed. Raise ServiceEnded."""
        if self._child is not None:
            if self._child.poll() is None:
                return self._child_url
            raise ServiceEnded(
                f"The service of this run ended unexpectedly with exit code {self._child.returncode}; {self._see_log()}"
            )
        while True:
            holder = find_holder(self._path)
            if holder is None:
                if self._start():
                    return self._child_url
            elif holder.url is not None and is_healthy(holder.url, timeout=_HEALTH_TIMEOUT_SECONDS):
                self._on_found(holder)
                return holder.url
            else:
                self._on_wait(f"Waiting for the service that holds {self._path} (pid {holder.pid})")
            self._pause(_POLL_SECONDS)

    def close(self) -> None:
        """Stop the service if this run started it. Lines in flight may finish unless we are interrupted again."""
        if self._child is None:
            return
        with self._child as child:
            child.terminate()
            try:
                child.wait()
            except BaseException:
                child.kill()
                raise

    def _start(self) -> bool:
        """Start a service. Return False if another process took the folder first. Raise ServiceEnded."""
        progress, write_end = os.pipe()
        os.set_blocking(progress, False)
        try:
            try:
                child, begin = self._spawn(write_end)
            finally:
                os.close(write_end)
            self._child = child
            return self._await_start(child, begin, progress)
        finally:
            os.close(progress)

    def _await_start(self, child: subprocess.Popen[bytes], begin: int, progress: int) -> bool:
        wait: tuple[str, float | None] = ("Starting the service", None)
        while child.poll() is None:
            # Only read the file: to test the lock would take it, and the child could fail to get it.
            holder = _read_holder(self._path / "lock")
            if holder is not None and holder.pid == child.pid and holder.url is not None:
                self._child_url = holder.url
                return True
            wait = _read_download(progress) or wait
            self._on_wait(wait[0], fraction=wait[1])
            self._pause(_POLL_SECONDS)
        self.close()
        self._child = None
        # The process that took the folder may have ended since, so the lock does not tell.
        if child.returncode != FOLDER_TAKEN:
            raise ServiceEnded(
                _last_error(_read_tail(self.log, begin)) or f"The service did not start; {self._see_log()}"
            )
        return False

    def _spawn(self, progress: int) -> tuple[subprocess.Popen[bytes], int]:
        """Return the process, and the offset at which its part of the log begins.

        It has its own process group: Ctrl-C on the terminal must reach only this process, which stops the service.
        """
        log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if os.fstat(log).st_size > _MAX_LOG_BYTES:
                os.ftruncate(log, 0)
            begin = os.fstat(log).st_size
            child = subprocess.Popen(  # noqa: S603 (no argument comes from a user)
                # Without -P, a file in the current folder could be imported in place of a module.
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "batchline.cli.connection.service_child",
                    *self._child_arguments(progress),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                pass_fds=(progress,),
            )
        finally:
            os.close(log)
        return child, begin

    def _child_arguments(self, progress: int) -> list[str]:
        return [f"{PROGRESS_FD}{progress}", *([] if self._runs_lines else [WITHOUT_WORKER])]

    def _see_log(self) -> str:
        return f"its log is {self.log}. Run the same command again to resume"


def find_holder(folder: Path) -> LockHolder | None:
    """Return the service that holds the lock of a folder, or None if the lock is free."""
    lock = folder / "lock"
    try:
        fd = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        try_lock(fd)
    except AlreadyLocked:
        return _read_holder(lock) or LockHolder(0, None)
    else:
        # Erase what a dead process wrote: a new process could have the same pid.
        os.ftruncate(fd, 0)
        return None
    finally:
        os.close(fd)


def _read_holder(lock: Path) -> LockHolder | None:
    try:
        pid, url, description, *_ = [*lock.read_text().splitlines(), "", "", ""]
    except FileNotFoundError:
        return None
    return LockHolder(int(pid), _loopback(url) or None, _decode(description)) if pid.isdecimal() else None


def _decode(text: str) -> ServiceDescription | None:
    try:
        return decode_json(text, type=ServiceDescription)
    except DecodeError:
        return None


def url_of_another_folder(settings: Settings) -> str | None:
    """Return the URL of a service that listens where the settings say but does not use their data folder, if any.

    What a command writes into this folder is unknown to that service.
    """
    url = local_url(settings)
    holder = find_holder(settings.data_dir)
    if settings.database_url is not None or settings.port == 0 or (holder is not None and holder.url == url):
        return None
    return url if is_batchline(url, timeout=_HEALTH_TIMEOUT_SECONDS) else None


def url_of_folder(settings: Settings) -> str:
    """Return the URL of the service that runs on the data folder, or the one that it would have if none runs."""
    holder = find_holder(settings.data_dir)
    return local_url(settings) if holder is None or holder.url is None else holder.url


def local_url(settings: Settings) -> str:
    """Return the URL at which this machine reaches a service with these settings."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104 (nothing is bound)
    return f"http://{f'[{address}]' if ':' in address else address}:{settings.port}"


def _loopback(url: str) -> str:
    """Replace the wildcard address, on which a service may listen, by the loopback address."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _read_tail(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - _LOG_TAIL_BYTES))
        return file.read().decode(errors="replace")


def _last_error(tail: str) -> str | None:
    """Return the error message of a service that did not start, if the log has one."""
    return tail.rpartition("Error: ")[2].strip() or None


def _read_download(pipe: int) -> tuple[str, float | None] | None:
    """Return the text and the fraction of a download if the service has reported progress, else None."""
    try:
        reports = os.read(pipe, _PIPE_BYTES).split(b"\n")
    except BlockingIOError:
        return None
    if len(reports) < 2:
        return None
    done, total, name = reports[-2].split(maxsplit=2)
    return f"Downloading {name.decode()}, {format_size(int(total))}, only once", int(done) / int(total)
