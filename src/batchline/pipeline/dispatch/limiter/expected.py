"""Notices that the throughput at a limit that is held is not the expected one any more."""

from math import log

from batchline.pipeline.dispatch.limiter.noise import Noise
from batchline.pipeline.dispatch.limiter.rounds import Measure

_MOVED, _ERRORS = 0.3, 3
"""The upstream has changed if the throughput, as a logarithm, is off by more than this in two rounds in a row, and by
more than so many standard errors."""
_NEW_PART = 0.3
"""The weight of the last round."""


class Expected:
    """The throughput of the rounds at a limit that is held."""

    def __init__(self, noise: Noise) -> None:
        self._noise = noise
        self._last: Measure | None = None
        self._rate: float | None = None
        """The throughput, as a logarithm."""
        self._rounds_off = 0
        """The number of rounds in a row that had another throughput than expected."""

    def forget(self) -> None:
        self._last, self._rate, self._rounds_off = None, None, 0

    def moved_by(self, measure: Measure) -> float:
        """Return by how much the throughput has changed, as a logarithm, or 0.0 if it is as expected."""
        if self._last is not None:
            self._noise.add(self._last, measure)
        self._last = measure
        rate = log(measure.rate)
        if self._rate is None:
            self._rate = rate
        change = rate - self._rate
        if abs(change) > max(_MOVED, _ERRORS * self._noise.error(measure)):
            self._rounds_off += 1
            return change if self._rounds_off > 1 else 0.0
        self._rounds_off = 0
        self._rate += _NEW_PART * change
        return 0.0
