"""When a request is worth another try, and how long to wait before it."""

from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import TypeVar

from batchline.client.errors import BrokenOff, ClientError, Throttled, Trouble, Unreachable

T = TypeVar("T")

PASSING: tuple[type[ClientError], ...] = (Unreachable, BrokenOff, Throttled, Trouble)
"""What may be over at the next try."""

_FEW_WAITS = (0.5, 1.0, 2.0, 4.0)
_LONGEST_WAIT = 15.0


class Retrying:
    def __init__(
        self, *, pause: Callable[[float], None], waiting: Callable[[str], None], await_server: bool = False
    ) -> None:
        """``waiting`` hears why, each time before ``pause``. ``await_server``: the server may be on its way."""
        self._pause, self._waiting = pause, waiting
        self._passing = (Unreachable, BrokenOff, Trouble) if await_server else (BrokenOff, Trouble)

    def soon(self, call: Callable[[], T]) -> T:
        """A few tries. Nobody at the address is most likely a wrong address, which is told at once."""
        return self._answer(call, iter(_FEW_WAITS), self._passing)

    def long(self, call: Callable[[], T]) -> T:
        """For as long as it takes: the work is durable on the other side."""
        return self._answer(call, chain(_FEW_WAITS, repeat(_LONGEST_WAIT)), (Unreachable, BrokenOff, Trouble))

    def again(self, fault: ClientError, *, tries: int) -> None:
        """Wait before the next of a few tries, of which ``tries`` came to nothing; raises the fault after them."""
        if tries > len(_FEW_WAITS):
            raise fault
        self._wait(fault, _FEW_WAITS[tries - 1])

    def _answer(self, call: Callable[[], T], waits: Iterator[float], passing: tuple[type[ClientError], ...]) -> T:
        while True:
            try:
                return call()
            except Throttled as fault:
                self._wait(fault, _FEW_WAITS[0])
            except passing as fault:
                wait = next(waits, None)
                if wait is None:
                    raise
                self._wait(fault, wait)

    def _wait(self, fault: ClientError, seconds: float) -> None:
        self._waiting(str(fault))
        self._pause(seconds if fault.retry_after is None else fault.retry_after)
