"""Measures how much the throughput of an upstream changes by itself from one round to the next.

The latencies of one round do not show this: on a machine that does other work too, all requests of a round may be
quicker than those of the next. So it is learnt from pairs of rounds at the same limit.
"""

from math import log, sqrt

from batchline.pipeline.dispatch.limiter.rounds import Measure

_PAIRS = 12
"""About so many of the last pairs count."""
_MOST_CHANGE = 0.3
"""The most that a pair counts for, as a logarithm. If the throughput changes by more, the upstream itself has changed,
and its limit must be found."""


class Noise:
    """The variance of the throughput of rounds at the same limit."""

    def __init__(self) -> None:
        self._pairs = 0
        self._variance = 0.0

    def add(self, before: Measure, after: Measure) -> None:
        """Learn from two rounds at the same limit, of which one was soon after the other."""
        change = min(_MOST_CHANGE, abs(log(after.rate / before.rate)))
        self._pairs = min(_PAIRS, self._pairs + 1)
        self._variance += (change**2 / 2 - self._variance) / self._pairs

    def error(self, measure: Measure) -> float:
        """Return the relative error of a rate: that of its round, or what rounds differ by if that is more."""
        return max(measure.error, sqrt(self._variance))
