"""Judges whether the queue that an engine reports keeps it busy, and whether it is longer than that.

::

    waiting : processed    0 ──────── 0.25 ─────────── 1.25 ────────>
                             short            enough         long
                         (may run empty)                 (only if all of them are ours)
"""

from collections import deque
from enum import Enum

from batchline.domain.engine_queue import QueueLength

_USED_SECONDS = 15.0
"""The time for which a reading is used."""
_OWN_PART, _OWN_FACTOR = 0.5, 1.25
"""An engine that has less than this part of our requests in flight is not the one that answers them, or only one of
several; one that has more than this factor has those of others too. Some of ours may be on their way at the moment of
a reading, and some of the last ones may still be counted."""
_READINGS = 4
_SHORT, _ENOUGH, _LONG = 0.25, 1.0, 1.25
"""The length of a queue as a part of the requests that are processed. A short one may run empty between two steps of
the engine. One that is enough lasts even if all requests end in the same step, as equally long ones do."""


class _Size(Enum):
    SHORT = "short"
    ENOUGH = "enough"
    """It may be longer than is needed: these requests may all have come since the last step, or be those of others."""
    LONG = "long"
    """All requests in it are ours, so a lower limit would shorten it."""


class ReportedQueue:
    """The last length of an engine's queue.

    Requests that came during a step of the engine wait until the next one, so an engine whose answers need few steps
    has a queue at any limit; but no more wait for the next step than are in this one. A long queue may be that of other
    clients or of another model, and then it says nothing.
    """

    def __init__(self) -> None:
        self._size: _Size | None = None
        self._until = 0.0
        """The time until which the last reading is used."""
        self._processed: deque[float] = deque(maxlen=_READINGS)
        """The number of requests that the engine processed, in the last readings."""

    def read(self, length: QueueLength, *, in_flight: int, now: float) -> bool:
        """Judge a reading with so many of our requests ``in_flight``, and return whether it is about them."""
        if length.running is not None and length.running + length.waiting < _OWN_PART * in_flight:
            return False
        # Between two steps an engine may process fewer for a moment, so the largest of the last readings counts.
        self._processed.append(max(length.running or 0.0, in_flight - length.waiting))
        self._until = now + _USED_SECONDS
        part = length.waiting / max(1.0, *self._processed)
        is_ours = length.running is not None and length.running + length.waiting <= _OWN_FACTOR * in_flight
        if part <= _SHORT:
            self._size = _Size.SHORT
        elif part <= _LONG or not is_ours:
            self._size = _Size.ENOUGH
        else:
            self._size = _Size.LONG
        return True

    def is_known(self, now: float) -> bool:
        return now < self._until

    def is_short(self, now: float) -> bool:
        return self._size is _Size.SHORT and self.is_known(now)

    def is_enough(self, now: float) -> bool:
        """Return whether the engine has enough to do; it may have more than that."""
        return self._size in {_Size.ENOUGH, _Size.LONG} and self.is_known(now)

    def is_long(self, now: float) -> bool:
        return self._size is _Size.LONG and self.is_known(now)

    @property
    def lowest_limit(self) -> int:
        """The limit at which the engine would always have enough to do, and no more."""
        return int((1 + _ENOUGH) * max(self._processed)) + 1
