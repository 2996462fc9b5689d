"""Simulated servers with limits, and a driver that sends requests to them through a limiter, on virtual time."""

from collections import Counter, deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random
from typing import NamedTuple, Protocol

from batchline.pipeline.dispatch.limiter import Sign, Start

Seconds = Callable[[], float]
"""Returns how long the next request takes."""


class Sent(NamedTuple):
    """A request in flight. Requests are identified by their order."""

    order: int
    at: float
    start: Start


class End(NamedTuple):
    sent: Sent
    sign: Sign


class Server(Protocol):
    def take(self, sent: Sent) -> None: ...

    @property
    def due(self) -> float:
        """The time at which the next request ends."""
        ...

    def end(self) -> End: ...


def steady(seconds: float) -> Seconds:
    return lambda: seconds


def noisy(seconds: float, random: Random, *, noise: float = 0.5) -> Seconds:
    """Return times that differ from the mean by up to that part."""
    return lambda: seconds * random.uniform(1 - noise, 1 + noise)


def lognormal(seconds: float, random: Random, *, sigma: float = 0.5) -> Seconds:
    """Return times with a lognormal distribution around this mean."""
    return lambda: seconds * random.lognormvariate(-sigma * sigma / 2, sigma)


def with_slow_ones(usual: Seconds, random: Random, *, share: float, seconds: float) -> Seconds:
    return lambda: seconds if random.random() < share else usual()


class _Timed:
    """A server that knows the end of a request when it takes it."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, End]] = []

    @property
    def due(self) -> float:
        return self._ends[0][0] if self._ends else inf

    def end(self) -> End:
        return heappop(self._ends)[2]

    def _end_at(self, time: float, sent: Sent, sign: Sign) -> None:
        heappush(self._ends, (time, sent.order, End(sent, sign)))


class Queueing(_Timed):
    """Serves some at once and silently queues the rest."""

    def __init__(self, capacity: float, seconds: Seconds) -> None:
        super().__init__()
        self.capacity, self.seconds = capacity, seconds
        self._queue: deque[Sent] = deque()
        self._serving = 0

    def take(self, sent: Sent) -> None:
        if self._serving < self.capacity:
            self._serve(sent, sent.at)
        else:
            self._queue.append(sent)

    def end(self) -> End:
        now = self.due
        end = super().end()
        self._serving -= 1
        while self._queue and self._serving < self.capacity:
            self._serve(self._queue.popleft(), now)
        return end

    def _serve(self, sent: Sent, now: float) -> None:
        self._serving += 1
        self._end_at(now + self.seconds(), sent, Sign.ANSWERED)


class _Beside(Queueing):
    """A server at which some requests end without taking any capacity."""

    def end(self) -> End:
        if self._ends[0][2].sign is Sign.ANSWERED:
            return super().end()
        return _Timed.end(self)


class Faulty(_Beside):
    """A server at which some requests hang until they time out, and some fail at once."""

    def __init__(
        self, capacity: float, seconds: Seconds, *, random: Random, hang: float, hang_seconds: float, fail: float
    ) -> None:
        super().__init__(capacity, seconds)
        self._random, self._hang, self._hang_seconds, self._fail = random, hang, hang_seconds, fail

    def take(self, sent: Sent) -> None:
        chance = self._random.random()
        if chance < self._hang:
            self._end_at(sent.at + self._hang_seconds, sent, Sign.OVERLOADED)
        elif chance < self._hang + self._fail:
            self._end_at(sent.at + 0.005, sent, Sign.OTHER)
        else:
            super().take(sent)


class Moody(_Beside):
    """Refuses a part of the requests at any rate."""

    def __init__(self, capacity: float, seconds: Seconds, *, random: Random, share: float) -> None:
        super().__init__(capacity, seconds)
        self._random, self._share = random, share

    def take(self, sent: Sent) -> None:
        if self._random.random() < self._share:
            self._end_at(sent.at + 0.005, sent, Sign.THROTTLED)
        else:
            super().take(sent)


class Stormy(_Beside):
    """Answers 503 to everything between two moments."""

    def __init__(self, capacity: float, seconds: Seconds, *, storm: tuple[float, float]) -> None:
        super().__init__(capacity, seconds)
        self._from, self._until = storm

    def take(self, sent: Sent) -> None:
        if self._from <= sent.at < self._until:
            self._end_at(sent.at + 0.01, sent, Sign.OVERLOADED)
        else:
            super().take(sent)


class Stalling(Queueing):
    """Answers nothing between two moments. Requests in flight are delayed by that time."""

    def __init__(self, capacity: float, seconds: Seconds, *, stall: tuple[float, float]) -> None:
        super().__init__(capacity, seconds)
        self._from, self._until = stall

    def _end_at(self, time: float, sent: Sent, sign: Sign) -> None:
        super()._end_at(time + self._until - self._from if self._from <= time < self._until else time, sent, sign)


class RateLimited(_Timed):
    """Has a token bucket, and answers 429 if it is empty."""

    def __init__(self, rate: float, seconds: Seconds, *, burst: float, refusal_seconds: float) -> None:
        super().__init__()
        self.rate, self._seconds = rate, seconds
        self._burst, self._refusal_seconds = burst, refusal_seconds
        self._tokens, self._filled_at = burst, 0.0

    def take(self, sent: Sent) -> None:
        self._tokens = min(self._burst, self._tokens + (sent.at - self._filled_at) * self.rate)
        self._filled_at = sent.at
        if self._tokens >= 1:
            self._tokens -= 1
            self._end_at(sent.at + self._seconds(), sent, Sign.ANSWERED)
        else:
            self._end_at(sent.at + self._refusal_seconds, sent, Sign.THROTTLED)


class SlotLimited(_Timed):
    """Serves some at once and refuses the rest at once."""

    def __init__(self, capacity: int, seconds: Seconds, *, sign: Sign) -> None:
        super().__init__()
        self.capacity, self._seconds, self._sign = capacity, seconds, sign
        self._serving = 0

    def take(self, sent: Sent) -> None:
        if self._serving < self.capacity:
            self._serving += 1
            self._end_at(sent.at + self._seconds(), sent, Sign.ANSWERED)
        else:
            self._end_at(sent.at + 0.005, sent, self._sign)

    def end(self) -> End:
        end = super().end()
        self._serving -= end.sign is Sign.ANSWERED
        return end


class Batching:
    """Divides among all requests a speed that grows with their number n as n/(n+16)."""

    def __init__(self, speed: float, work: Seconds) -> None:
        self._speed, self._work = speed, work
        self._progress, self._at = 0.0, 0.0
        self._ends: list[tuple[float, int, Sent]] = []

    def take(self, sent: Sent) -> None:
        self._advance(sent.at)
        heappush(self._ends, (self._progress + self._work(), sent.order, sent))

    @property
    def due(self) -> float:
        return self._at + (self._ends[0][0] - self._progress) / self._share if self._ends else inf

    def end(self) -> End:
        self._advance(self.due)
        return End(heappop(self._ends)[2], Sign.ANSWERED)

    @property
    def _share(self) -> float:
        return self._speed / (len(self._ends) + 16)

    def _advance(self, now: float) -> None:
        self._progress += (now - self._at) * self._share
        self._at = now


class Limits(Protocol):
    """The interface of a limiter."""

    @property
    def limit(self) -> int: ...

    def room(self) -> int: ...

    def wait(self, now: float) -> float: ...

    def started(self, now: float, count: int) -> list[Start]: ...

    def ended(self, start: Start, sign: Sign, now: float) -> None: ...


class Fixed:
    """A limiter with a fixed limit, for comparison."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._in_flight = 0

    def room(self) -> int:
        return self.limit - self._in_flight

    def wait(self, now: float) -> float:
        return 0.0

    def started(self, now: float, count: int) -> list[Start]:
        self._in_flight += count
        return [Start(now, self._in_flight, 0) for _ in range(count)]

    def ended(self, start: Start, sign: Sign, now: float) -> None:
        self._in_flight -= 1


class Span:
    """Counts of what happened in some seconds."""

    def __init__(self) -> None:
        self.seconds = 0
        self.area = 0.0
        self.signs = Counter[Sign]()
        self.limits: set[int] = set()

    def __iadd__(self, other: "Span") -> "Span":
        self.seconds += other.seconds
        self.area += other.area
        self.signs += other.signs
        self.limits |= other.limits
        return self

    @property
    def rate(self) -> float:
        return self.signs[Sign.ANSWERED] / self.seconds

    @property
    def in_flight(self) -> float:
        return self.area / self.seconds

    @property
    def refused(self) -> float:
        """The part of all requests that was refused."""
        return 1 - (self.signs[Sign.ANSWERED] + self.signs[Sign.OTHER]) / self.signs.total()


class Drive:
    """Sends requests through a limiter to a server, without end or as many at once as ``ready`` returns."""

    def __init__(self, limiter: Limits, server: Server, *, ready: Callable[[float], float] = lambda _: inf) -> None:
        self.limiter, self.server, self._ready = limiter, server, ready
        self.now = 0.0
        self.in_flight = self.answered = 0
        self._order = count()
        self._seconds: list[Span] = []
        self._second = Span()

    def run(self, until: float) -> "Drive":
        while self.now < until:
            self.step()
        return self

    def step(self) -> None:
        """Go to the next moment at which something happens."""
        most = self._ready(self.now)
        self._pump(most)
        could_start = self.in_flight < most and self.limiter.room() > 0
        woken = self.now + self.limiter.wait(self.now) + 1e-6 if could_start else inf
        self._advance(min(self.server.due, woken, len(self._seconds) + 1.0))

    def span(self, since: float, until: float) -> Span:
        span = Span()
        for second in self._seconds[int(since) : int(until)]:
            span += second
        return span

    def _pump(self, most: float) -> None:
        while self.in_flight < most and self.limiter.room() > 0 and not self.limiter.wait(self.now):
            self.in_flight += 1
            (start,) = self.limiter.started(self.now, 1)
            self.server.take(Sent(next(self._order), self.now, start))

    def _advance(self, moment: float) -> None:
        self._second.area += self.in_flight * (moment - self.now)
        self.now = moment
        if moment == self.server.due:
            self._end(self.server.end())
        elif moment == len(self._seconds) + 1.0:
            self._second.seconds = 1
            self._seconds.append(self._second)
            self._second = Span()

    def _end(self, end: End) -> None:
        self.in_flight -= 1
        self.answered += end.sign is Sign.ANSWERED
        self._second.signs[end.sign] += 1
        self.limiter.ended(end.sent.start, end.sign, self.now)
        self._second.limits.add(self.limiter.limit)
