"""Measures the throughput of an upstream by rounds of requests.

A round is a group of requests that start at the same limit, about as many as may be in flight. By Little's law the
throughput is the number in flight divided by the latency, so it is the sum of what was in flight when each started,
divided by the sum of their latencies. Engines that batch answer in waves: answers counted per second would depend on
the part of a wave that a second happens to contain, while the latency of each request spans whole waves.
"""

from collections.abc import Sequence
from math import sqrt
from statistics import StatisticsError, correlation, fmean, pstdev

_USED_PART = 0.85
"""A request that starts with less than this part of the limit in flight shows nothing about the limit."""
_LAST_PART = 2 / 3
"""If requests queued, those that started with more than this part of the most in flight show the throughput."""
_MIN_LATENCY_SECONDS = 1e-6
_MAX_MODELS = 1000
"""Models to remember. A file may name any number of them."""


class Measure:
    """Answers per second with so many in flight, at a limit."""

    def __init__(self, limit: int, answers: Sequence["Answer"]) -> None:
        self.limit = limit
        self.load = fmean(in_flight for in_flight, _ in answers)
        self.latency = max(_MIN_LATENCY_SECONDS, fmean(latency for _, latency in answers))
        self.variation = pstdev(latency for _, latency in answers) / self.latency
        """The standard deviation of the latency divided by its mean."""
        self._answers = len(answers)

    @property
    def rate(self) -> float:
        return self.load / self.latency

    @property
    def error(self) -> float:
        """The relative standard error of the rate."""
        return self.variation / sqrt(self._answers)


Answer = tuple[int, float]
"""How many were in flight when a request started, including itself, and its latency."""


class Round:
    """One measurement in progress. ``full`` says that only requests with a full upstream beside them count.

    It is complete when ``part`` of its ``size`` requests have ended: waiting for the last of them would wait for the
    slowest request of all.
    """

    __slots__ = ("_answers", "_full", "_highest", "_latencies", "_part", "_started", "limit", "since", "size")

    def __init__(self, limit: int, *, size: int, full: bool, part: float, since: float) -> None:
        self.limit, self.size, self.since, self._full, self._part = limit, size, since, full, part
        self._started = self._highest = 0
        self._latencies: list[tuple[str, int, float]] = []
        self._answers: list[Answer] = []

    def add(self, in_flight: int) -> bool:
        """Add a request that starts, if it belongs to this round, and return whether it was added."""
        if self._started >= self.size or (self._full and in_flight < _USED_PART * self.limit):
            return False
        self._started += 1
        self._highest = max(self._highest, in_flight)
        return True

    def extend(self, part: float) -> bool:
        """Wait for more of its requests, and return whether that was still to do."""
        extended, self._part = part > self._part, max(part, self._part)
        return extended

    def remove(self) -> None:
        """Take out a request that had no answer."""
        self._started -= 1

    def end(self, model: str, in_flight: int, latency: float) -> bool:
        """Count an answer, and return whether the round is complete."""
        self._latencies.append((model, in_flight, latency))
        return self._started >= self.size and len(self._latencies) >= self._part * self.size

    def scale(self, usual: dict[str, float]) -> None:
        """Express each latency as a multiple of what is usual for its model, and add what is not known yet.

        Otherwise a round with more requests of a slow model than the round before would seem to be slower.
        """
        if len(usual) > _MAX_MODELS:
            usual.clear()
        for model in {model for model, _, _ in self._latencies} - usual.keys():
            usual[model] = max(_MIN_LATENCY_SECONDS, fmean(each[2] for each in self._latencies if each[0] == model))
        self._answers = [(in_flight, latency / usual[model]) for model, in_flight, latency in self._latencies]

    @property
    def is_used(self) -> bool:
        """Whether the limit was reached. Otherwise there was too little to do."""
        return self._highest >= _USED_PART * self.limit

    @property
    def correlation(self) -> float:
        """How much the latency of a request depends on how many were in flight before it, from -1 to 1.

        It is near 1 if the upstream queues: a request that starts later waits longer. It is near 0 if the upstream
        shares its capacity among all requests, or has enough for all.
        """
        try:
            return correlation(*zip(*self._answers, strict=True))
        except StatisticsError:
            return 0.0

    @property
    def measure(self) -> Measure:
        return Measure(self.limit, self._answers)

    @property
    def last_measure(self) -> Measure:
        """The measure by the requests that started last, when the upstream was busiest."""
        least = _LAST_PART * max(in_flight for in_flight, _ in self._answers)
        return Measure(self.limit, [answer for answer in self._answers if answer[0] >= least])
