"""Lets requests start so that their average number in flight is a limit, which may be a fraction.

A refused request keeps its slot for as long as an answer would take. Otherwise its slot would be used again at once,
and a limit on the number in flight would not limit the rate.
"""

from collections import deque
from collections.abc import Sequence
from math import inf

_LATENCY_WEIGHT = 1 / 32
"""The weight of one more answer in the mean latency."""
_FIRST_LATENCY_SECONDS = 0.1
"""The latency that is assumed while nothing was answered."""
_LARGEST_PACE, _LEAST_PACE = 2.0, 1.05
"""Starts follow each other at most so many times as fast as the limit allows on average. Otherwise slots that become
free together would make a burst, which an upstream with a limit on the rate refuses. Some upstreams refuse any two
requests that are closer to each other than their rate allows."""
_PACE_GAIN = 0.02
"""A sample without refusals adds this to the pace."""
_ROUNDING = 1e-6
GOLDEN_RATIO = 0.6180339887
"""Its multiples, without their whole part, are spread evenly between 0 and 1."""


class Slots:
    """The slots of one model."""

    def __init__(self) -> None:
        self.limit = inf
        """The number of requests that may be in flight on average."""
        self.started = 0
        """The number of requests that were started in all."""
        self.most_taken = 0
        """The most slots that were taken at once since the limit was set."""
        self.latency_seconds = 0.0
        """The mean latency of the last answers; 0 while there was none."""
        self._pace = _LARGEST_PACE
        self._even_seconds = 0.0
        """The latency that even spaces are derived from; 0 if the spaces are not even."""
        self._last_start = -inf
        self._refused_until: deque[float] = deque()
        """The times at which the slots of refused requests are free again."""

    @property
    def usual_seconds(self) -> float:
        """The seconds for which a request takes its slot."""
        return self._even_seconds or self.latency_seconds or _FIRST_LATENCY_SECONDS

    @property
    def is_even(self) -> bool:
        """Whether starts are spaced evenly, and only that limits them."""
        return self._even_seconds > 0

    def space_evenly(self) -> None:
        """Let one request start at a time, at the rate of the limit. It does not follow the latency any more."""
        self._even_seconds = self.usual_seconds
        self._refused_until.clear()

    def space_freely(self) -> None:
        """Let requests start whenever slots are free."""
        self._even_seconds = 0.0

    def set_limit(self, limit: float) -> None:
        """Set the limit. Requests that were refused before take no slot any more."""
        self.limit, self.most_taken = limit, 0
        self._refused_until.clear()

    def free(self, in_flight: int, now: float) -> int:
        """Return the number of requests that may start beside those in flight.

        With a limit of 7.3, eight may be in flight for three of ten starts, and seven for the others.
        """
        spaced = (now - self._last_start) / self._spacing_seconds + _ROUNDING
        return int(min(self._untaken(in_flight, now), spaced))

    def is_full(self, in_flight: int, now: float) -> bool:
        """Return whether the limit holds back a start, and not only the space between two of them."""
        has_slots = self.limit >= 1 and not self.is_even
        return self._untaken(in_flight, now) <= 0 if has_slots else self.free(in_flight, now) <= 0

    def next_free(self, in_flight: int, now: float) -> float:
        """Return the time at which a request may start even if none ends; infinity if one must end first."""
        if self._untaken(in_flight, now) > 0:
            return self._last_start + self._spacing_seconds
        return self._refused_until[0] if self._refused_until else inf

    def slow_down(self) -> None:
        """Space the starts more evenly, because many were refused."""
        self._pace = max(_LEAST_PACE, 1 + (self._pace - 1) / 2)

    def speed_up(self) -> None:
        """Allow more of a burst again, because none was refused."""
        self._pace = min(_LARGEST_PACE, self._pace + _PACE_GAIN)

    def on_start(self, now: float, count: int, in_flight: int) -> None:
        """Count starts. ``in_flight`` includes them."""
        self.started += count
        spacing = self._spacing_seconds
        due = self._last_start + count * spacing
        # Timers are a little late. What they are late by counts for the next start.
        self._last_start = due if 0 < now - due < spacing and not self._is_strict else now
        self.most_taken = max(self.most_taken, in_flight + len(self._refused_until))

    def on_answers(self, latencies: Sequence[float]) -> None:
        mean = self.latency_seconds or latencies[0]
        for latency in latencies:
            mean += _LATENCY_WEIGHT * (latency - mean)
        self.latency_seconds = mean

    def on_refusal(self, started: float) -> None:
        """Let a refused request keep its slot. At a limit below 1, the time between two starts has the same effect."""
        if self.limit >= 1 and not self.is_even:
            self._refused_until.append(started + self.usual_seconds)

    def _untaken(self, in_flight: int, now: float) -> int:
        if self.is_even:
            return 1
        if self.limit < 1:
            return 1 - in_flight
        while self._refused_until and self._refused_until[0] <= now:
            self._refused_until.popleft()
        return int(self.limit + self.started * GOLDEN_RATIO % 1) - in_flight - len(self._refused_until)

    @property
    def _is_strict(self) -> bool:
        """Whether each two starts must have the whole space between them."""
        return self.is_even or self.limit < 1

    @property
    def _spacing_seconds(self) -> float:
        pace = 1.0 if self._is_strict else self._pace
        return self.usual_seconds / (pace * self.limit)
