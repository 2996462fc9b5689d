"""The service of one command: it stops when the process that started it has ended, in any way.

That process holds the other end of our standard input, and no other process does.
"""

import os
import signal
import sys
from contextlib import suppress
from threading import Thread

import click

from batchline.cli.connection.local_service import PROGRESS_FD, WITHOUT_WORKER
from batchline.cli.roles import run_role

_STDIN = 0
_GRACE_SECONDS = 5


def _stop_with_parent() -> None:
    while os.read(_STDIN, 1024):
        pass
    # The kernel kills the service if it does not stop in time, so that a killed run leaves no process behind.
    signal.alarm(_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


class _ProgressPipe:
    """Tells the process that started us what is downloaded and how much of it, if that process still listens."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        os.set_blocking(pipe, False)

    def __call__(self, name: str, done: int, total: int) -> None:
        with suppress(OSError):
            os.write(self._pipe, b"%d %d %b\n" % (done, total, name.encode()))


def _serve() -> None:
    """Run the service on a free port of the loopback address, with the settings of the environment."""
    role = "api_on_folder" if WITHOUT_WORKER in sys.argv else "serve"
    [pipe] = [int(argument.removeprefix(PROGRESS_FD)) for argument in sys.argv if argument.startswith(PROGRESS_FD)]
    try:
        run_role(role, {"host": "127.0.0.1", "port": "0"}, progress=_ProgressPipe(pipe))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)


if __name__ == "__main__":
    Thread(target=_stop_with_parent, daemon=True).start()
    _serve()
