"""Measures the throughput of an upstream by rounds of requests.

A round is a group of requests that start at the same limit, about as many as may be in flight. By Little's law the
throughput is the number in flight divided by the latency. So it is the sum of the numbers that were in flight when each
request started, divided by the sum of their latencies. Engines that batch answer in waves: answers counted per second
would depend on the part of a wave that a second happens to contain, while the latency of a request spans whole waves.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import inf, sqrt
from operator import attrgetter
from statistics import StatisticsError, correlation, fmean, linear_regression

USED_PART = 0.85
"""A request that starts while less than this part of the limit is in flight shows nothing about the limit."""
HOLD_PART = 0.9
"""The part of a round that must have ended."""
LEAST_SECONDS, QUICK_SECONDS = 0.05, 1.0
"""A round should take at least the first: in less time the turns of this process, each of which handles up to 64
answers, show more than the upstream. If it takes less than the second, a longer one costs little."""
_EXCEEDED_PART = 1.15
"""Nor does one that starts while more than this part of the limit is in flight: those of a higher limit have not ended
yet."""
_LAST_PART = 2 / 3
"""If requests queued, those that started while at least this part of the highest number was in flight show the
throughput."""
_SAME_WAVE = 0.97
"""Requests whose latencies differ by less than this factor ended in the same wave."""
_OVERTAKEN = 2.0
"""A round is overtaken when so many times its size were answered of the requests that started after all of its own."""
_REPRESENTED_PART = 0.8
"""The models whose requests have ended must have this part of the requests in flight."""
_MIN_LATENCY_SECONDS = 1e-6
_MAX_MODELS = 1000
"""The most models to remember. A file may name any number of them."""


class Measure:
    """Answers per second with so many in flight, at a limit."""

    def __init__(self, limit: int, answers: Sequence["Answer"]) -> None:
        self.limit = limit
        loads, latencies = zip(*answers, strict=True)
        self.load, mean = fmean(loads), fmean(latencies)
        self.latency = max(_MIN_LATENCY_SECONDS, mean)
        # The deviation of the module statistics is exact, and takes ten times as long.
        self.variation = sqrt(fmean([(latency - mean) ** 2 for latency in latencies])) / self.latency
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

    It is complete when ``part`` of its ``size`` requests have ended, and that part of the requests of nearly every
    model: waiting for the last of them would wait for the slowest request of all. If there is a very slow model, the
    round is overtaken by the requests of other models.
    """

    __slots__ = (
        "_answers",
        "_ends",
        "_full",
        "_highest",
        "_idle",
        "_overtaking",
        "_part",
        "_started",
        "_started_of",
        "_until",
        "limit",
        "since",
        "size",
    )

    def __init__(self, limit: int, *, size: int, full: bool, part: float, since: float) -> None:
        self.limit, self.size, self.since, self._full, self._part = limit, size, since, full, part
        self._started = self._idle = self._highest = self._overtaking = 0
        self._started_of: Counter[str] = Counter()
        self._until = inf
        """The time at which the last of its requests started; infinity while more may start."""
        self._ends: list[tuple[str, int, int, float]] = []
        """The model of each answer, the numbers that were in flight when its request started, and its latency."""
        self._answers: list[Answer] = []

    def add(self, model: str, in_flight: int, now: float) -> bool:
        """Add a request that starts, if it belongs to this round, and return whether it was added."""
        if self._started >= self.size:
            return False
        if self._full and in_flight < USED_PART * self.limit:
            self._idle += 1
            return False
        if self._full and in_flight > _EXCEEDED_PART * self.limit:
            return False
        self._started += 1
        self._started_of[model] += 1
        if self._started >= self.size:
            self._until = now
        self._highest = max(self._highest, in_flight)
        return True

    def extend(self, part: float) -> bool:
        """Wait until a larger part of its requests has ended, and return whether the part is larger than before."""
        extended, self._part = part > self._part, max(part, self._part)
        return extended

    def remove(self, model: str) -> None:
        """Take out a request that had no answer."""
        self._started -= 1
        self._started_of[model] -= 1
        self._until = inf

    def overtake(self, started: float) -> bool:
        """Count an answer to a request outside of the round, and return whether the round is overtaken."""
        self._overtaking += started >= self._until
        return self._overtaking >= _OVERTAKEN * self.size

    def end(self, model: str, in_flight: int, of_model: int, latency: float) -> bool:
        """Count an answer, and return whether the round is complete.

        When its request started, ``in_flight`` were in flight, and ``of_model`` of them were of its model.
        """
        self._ends.append((model, in_flight, of_model, latency))
        if self._started < self.size or len(self._ends) < self._part * self.size:
            return False
        return len(self._started_of) == 1 or self._is_representative

    @property
    def _is_representative(self) -> bool:
        """Whether enough requests have ended of the models that have most requests in flight."""
        ended, in_flight = Counter[str](), Counter[str]()
        for model, _, of_model, _ in self._ends:
            ended[model] += 1
            in_flight[model] = max(in_flight[model], of_model)
        represented = sum(in_flight[model] for model in ended if ended[model] >= self._part * self._started_of[model])
        return represented >= _REPRESENTED_PART * self._highest

    def scale(self, usual: dict[str, float]) -> None:
        """Express each latency as a multiple of the usual one of its model, and add models that are not in ``usual``.

        Otherwise a round with more requests of a slow model than the round before would seem to be slower. If there
        are several models, Little's law holds for each of them, and the throughput is the sum of theirs: one model may
        queue while another has room for more. All latencies are then multiplied so that they show this sum.
        """
        if len(usual) > _MAX_MODELS:
            usual.clear()
        latencies, in_flight = defaultdict[str, list[float]](list), defaultdict[str, list[int]](list)
        for model, _, of_model, latency in self._ends:
            latencies[model].append(latency)
            in_flight[model].append(of_model)
        means = {model: max(_MIN_LATENCY_SECONDS, fmean(each)) for model, each in latencies.items()}
        factors = {model: 1 / usual.setdefault(model, mean) for model, mean in means.items()}
        if len(means) > 1:
            rate = sum(fmean(in_flight[model]) / (mean * factors[model]) for model, mean in means.items())
            load = fmean([number for _, number, _, _ in self._ends])
            factors = {model: load / rate / mean for model, mean in means.items()}
        self._answers = [(in_flight, latency * factors[model]) for model, in_flight, _, latency in self._ends]

    @property
    def is_used(self) -> bool:
        """Whether the limit was reached. Otherwise there was too little to do."""
        return self._highest >= USED_PART * self.limit

    @property
    def is_unused(self) -> bool:
        """Whether many requests started while too few were in flight to show anything."""
        return self._idle > self.size

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
        return max(_MIN_LATENCY_SECONDS, fmean([latency for _, _, _, latency in self._ends]))

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
