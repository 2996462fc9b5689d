"""Finds the service that runs on a data folder, or starts one for as long as the run needs it.

A service holds the lock of its folder and writes its pid and URL into the lock file.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from batchline.client.client import is_healthy
from batchline.locks import AlreadyLocked, try_lock

_POLL_SECONDS = 0.05
_HEALTH_TIMEOUT_SECONDS = 5.0
_LOG_TAIL_BYTES = 4096
_MAX_LOG_BYTES = 10 * 1024 * 1024


class ServiceEnded(Exception):
    """The service ended or did not start. The message gives the reason and the remedy, for the user."""


class LockHolder(Struct, frozen=True):
    """The service that holds the lock of a folder."""

    pid: int
    url: str | None
    """None until the service listens."""


class LocalService:
    """The service on one data folder."""

    def __init__(
        self,
        path: Path,
        *,
        environment: Mapping[str, str],
        pause: Callable[[float], None],
        on_wait: Callable[[str], None],
    ) -> None:
        """``environment`` has the settings for a service that this run starts; ``on_wait`` gets what it waits for."""
        self._path, self._environment = path, dict(environment)
        self._pause, self._on_wait = pause, on_wait
        self._child: subprocess.Popen[bytes] | None = None
        self._child_url = ""
        self.log = path / "run.log"

    @property
    def is_own(self) -> bool:
        """Whether this run started the service."""
        return self._child is not None

    def url(self) -> str:
        """Return the URL of the service; wait for it or start it if needed. Raise ServiceEnded."""
        if self._child is not None:
            if self._child.poll() is None:
                return self._child_url
            raise ServiceEnded(
                f"The service of this run ended unexpectedly with exit code {self._child.returncode}; {self._see_log()}"
            )
        while True:
            holder = _holder(self._path / "lock")
            if holder is None:
                if self._start():
                    return self._child_url
            elif holder.url is not None and is_healthy(holder.url, timeout=_HEALTH_TIMEOUT_SECONDS):
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
        child, begin = self._spawn()
        self._child = child
        while child.poll() is None:
            # Only read the file: to test the lock would take it, and the child could fail to get it.
            holder = _read_holder(self._path / "lock")
            if holder is not None and holder.pid == child.pid and holder.url is not None:
                self._child_url = holder.url
                return True
            self._on_wait(_last_message(_read_tail(self.log, begin)) or "Starting the service")
            self._pause(_POLL_SECONDS)
        self.close()
        self._child = None
        if _holder(self._path / "lock") is None:
            raise ServiceEnded(
                _last_error(_read_tail(self.log, begin)) or f"The service did not start; {self._see_log()}"
            )
        return False

    def _spawn(self) -> tuple[subprocess.Popen[bytes], int]:
        """Return the process, and the offset at which its part of the log begins.

        It has its own process group: Ctrl-C on the terminal must reach only this process, which stops the service.
        """
        log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if os.fstat(log).st_size > _MAX_LOG_BYTES:
                os.ftruncate(log, 0)
            begin = os.fstat(log).st_size
            child = subprocess.Popen(
                # Without -P, a file in the current folder could be imported in place of a module.
                [sys.executable, "-P", "-m", "batchline.cli.run.service_child"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        finally:
            os.close(log)
        return child, begin

    def _see_log(self) -> str:
        return f"its log is {self.log}. Run the same command again to resume"


def _holder(lock: Path) -> LockHolder | None:
    """Return the service that holds the lock, or None if the lock is free."""
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
        pid, url, *_ = [*lock.read_text().splitlines(), "", ""]
    except FileNotFoundError:
        return None
    return LockHolder(int(pid), _loopback(url) or None) if pid.isdecimal() else None


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


def _last_message(tail: str) -> str | None:
    """Return the message of the last log line, if there is one."""
    _, found, text = tail.rstrip().rpartition('msg="')
    return text.partition('"')[0] if found else None
