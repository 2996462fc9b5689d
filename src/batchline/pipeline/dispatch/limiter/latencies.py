"""Remembers how long the requests of an upstream take, and how long they took when it was least busy."""

from math import inf

from batchline.pipeline.dispatch.limiter.rounds import Measure, Round

_LONG_WAIT_SECONDS = 1.0
"""If requests wait longer than this in the queue of the upstream, it is worth to look for a limit below a few: the
requests of another project, and of synchronous calls, wait there too."""


class Latencies:
    """The latencies of rounds, as multiples of what is usual for each model."""

    def __init__(self) -> None:
        self.usual: dict[str, float] = {}
        """The mean latency of each model in its first round, in seconds. All latencies are divided by it."""
        self.least = inf
        """The lowest mean latency of any round, or the lowest latency of a request in one that queued deeply."""
        self.mean_seconds = inf
        """The mean latency of the last round in seconds; infinity before the first."""

    def add(self, round_: Round, measure: Measure) -> None:
        self.least = min(self.least, measure.latency)
        self.mean_seconds = round_.mean_seconds

    @property
    def least_of_models(self) -> dict[str, float]:
        """The lowest mean latency of each model in seconds."""
        return {model: usual * self.least for model, usual in self.usual.items()}

    def wait_long(self, measure: Measure) -> bool:
        """Return whether the requests of the last round took much longer than at the lowest latency."""
        return self.mean_seconds * (1 - self.least / measure.latency) > _LONG_WAIT_SECONDS

    def least_limit(self, measure: Measure) -> float:
        """Return the limit that is needed for the throughput of a round by Little's law, if none of it waits."""
        return measure.limit * self.least / measure.latency
