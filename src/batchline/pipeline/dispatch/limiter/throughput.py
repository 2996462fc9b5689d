"""What is in flight to an upstream, and how many answers a second come of it."""

from collections import deque
from math import exp, log

from msgspec import Struct

_PATIENCE_SECONDS, _PATIENCE_ROUNDS = 2.0, 5
"""What may be waited for at least before a measure is taken as it is."""
_SLOW_ROUNDS = 10
"""Rounds of others that a request may outlast."""
_NO_LATENCY = log(1e-6)


class Start(Struct, gc=False):
    """A request under way."""

    at: float
    in_flight: int
    """With itself."""
    slow_after: int
    """Answers to others after which it no longer counts as in flight."""
    ended: bool = False
    slow: bool = False


class Measure(Struct, frozen=True, kw_only=True):
    """Answers a second with so many in flight, both on average over a window of time."""

    load: float
    rate: float
    latency: float
    """Its geometric mean: one slow answer would outweigh many."""
    answers: int
    at: float


def gain(before: Measure, after: Measure) -> float:
    """By how much the rate grew, as a logarithm."""
    return log(after.rate / before.rate)


def spread(before: Measure, after: Measure) -> float:
    """By how much the load grew, as a logarithm."""
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
    """What to wait for until a rate is measured."""

    round: int
    """Answers to as many as may be in flight. Requests that started together tend to end together, and only whole
    rounds of them tell a rate."""
    rounds: int
    settle: bool = True
    """Whether to pass over a round first, which was still sent as things were before."""
    seconds: float = 0.0
    precise: float = 0.0
    """Answers to wait for, within reason, as fewer are too noisy."""

    def complete(self, *, answers: int, seconds: float) -> bool:
        patient = seconds < _PATIENCE_SECONDS or answers < _PATIENCE_ROUNDS * self.round
        return seconds >= self.seconds and not (patient and answers < self.precise)


class ThroughputMeter:
    def __init__(self, window: Window) -> None:
        self.in_flight = 0
        """Without the slow ones. Their number says little about the load, and if they hang they must not keep the
        others from starting. Without answers to others nobody is slow."""
        self.slow = 0
        self._under_way: deque[Start] = deque()
        self._all_answers = 0
        self._area = self._area_before = 0.0
        """Seconds that requests were in flight, all together."""
        self._now = self._since = 0.0
        self._window = window
        self._to_skip = self._answers = self._wanted = 0
        self._times = self._weighted_times = self._log_latencies = 0.0
        self.open(window)

    def open(self, window: Window) -> None:
        """Begin to measure."""
        self._window = window
        self._to_skip = window.round if window.settle else 0
        self._begin()

    def started(self, now: float, count: int) -> list[Start]:
        if not self.in_flight and not self._answers:
            # Nothing was asked, so that nothing could be answered.
            self._since = now
        self._area += self.in_flight * (now - self._now)
        self._now = now
        slow_after = self._all_answers + _SLOW_ROUNDS * self._window.round
        starts = [Start(now, self.in_flight + nth, slow_after) for nth in range(1, count + 1)]
        self.in_flight += count
        self._under_way += starts
        return starts

    def ended(self, start: Start, now: float) -> None:
        self._area += self.in_flight * (now - self._now)
        self._now = now
        start.ended = True
        if start.slow:
            self.slow -= 1
        else:
            self.in_flight -= 1
        under_way = self._under_way
        while under_way and ((first := under_way[0]).ended or first.slow_after < self._all_answers):
            under_way.popleft()
            if not first.ended:
                self._set_aside(first)

    def answered(self, start: Start) -> Measure | None:
        """What ended last was answered. The measure, when its window is complete."""
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
        self._log_latencies += log(now - start.at) if now > start.at else _NO_LATENCY
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
        """Seconds from one answer to the next, by all their times: either end of the window may lie in a burst. Zero
        when all came at once."""
        count = self._answers
        covariance = self._weighted_times - (count + 1) / 2 * self._times
        return max(0.0, 12 * covariance / (count * (count * count - 1)))
