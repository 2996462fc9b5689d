"""The service on a data folder: one that runs already, or one of our own for as long as the run needs it.

The lock of the folder tells which: whoever serves the folder holds it, and writes its pid and URL into it.
"""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from batchline.client.errors import ClientError
from batchline.client.http import Http

_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 5.0
_TAIL_BYTES = 4096
_LOG_BYTES = 10 * 1024 * 1024


class ServiceEnded(Exception):
    """Why there is no service, and what to do, for a person to read."""


class Holder(Struct, frozen=True):
    pid: int
    url: str | None
    """None until it listens."""


class Folder:
    def __init__(
        self,
        path: Path,
        *,
        environment: Mapping[str, str],
        pause: Callable[[float], None],
        tell: Callable[[str], None],
    ) -> None:
        """``environment`` holds the settings of a service that has to be started."""
        self._path, self._environment = path, dict(environment)
        self._pause, self._tell = pause, tell
        self._child: subprocess.Popen[bytes] | None = None
        self._child_url = ""
        self.log = path / "run.log"

    @property
    def serves_itself(self) -> bool:
        return self._child is not None

    def url(self) -> str:
        """Where the folder is served now; it is, when this returns. Raises ServiceEnded."""
        if self._child is not None:
            if self._child.poll() is None:
                return self._child_url
            raise ServiceEnded(
                f"The service of this run ended by itself with {self._child.returncode}; {self._see_log()}"
            )
        while True:
            holder = _holder(self._path / "lock")
            if holder is None:
                if self._start():
                    return self._child_url
            elif holder.url is not None and _answers(holder.url):
                return holder.url
            else:
                self._tell(f"Waiting for the service that holds {self._path} (pid {holder.pid})")
            self._pause(_POLL_SECONDS)

    def close(self) -> None:
        """End our own service, if there is one; its lines in flight may finish unless we are interrupted again."""
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
        """Whether the service is ours; else somebody else was quicker to take the folder."""
        child, begin = self._spawn()
        self._child = child
        while child.poll() is None:
            # Without asking for the lock, which would be in the way of the child that asks for it too.
            holder = _written(self._path / "lock")
            if holder is not None and holder.pid == child.pid and holder.url is not None:
                self._child_url = holder.url
                return True
            self._tell(_message(_tail(self.log, begin)) or "Starting the service")
            self._pause(_POLL_SECONDS)
        self.close()
        self._child = None
        if _holder(self._path / "lock") is None:
            raise ServiceEnded(_reason(_tail(self.log, begin)) or f"The service did not start; {self._see_log()}")
        return False

    def _spawn(self) -> tuple[subprocess.Popen[bytes], int]:
        """The process, and where its part of the log begins.

        It has a group of its own: a terminal's Ctrl-C is for us, and when the service ends is for us to say.
        """
        log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if os.fstat(log).st_size > _LOG_BYTES:
                os.ftruncate(log, 0)
            begin = os.fstat(log).st_size
            child = subprocess.Popen(
                [sys.executable, "-m", "batchline.cli.run.service_child"],
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
        return f"its log is {self.log}. Run the same command again to go on"


def _holder(lock: Path) -> Holder | None:
    """Who serves the folder."""
    try:
        fd = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _written(lock) or Holder(0, None)
    else:
        # What a dead process wrote is void, and must not be taken for the word of a new one with the same pid.
        os.ftruncate(fd, 0)
        return None
    finally:
        os.close(fd)


def _written(lock: Path) -> Holder | None:
    try:
        pid, url, *_ = [*lock.read_text().splitlines(), "", ""]
    except FileNotFoundError:
        return None
    return Holder(int(pid), _reachable(url) or None) if pid.isdecimal() else None


def _reachable(url: str) -> str:
    """A service that listens on every address is asked on this machine's own."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _answers(url: str) -> bool:
    try:
        Http(locate=lambda: url, headers={}).call("GET", "/healthz", stall=_ANSWER_SECONDS)
    except ClientError:
        return False
    return True


def _tail(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def _reason(tail: str) -> str | None:
    """Of a command that refused to start, in its own words."""
    return tail.rpartition("Error: ")[2].strip() or None


def _message(tail: str) -> str | None:
    """What the service says it is doing."""
    _, found, text = tail.rstrip().rpartition('msg="')
    return text.partition('"')[0] if found else None
