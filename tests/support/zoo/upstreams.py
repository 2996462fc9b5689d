"""Upstreams as they are met, in virtual time.

Those that wrap others: `ByModel`, `Replicas`, `Faulty`, `Refusing`, `Announcing`, `Backlog`. A capacity is a
function of the time, since many change it.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, log

from msgspec.structs import replace

from batchline.domain.engine_queue import QueueLength
from batchline.domain.outcomes import Outcome, Retryable, Success
from batchline.domain.rate_limits import Quota, RateLimits
from batchline.domain.replies import FaultKind
from batchline.pipeline.job import Job
from tests.support.zoo.world import World

Reply = Callable[[Outcome], None]
Seconds = Callable[[World], float]
"""Returns how long the next answer takes."""
Capacity = Callable[[float], float]
"""Returns how many are processed at once at a time."""

_REFUSAL_SECONDS = 0.002
_NOISE = 0.03


def about(seconds: float, *, noise: float = _NOISE) -> Seconds:
    return lambda world: seconds * world.uniform(1 - noise, 1 + noise)


def lognormal(median: float, deviation: float, *, most: float) -> Seconds:
    """Return times of which a few are very long; ``deviation`` is that of their logarithm."""
    return lambda world: min(most, world.random.lognormvariate(log(median), deviation))


def always(number: float) -> Capacity:
    return lambda _: number


def changing(before: float, after: float, *, at: float) -> Capacity:
    return lambda time: before if time < at else after


def refusal(*, retry_after: float | None = None, rate_limits: RateLimits | None = None) -> Retryable:
    return Retryable("http_429", "", throttled=True, unavailable=True, retry_after=retry_after, rate_limits=rate_limits)


OVERLOAD = Retryable("http_503", "", unavailable=True)
BAD_GATEWAY = Retryable("http_502", "", unavailable=True)
TIMEOUT = Retryable(FaultKind.TIMEOUT, "", unavailable=True)


QUICK = about(0.02)
_STEADY = always(1.0)


class Upstream:
    """Answers each request after some time. Subclasses decide in ``handle`` what else may happen."""

    def __init__(self, world: World, seconds: Seconds = QUICK) -> None:
        self.world, self.seconds = world, seconds
        self.in_flight = 0

    def receive(self, job: Job, reply: Reply) -> None:
        self.in_flight += 1
        self.handle(job, partial(self._end, reply))

    def handle(self, job: Job, reply: Reply) -> None:
        self.answer(reply)

    def answer(self, reply: Reply, *, rate_limits: RateLimits | None = None) -> None:
        outcome = Success(200, None, b"", rate_limits=rate_limits)
        self.world.after(self.seconds(self.world), lambda: reply(outcome))

    def refuse(self, reply: Reply, *, retry_after: float | None = None, rate_limits: RateLimits | None = None) -> None:
        outcome = refusal(retry_after=retry_after, rate_limits=rate_limits)
        self.world.after(_REFUSAL_SECONDS, lambda: reply(outcome))

    def _end(self, reply: Reply, outcome: Outcome) -> None:
        self.in_flight -= 1
        reply(outcome)


class HardLimit(Upstream):
    """Refuses what comes while its slots are taken."""

    def __init__(self, world: World, seconds: Seconds, *, slots: Capacity, retry_after: float | None = None) -> None:
        super().__init__(world, seconds)
        self._slots, self._retry_after = slots, retry_after
        self._taken = 0

    def handle(self, job: Job, reply: Reply) -> None:
        if self._taken >= self._slots(self.world.time):
            self.refuse(reply, retry_after=self._retry_after)
            return
        self._taken += 1
        self.answer(partial(self._free, reply))

    def _free(self, reply: Reply, outcome: Outcome) -> None:
        self._taken -= 1
        reply(outcome)


class CoolingDown(HardLimit):
    """A gateway that refuses everything for some time after each refusal, as if its server were down."""

    def __init__(self, world: World, seconds: Seconds, *, slots: Capacity, cooldown_seconds: float) -> None:
        super().__init__(world, seconds, slots=slots)
        self._cooldown_seconds, self._down_until = cooldown_seconds, 0.0

    def handle(self, job: Job, reply: Reply) -> None:
        if self.world.time < self._down_until:
            self.refuse(reply)
        else:
            super().handle(job, reply)

    def refuse(self, reply: Reply, *, retry_after: float | None = None, rate_limits: RateLimits | None = None) -> None:
        if self.world.time >= self._down_until:
            self._down_until = self.world.time + self._cooldown_seconds
        super().refuse(reply, retry_after=retry_after, rate_limits=rate_limits)


class Queueing(Upstream):
    """Queues what comes while its slots are taken, and says nothing about it."""

    def __init__(self, world: World, seconds: Seconds, *, slots: Capacity) -> None:
        super().__init__(world, seconds)
        self._slots = slots
        self._queue: deque[Reply] = deque()
        self._taken = 0

    def handle(self, job: Job, reply: Reply) -> None:
        self._queue.append(reply)
        self._process()

    def _process(self) -> None:
        while self._queue and self._taken < self._slots(self.world.time):
            self._taken += 1
            self.answer(partial(self._free, self._queue.popleft()))

    def _free(self, reply: Reply, outcome: Outcome) -> None:
        self._taken -= 1
        reply(outcome)
        self._process()


class FullQueue(Queueing):
    """Answers 503 to what comes while as many are queued as it has slots."""

    def handle(self, job: Job, reply: Reply) -> None:
        if len(self._queue) < self._slots(self.world.time):
            super().handle(job, reply)
        else:
            self.world.after(_REFUSAL_SECONDS, lambda: reply(OVERLOAD))


class ImpatientQueue(Queueing):
    """A gateway that queues what comes while its slots are taken, and refuses what has waited for too long."""

    def __init__(self, world: World, seconds: Seconds, *, slots: Capacity, patience_seconds: float) -> None:
        super().__init__(world, seconds, slots=slots)
        self._patience_seconds = patience_seconds

    def handle(self, job: Job, reply: Reply) -> None:
        super().handle(job, reply)
        self.world.after(self._patience_seconds, lambda: self._refuse_if_queued(reply))

    def _refuse_if_queued(self, reply: Reply) -> None:
        if reply in self._queue:
            self._queue.remove(reply)
            reply(refusal())


class Bucket:
    """So many a second, and some of them at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self.rate, self.burst = rate, burst
        self.level, self._filled_at = burst, 0.0

    def take(self, now: float, amount: float = 1.0) -> bool:
        self.level = min(self.burst, self.level + (now - self._filled_at) * self.rate)
        self._filled_at = now
        if self.level < amount:
            return False
        self.level -= amount
        return True


class Window:
    """So many in each span of time. A span begins with the first request after the last one."""

    def __init__(self, allowed: float, seconds: float) -> None:
        self.allowed, self._seconds = allowed, seconds
        self.left, self.ends = allowed, -inf

    def take(self, now: float, amount: float = 1.0) -> bool:
        if now >= self.ends:
            self.left, self.ends = self.allowed, now + self._seconds
        if self.left < amount:
            return False
        self.left -= amount
        return True


class SlidingWindow:
    """So many in any span of time."""

    def __init__(self, allowed: int, seconds: float) -> None:
        self._allowed, self._seconds = allowed, seconds
        self._taken_at: deque[float] = deque()

    def take(self, now: float) -> bool:
        while self._taken_at and self._taken_at[0] <= now - self._seconds:
            self._taken_at.popleft()
        if len(self._taken_at) >= self._allowed:
            return False
        self._taken_at.append(now)
        return True


class RateLimited(Upstream):
    """Refuses what comes too fast; ``retry_after`` is sent along."""

    def __init__(
        self,
        world: World,
        bucket: Bucket | Window | SlidingWindow,
        seconds: Seconds = QUICK,
        *,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(world, seconds)
        self._bucket, self._retry_after = bucket, retry_after

    def handle(self, job: Job, reply: Reply) -> None:
        if self._bucket.take(self.world.time):
            self.answer(reply)
        else:
            self.refuse(reply, retry_after=self._retry_after)


class RequestsPerWindow(Upstream):
    """Refuses what comes after the allowed number, until the window ends, and says when that is."""

    def __init__(self, world: World, window: Window, seconds: Seconds = QUICK) -> None:
        super().__init__(world, seconds)
        self._window = window

    def handle(self, job: Job, reply: Reply) -> None:
        if self._window.take(self.world.time):
            self.answer(reply)
        else:
            self.refuse(reply, retry_after=max(0.1, round(self._window.ends - self.world.time, 1)))


class AnnouncedWindow(Upstream):
    """Announces with every answer how many requests are left in a window, and until when."""

    def __init__(self, world: World, window: Window) -> None:
        super().__init__(world)
        self._window = window

    def handle(self, job: Job, reply: Reply) -> None:
        window, now = self._window, self.world.time
        accepted = window.take(now)
        quota = Quota(limit=window.allowed, remaining=window.left, reset_seconds=round(window.ends - now, 3))
        (self.answer if accepted else self.refuse)(reply, rate_limits=RateLimits(requests=quota))


class TokensPerWindow(Upstream):
    """Counts tokens, and announces with every answer how many are left and until when."""

    def __init__(self, world: World, window: Window, *, tokens: Seconds) -> None:
        super().__init__(world)
        self._window, self._tokens = window, tokens

    def handle(self, job: Job, reply: Reply) -> None:
        window, now = self._window, self.world.time
        accepted = window.take(now, self._tokens(self.world))
        announced = _tokens_left(window.left, limit=window.allowed, reset_seconds=window.ends - now)
        (self.answer if accepted else self.refuse)(reply, rate_limits=announced)


class TokensPerSecond(Upstream):
    """As above, with a bucket: what is left grows all the time, and the reset is when the bucket will be full."""

    def __init__(self, world: World, bucket: Bucket, *, tokens: Seconds) -> None:
        super().__init__(world)
        self._bucket, self._tokens = bucket, tokens

    def handle(self, job: Job, reply: Reply) -> None:
        bucket = self._bucket
        accepted = bucket.take(self.world.time, self.tokens_of(job))
        reset_seconds = (bucket.burst - bucket.level) / bucket.rate
        announced = _tokens_left(bucket.level, limit=bucket.burst, reset_seconds=reset_seconds)
        (self.answer if accepted else self.refuse)(reply, rate_limits=announced)

    def tokens_of(self, job: Job) -> float:
        return self._tokens(self.world)


class UnevenTokens(TokensPerSecond):
    """As above. A line needs as many tokens each time, and a few lines need many times as many as the others."""

    def __init__(self, world: World, bucket: Bucket, *, tokens: Seconds, seconds: Seconds) -> None:
        super().__init__(world, bucket, tokens=tokens)
        self.seconds = seconds
        self._tokens_of: dict[bytes, float] = {}

    def tokens_of(self, job: Job) -> float:
        return self._tokens_of.setdefault(job.line.custom_id, self._tokens(self.world))


class HiddenTokens(Upstream):
    """A bucket of tokens that announces nothing. One line in fifty needs many tokens, and the others need few."""

    def __init__(self, world: World, bucket: Bucket, *, few: int, many: int) -> None:
        super().__init__(world)
        self._bucket, self._few, self._many = bucket, few, many

    def handle(self, job: Job, reply: Reply) -> None:
        tokens = self._many if job.line.index % 50 == 7 else self._few
        (self.answer if self._bucket.take(self.world.time, tokens) else self.refuse)(reply)


def _tokens_left(remaining: float, *, limit: float, reset_seconds: float) -> RateLimits:
    return RateLimits(tokens=Quota(limit=limit, remaining=int(remaining), reset_seconds=round(reset_seconds, 3)))


class Overloading(Upstream):
    """Takes longer the more it has beyond its slots, and so much longer that it gets less done."""

    def __init__(self, world: World, seconds: float, *, slots: int) -> None:
        super().__init__(world, self._seconds_now)
        self._quickest, self._slots = about(seconds), slots

    def _seconds_now(self, world: World) -> float:
        return self._quickest(world) * float(max(1.0, self.in_flight / self._slots) ** 1.5)


class Engine(Upstream):
    """Batches continuously, as vLLM and transformers do: in each step it computes a token of every request in a slot.

    A step takes ``step_seconds`` and for each request ``request_seconds``. The requests that come while all slots are
    taken are queued; with more than ``crowd`` requests in all, steps take longer. An answer needs ``steps`` steps of
    the simulation. ``at_once`` says that a request which comes because another one ended can be in the next step; else
    it comes during that step and waits until it ends, as it does if an engine's steps take long. ``pace`` is a factor
    of the speed, which changes on machines that do other work too.
    """

    def __init__(
        self,
        world: World,
        *,
        slots: int,
        tokens: int,
        step_seconds: float,
        request_seconds: float,
        noise: float,
        crowd: float = inf,
        steps: int = 16,
        at_once: bool = True,
        pace: Capacity = _STEADY,
    ) -> None:
        super().__init__(world)
        self._pace = pace
        self._slots, self._tokens, self._noise, self._crowd = slots, tokens, noise, crowd
        self._steps, self._at_once = steps, at_once
        self._step_seconds, self._request_seconds = step_seconds, request_seconds
        self._queue: deque[Reply] = deque()
        self._running: list[_Sequence] = []
        self._is_idle = True

    def handle(self, job: Job, reply: Reply) -> None:
        self._queue.append(reply)
        if self._is_idle:
            self._is_idle = False
            self.world.after(0.0, self._begin_step)

    def queue_length(self) -> QueueLength:
        return QueueLength(running=len(self._running), waiting=len(self._queue))

    def _begin_step(self) -> None:
        while self._queue and len(self._running) < self._slots:
            tokens = self._tokens * self.world.uniform(1 - self._noise, 1 + self._noise)
            self._running.append(_Sequence(tokens, self._queue.popleft()))
        self._is_idle = not self._running
        if not self._is_idle:
            step = self._step_seconds + self._request_seconds * len(self._running)
            step *= max(1.0, self.in_flight / self._crowd) * self.world.uniform(1 - self._noise, 1 + self._noise)
            self.world.after(step * self._tokens / self._steps / self._pace(self.world.time), self._end_step)

    def _end_step(self) -> None:
        for sequence in self._running:
            sequence.tokens -= self._tokens / self._steps
        ended = [sequence for sequence in self._running if sequence.tokens <= 0]
        self._running = [sequence for sequence in self._running if sequence.tokens > 0]
        if not self._at_once:
            self._begin_step()
        for sequence in ended:
            sequence.reply(Success(200, None, b""))
        if self._at_once:
            self._begin_step()


class _Sequence:
    __slots__ = ("reply", "tokens")

    def __init__(self, tokens: float, reply: Reply) -> None:
        self.tokens, self.reply = tokens, reply


class ByModel(Upstream):
    """A gateway with another upstream behind it for each model."""

    def __init__(self, world: World, models: Mapping[str, Upstream]) -> None:
        super().__init__(world)
        self._models = models

    def handle(self, job: Job, reply: Reply) -> None:
        self._models[job.model.id].receive(job, reply)


class Replicas(Upstream):
    """A balancer that chooses among several upstreams by chance."""

    def __init__(self, world: World, replicas: Sequence[Upstream]) -> None:
        super().__init__(world)
        self._replicas = replicas

    def handle(self, job: Job, reply: Reply) -> None:
        self.world.random.choice(self._replicas).receive(job, reply)


class Faulty(Upstream):
    """A proxy that gives another fault than 429, for example 503, to what the upstream behind it refuses."""

    def __init__(self, inner: Upstream, fault: str = "http_503") -> None:
        super().__init__(inner.world)
        self._inner = inner
        self._fault = Retryable(fault, "", unavailable=True)

    def handle(self, job: Job, reply: Reply) -> None:
        self._inner.receive(job, lambda outcome: reply(self._fault if isinstance(outcome, Retryable) else outcome))


class Refusing(Upstream):
    """Answers some requests with a fault, whatever the upstream behind it would do.

    ``which`` decides by the line and by how often it came, from 1 on.
    """

    def __init__(
        self,
        inner: Upstream,
        which: Callable[[Job, int], bool],
        *,
        fault: Retryable | None = None,
        seconds: float = _REFUSAL_SECONDS,
    ) -> None:
        super().__init__(inner.world)
        self._inner, self._which = inner, which
        self._fault, self._fault_seconds = fault or refusal(), seconds
        self._attempts: Counter[Job] = Counter()

    def handle(self, job: Job, reply: Reply) -> None:
        self._attempts[job] += 1
        if self._which(job, self._attempts[job]):
            self.world.after(self._fault_seconds, lambda: reply(self._fault))
        else:
            self._inner.receive(job, reply)


class Announcing(Upstream):
    """Announces a limit with everything that the upstream behind it answers, whether that is true or not."""

    def __init__(self, inner: Upstream, quota: Callable[[float], Quota]) -> None:
        super().__init__(inner.world)
        self._inner, self._quota = inner, quota

    def handle(self, job: Job, reply: Reply) -> None:
        self._inner.receive(job, lambda outcome: reply(self._announce(outcome)))

    def _announce(self, outcome: Outcome) -> Outcome:
        limits = RateLimits(requests=self._quota(self.world.time))
        return replace(outcome, rate_limits=limits) if isinstance(outcome, Success | Retryable) else outcome


class Backlog(Upstream):
    """A server that accepts few connections. The kernel holds some more, and drops the first packet of the rest.

    The client's kernel sends that packet again after 1 s, 3 s and 7 s. After 10 s the connection times out.
    """

    _TRIES_SECONDS = (1.0, 2.0, 4.0)
    _LAST_SECONDS = 3.0

    def __init__(self, inner: Upstream, *, length: int) -> None:
        super().__init__(inner.world)
        self._inner, self._length = inner, length

    def handle(self, job: Job, reply: Reply, tries: int = 0) -> None:
        if self._inner.in_flight < self._length:
            self._inner.receive(job, reply)
        elif tries < len(self._TRIES_SECONDS):
            self.world.after(self._TRIES_SECONDS[tries], lambda: self.handle(job, reply, tries + 1))
        else:
            self.world.after(self._LAST_SECONDS, lambda: reply(TIMEOUT))
