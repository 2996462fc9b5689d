"""Ends a command at SIGINT and SIGTERM in an orderly way: everything is closed, and the exit code says why."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(BaseException):
    """A signal asked the command to stop."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        """The code that shells use. It is not 1, because nothing has failed."""


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raise Stopped at SIGINT and SIGTERM, and exit with its code after everything was closed."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except Stopped as stopped:
        raise SystemExit(stopped.exit_code) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
