"""Measures what is in flight to an upstream, and how many answers per second that gives."""

from collections import deque
from math import exp, log

from msgspec import Struct

_MIN_WAIT_SECONDS, _MIN_WAIT_ROUNDS = 2.0, 5
"""How long more answers are awaited, at least, before a measurement is taken although it is noisy."""
_SLOW_ROUNDS = 10
"""A request that outlasts so many rounds of others is slow."""
_MIN_LOG_LATENCY = log(1e-6)


class Start(Struct, gc=False):
    """A request in flight."""

    at: float
    in_flight: int
    """How many were in flight when it started, including itself."""
    slow_after: int
    """The number of all answers after which it no longer counts as in flight."""
    ended: bool = False
    slow: bool = False


class Measure(Struct, frozen=True, kw_only=True):
    """Answers per second with so many in flight, both on average over a window of time."""

    load: float
    rate: float
    latency: float
    """The geometric mean, since one slow answer would dominate the arithmetic one."""
    answers: int
    at: float


def gain(before: Measure, after: Measure) -> float:
    """Return by how much the rate grew, as a logarithm."""
    return log(after.rate / before.rate)


def spread(before: Measure, after: Measure) -> float:
    """Return by how much the load grew, as a logarithm."""
    return log(after.load / before.load)


def mean(one: Measure, other: Measure) -> Measure:
    return Measure(
        load=(one.load + other.load) / 2,
        rate=(one.rate + other.rate) / 2,
        latency=(one.latency + other.latency) / 2,
        answers=one.answers + other.answers,
        at=max(one.at, other.at),
    )


class Window(Struct, frozen=True, kw_only=True):
    """What must happen until a measurement is complete."""

    round: int
    """As many answers as may be in flight. Requests that started together tend to end together, so only whole rounds of
    them show a rate."""
    rounds: int
    settle: bool = True
    """Whether to skip a round first, whose requests were sent under the former limit."""
    seconds: float = 0.0
    precise: float = 0.0
    """Answers to wait for, within reason, because fewer are too noisy."""

    def complete(self, *, answers: int, seconds: float) -> bool:
        patient = seconds < _MIN_WAIT_SECONDS or answers < _MIN_WAIT_ROUNDS * self.round
        return seconds >= self.seconds and not (patient and answers < self.precise)


class ThroughputMeter:
    """Counts starts and ends, and returns a measurement for each complete window."""

    def __init__(self, window: Window) -> None:
        self.in_flight = 0
        """Requests in flight without the slow ones. The number of slow ones says little about the load, and if they
        hang they must not keep others from starting. While no other request is answered, none is slow."""
        self.slow = 0
        self._started: deque[Start] = deque()
        self._all_answers = 0
        self._area = self._area_before = 0.0
        """The sum of the seconds that requests were in flight."""
        self._now = self._since = 0.0
        self._window = window
        self._to_skip = self._answers = self._wanted = 0
        self._times = self._weighted_times = self._log_latencies = 0.0
        self.open(window)

    def open(self, window: Window) -> None:
        """Begin a new measurement."""
        self._window = window
        self._to_skip = window.round if window.settle else 0
        self._begin()

    def started(self, now: float, count: int) -> list[Start]:
        if not self.in_flight and not self._answers:
            # Nothing was in flight, so nothing could be answered. That time does not count.
            self._since = now
        self._area += self.in_flight * (now - self._now)
        self._now = now
        slow_after = self._all_answers + _SLOW_ROUNDS * self._window.round
        starts = [Start(now, self.in_flight + nth, slow_after) for nth in range(1, count + 1)]
        self.in_flight += count
        self._started += starts
        return starts

    def ended(self, start: Start, now: float) -> None:
        self._area += self.in_flight * (now - self._now)
        self._now = now
        start.ended = True
        if start.slow:
            self.slow -= 1
        else:
            self.in_flight -= 1
        started = self._started
        while started and ((first := started[0]).ended or first.slow_after < self._all_answers):
            started.popleft()
            if not first.ended:
                self._set_aside(first)

    def answered(self, start: Start) -> Measure | None:
        """Count the request that ended last as answered, and return the measurement if its window is complete."""
        self._all_answers += 1
        if self._to_skip:
            self._to_skip -= 1
            self._begin()
            return None
        now = self._now
        self._answers += 1
        seconds = now - self._since
        self._times += seconds
        self._weighted_times += seconds * self._answers
        self._log_latencies += log(now - start.at) if now > start.at else _MIN_LOG_LATENCY
        return self._measure(seconds) if self._answers >= self._wanted else None

    def _set_aside(self, start: Start) -> None:
        start.slow = True
        self.slow += 1
        self.in_flight -= 1

    def _begin(self) -> None:
        self._since, self._area_before = self._now, self._area
        self._answers, self._wanted = 0, self._window.round * self._window.rounds
        self._times = self._weighted_times = self._log_latencies = 0.0

    def _measure(self, seconds: float) -> Measure | None:
        if seconds <= 0 or not self._window.complete(answers=self._answers, seconds=seconds):
            self._wanted += self._window.round
            return None
        return Measure(
            load=(self._area - self._area_before) / seconds,
            rate=1 / (self._interval or seconds / self._answers),
            latency=exp(self._log_latencies / self._answers),
            answers=self._answers,
            at=self._now,
        )

    @property
    def _interval(self) -> float:
        """The seconds from one answer to the next; 0 if all arrived at once.

        It is the slope through the times of all answers, since either end of the window may lie in a burst.
        """
        count = self._answers
        covariance = self._weighted_times - (count + 1) / 2 * self._times
        return max(0.0, 12 * covariance / (count * (count * count - 1)))
