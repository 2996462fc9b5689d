"""Measures the throughput of an upstream by rounds of requests.

A round is a group of requests that start at the same limit, about as many as may be in flight. By Little's law the
throughput is the number in flight divided by the latency. So it is the sum of the numbers that were in flight when each
request started, divided by the sum of their latencies. Engines that batch answer in waves: answers counted per second
would depend on the part of a wave that a second happens to contain, while the latency of a request spans whole waves.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import inf, sqrt
from operator import attrgetter
from statistics import StatisticsError, correlation, fmean, linear_regression, pstdev

_USED_PART = 0.85
"""A request that starts while less than this part of the limit is in flight shows nothing about the limit."""
_LAST_PART = 2 / 3
"""If requests queued, those that started while at least this part of the highest number was in flight show the
throughput."""
_SAME_WAVE = 0.97
"""Requests whose latencies differ by less than this factor ended in the same wave."""
_OVERTAKEN = 2.0
"""A round is overtaken when so many times its size were answered of the requests that started after all of its own."""
_MIN_LATENCY_SECONDS = 1e-6
_MAX_MODELS = 1000
"""The most models to remember. A file may name any number of them."""


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


Answer = tuple[float, float]
"""The number in flight when a request started, including itself, and its latency."""


class Round:
    """One measurement in progress. ``full`` says that only requests with a full upstream beside them count.

    It is complete when ``part`` of its ``size`` requests have ended: waiting for the last of them would wait for the
    slowest request of all. If its requests are those of a slow model, it is overtaken by the requests of other models.
    """

    __slots__ = (
        "_answers",
        "_full",
        "_highest",
        "_latencies",
        "_overtaking",
        "_part",
        "_started",
        "_until",
        "limit",
        "since",
        "size",
    )

    def __init__(self, limit: int, *, size: int, full: bool, part: float, since: float) -> None:
        self.limit, self.size, self.since, self._full, self._part = limit, size, since, full, part
        self._started = self._highest = self._overtaking = 0
        self._until = inf
        """The time at which the last of its requests started; infinity while more may start."""
        self._latencies: list[tuple[str, int, float]] = []
        self._answers: list[Answer] = []

    def add(self, in_flight: int, now: float) -> bool:
        """Add a request that starts, if it belongs to this round, and return whether it was added."""
        if self._started >= self.size or (self._full and in_flight < _USED_PART * self.limit):
            return False
        self._started += 1
        if self._started >= self.size:
            self._until = now
        self._highest = max(self._highest, in_flight)
        return True

    def extend(self, part: float) -> bool:
        """Wait until a larger part of its requests has ended, and return whether the part is larger than before."""
        extended, self._part = part > self._part, max(part, self._part)
        return extended

    def remove(self) -> None:
        """Take out a request that had no answer."""
        self._started -= 1
        self._until = inf

    def overtake(self, started: float) -> bool:
        """Count an answer to a request outside of the round, and return whether the round is overtaken."""
        self._overtaking += started >= self._until
        return self._overtaking >= _OVERTAKEN * self.size

    def end(self, model: str, in_flight: int, latency: float) -> bool:
        """Count an answer, and return whether the round is complete."""
        self._latencies.append((model, in_flight, latency))
        return self._started >= self.size and len(self._latencies) >= self._part * self.size

    def scale(self, usual: dict[str, float]) -> None:
        """Express each latency as a multiple of the usual one of its model, and add models that are not in ``usual``.

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
        """The correlation of the latency of requests with the number in flight when they started, from -1 to 1.

        It is near 1 if the upstream queues: a request that starts later waits longer. It is near 0 if the upstream
        shares its capacity among all requests, or has enough for all.
        """
        try:
            return correlation(*zip(*self._answers, strict=True))
        except StatisticsError:
            return 0.0

    @property
    def quickest(self) -> float:
        """The lowest latency, as a multiple of the usual one."""
        return min(latency for _, latency in self._answers)

    @property
    def mean_seconds(self) -> float:
        """The mean latency in seconds."""
        return fmean(latency for _, _, latency in self._latencies)

    @property
    def measure(self) -> Measure:
        return Measure(self.limit, self._answers)

    @property
    def last_measure(self) -> Measure:
        """The measure by the requests that started or ended last, when the upstream was busiest.

        The higher of both counts. The last to start show too little for an engine that answers in waves, and the last
        to end show too little for an upstream whose latencies vary much.
        """
        least = _LAST_PART * max(in_flight for in_flight, _ in self._answers)
        by_start = Measure(self.limit, [answer for answer in self._answers if answer[0] >= least])
        return max(by_start, self._measure_by_end(), key=attrgetter("rate"))

    def _measure_by_end(self) -> Measure:
        """Return the measure by the requests that ended last.

        An engine that answers in waves ends a request together with some that started after it. So the load of each
        request is the number that had ended by then, and the part of the earlier requests that was left to do. The
        last wave may be incomplete and does not count.
        """
        latencies = sorted(latency for _, latency in self._answers)
        complete = bisect_left(latencies, _SAME_WAVE * latencies[-1]) or len(latencies)
        ended = [bisect_right(latencies, latency / _SAME_WAVE) for latency in latencies[:complete]]
        left = self._left_before(ended, latencies[:complete])
        least = _LAST_PART * ended[-1]
        return Measure(
            self.limit,
            [(left + count, latency) for count, latency in zip(ended, latencies, strict=False) if count >= least],
        )

    def _left_before(self, ended: Sequence[int], latencies: Sequence[float]) -> float:
        """Return the part that was left to do of the requests in flight before, as a number of whole requests.

        It follows from a regression line through the numbers that had ended after each latency.
        """
        before = min(in_flight for in_flight, _ in self._answers) - 1
        try:
            seconds, first = linear_regression(ended, latencies)
        except StatisticsError:
            return 0.0
        return max(0.0, min(before, first / seconds)) if seconds > 0 else 0.0
