"""Decides whether a failed request is sent again, and after how long."""

from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import TypeVar

from batchline.client.errors import BrokenOff, ClientError, ServerTrouble, Throttled, Unreachable

T = TypeVar("T")

TRANSIENT: tuple[type[ClientError], ...] = (Unreachable, BrokenOff, Throttled, ServerTrouble)
"""Errors that the next attempt may not meet."""

_FEW_WAITS_SECONDS = (0.5, 1.0, 2.0, 4.0)
_MAX_WAIT_SECONDS = 15.0


class Retrier:
    """Repeats requests that failed with a transient error.

    A throttled request is repeated without limit, after the time that the server asks for.
    """

    def __init__(
        self, *, pause: Callable[[float], None], on_retry: Callable[[str], None], await_server: bool = False
    ) -> None:
        """``on_retry`` gets the reason before each ``pause``. ``await_server``: the server may still be starting."""
        self._pause, self._on_retry = pause, on_retry
        self._transient = (Unreachable, BrokenOff, ServerTrouble) if await_server else (BrokenOff, ServerTrouble)

    def few_times(self, call: Callable[[], T]) -> T:
        """Try a few times.

        Without ``await_server``, an unreachable address is most likely a wrong one, so that error is raised at once.
        """
        return self._retry(call, iter(_FEW_WAITS_SECONDS), self._transient)

    def forever(self, call: Callable[[], T]) -> T:
        """Try for as long as it takes: the batch is durable on the server."""
        waits = chain(_FEW_WAITS_SECONDS, repeat(_MAX_WAIT_SECONDS))
        return self._retry(call, waits, (Unreachable, BrokenOff, ServerTrouble))

    def wait(self, error: ClientError, *, failures: int) -> None:
        """Wait after this many failed attempts in a row. Raise the error if no attempt is left."""
        if failures > len(_FEW_WAITS_SECONDS):
            raise error
        self._wait(error, _FEW_WAITS_SECONDS[failures - 1])

    def _retry(self, call: Callable[[], T], waits: Iterator[float], transient: tuple[type[ClientError], ...]) -> T:
        while True:
            try:
                return call()
            except Throttled as error:
                self._wait(error, _FEW_WAITS_SECONDS[0])
            except transient as error:
                wait = next(waits, None)
                if wait is None:
                    raise
                self._wait(error, wait)

    def _wait(self, error: ClientError, seconds: float) -> None:
        self._on_retry(str(error))
        self._pause(seconds if error.retry_after is None else error.retry_after)
