"""The limiter of one upstream, as the dispatcher uses it."""

from random import Random

import pytest

from batchline.domain.rate_limits import Quota, RateLimits
from batchline.pipeline.dispatch.limiter import Limiter, Sign, Start
from batchline.pipeline.dispatch.limiter.concurrency import FIRST_LIMIT
from batchline.pipeline.job import Job
from tests.support.zoo.dispatcher import SimulatedDispatcher
from tests.support.zoo.upstreams import (
    Bucket,
    ByModel,
    HardLimit,
    Overloading,
    Queueing,
    RateLimited,
    Reply,
    Upstream,
    about,
    always,
    changing,
)
from tests.support.zoo.world import World

ENDLESS = 11_000
MANY = 1000


def serve(limiter: Limiter, seconds: float, *, latency: float = 0.1, model: str = "m", since: float = 0.0) -> float:
    """Fill all slots and answer everything after the latency, for some time; return the time then."""
    now = since
    while now < since + seconds:
        starts = limiter.start(model, min(limiter.room, limiter.room_of(model)), now)
        now += latency
        for start in starts:
            limiter.end(start, Sign.ANSWERED, now)
    return now


def refuse(limiter: Limiter, lines: int, now: float, *, model: str = "m", retry_after: float | None = None) -> None:
    for line in range(lines):
        (start,) = limiter.start(model, 1, now + 0.001 * line)
        limiter.end(start, Sign.THROTTLED, now + 0.001 * line + 0.002, line=line, retry_after=retry_after)


def test_a_fresh_limiter_lets_a_few_dozen_start() -> None:
    limiter = Limiter(cap=None)
    assert limiter.room == limiter.limit == FIRST_LIMIT
    assert limiter.allowance("m", 0.0) > MANY
    assert (limiter.wait("m", 0.0), limiter.rate) == (0.0, None)


def test_without_a_cap_1024_are_the_most() -> None:
    limiter = Limiter(cap=None)
    serve(limiter, 10.0)
    assert limiter.limit == limiter.cap == 1024


@pytest.mark.rule("F2", "The cap is never passed.")
@pytest.mark.parametrize("cap", [1, *(pytest.param(cap, marks=pytest.mark.proof) for cap in (2, 5)), 64])
@pytest.mark.parametrize("answered", [1, 1000])
def test_never_over_the_cap_and_never_under_one(cap: int, answered: int) -> None:
    """Whatever comes back, in whatever order, and though one never does."""
    random, limiter, now = Random(cap), Limiter(cap=cap), 0.0
    starts: list[Start] = []
    for number in range(5000):
        now += random.expovariate(100)
        while (count := min(limiter.room, limiter.allowance("m", now))) > 0:
            starts += limiter.start("m", random.randint(1, count), now)
        assert 1 <= limiter.limit <= cap
        assert len(starts) <= cap
        if len(starts) > (cap > 1):
            (sign,) = random.choices(list(Sign), [answered, 1, 1, 1, 1, 1])
            limiter.end(starts.pop(random.randrange(cap > 1, len(starts))), sign, now, line=number)


@pytest.mark.rule("F2", "A cap of 0 lets nothing start, and a worker whose part of the cap grows again uses it.")
def test_a_cap_that_was_0_is_used_when_it_grows() -> None:
    limiter = Limiter(cap=64)
    limiter.set_cap(0)
    assert limiter.room <= 0
    limiter.set_cap(16)
    assert (limiter.room, limiter.limit) == (16, 16)
    now = serve(limiter, 2.0)
    limiter.set_cap(4)
    assert limiter.room == limiter.limit == 4
    limiter.set_cap(48)
    serve(limiter, 5.0, since=now)
    assert limiter.limit == 48


def test_a_smaller_cap_counts_at_once() -> None:
    """What is in flight ends first; nothing starts until then."""
    limiter = Limiter(cap=32)
    starts = limiter.start("m", 32, 0.0)
    limiter.set_cap(8)
    assert limiter.room == 8 - 32
    for start in starts[:28]:
        limiter.end(start, Sign.ANSWERED, 0.1)
    assert limiter.room == 4


@pytest.mark.rule("D9", "Lines that hang do not keep others from the slots, up to the cap.")
def test_slow_requests_count_for_the_cap_alone() -> None:
    limiter = Limiter(cap=None)
    now = serve(limiter, 2.0)
    hanging = limiter.start("m", 24, now)
    assert limiter.room == limiter.room_of("m") == limiter.limit - 24
    now = serve(limiter, 5.0, since=now)
    assert limiter.room_below_cap == 1024 - 24
    assert limiter.room == min(limiter.limit, 1024 - 24)
    assert limiter.room_of("m") == limiter.limit
    for start in hanging:
        limiter.end(start, Sign.ANSWERED, now)
    assert limiter.room == limiter.limit
    assert limiter.room_below_cap == 1024


def test_requests_that_hang_from_the_start_do_not_keep_the_limit_low() -> None:
    limiter = Limiter(cap=None)
    limiter.start("slow", 24, 0.0)
    serve(limiter, 20.0)
    assert limiter.model("m").limit > FIRST_LIMIT


@pytest.mark.rule("D9", "A refused model slows no other model at its upstream.")
def test_models_are_limited_apart() -> None:
    limiter = Limiter(cap=None)
    now = serve(limiter, 1.0, model="limited")
    refuse(limiter, 50, now, model="limited", retry_after=30.0)
    now += 0.1
    assert limiter.allowance("limited", now) == 0
    assert limiter.model("limited").blocked_seconds(now) == pytest.approx(30.0, abs=0.2)
    assert limiter.is_blocked("limited", now)
    assert limiter.allowance("other", now) > MANY
    assert limiter.wait("other", now) == 0.0
    assert limiter.model("limited").is_limited
    assert not limiter.model("other").is_limited


def test_the_rate_of_all_models_is_known_only_if_each_is_limited() -> None:
    limiter = Limiter(cap=None)
    now = serve(limiter, 1.0)
    refuse(limiter, 50, now)
    assert limiter.rate is not None
    serve(limiter, 1.0, model="other", since=now)
    assert limiter.rate is None


@pytest.mark.rule("D3", "No Retry-After holds up a model for more than 300 seconds.")
def test_a_retry_after_of_a_day_blocks_for_five_minutes() -> None:
    limiter = Limiter(cap=None)
    now = serve(limiter, 1.0)
    refuse(limiter, 50, now, retry_after=86_400.0)
    assert limiter.model("m").blocked_seconds(now + 0.1) == pytest.approx(300.0, abs=1.0)


def test_announced_limits_of_a_model_are_its_own() -> None:
    limiter = Limiter(cap=None)
    (start,) = limiter.start("m", 1, 1.0)
    limits = RateLimits(requests=Quota(remaining=2, reset_seconds=10.0))
    limiter.end(start, Sign.ANSWERED, 1.1, rate_limits=limits)
    assert (limiter.allowance("m", 1.1), limiter.allowance("other", 1.1) > MANY) == (2, True)
    limiter.start("m", 2, 1.2)
    assert limiter.wait("m", 1.2) == pytest.approx(9.9)
    assert limiter.allowance("m", 11.2) > MANY


def test_an_announcement_with_a_refusal_is_believed_too() -> None:
    limiter = Limiter(cap=None)
    (start,) = limiter.start("m", 1, 1.0)
    limits = RateLimits(requests=Quota(remaining=0, reset_seconds=5.0))
    limiter.end(start, Sign.THROTTLED, 1.1, line=1, rate_limits=limits)
    assert limiter.allowance("m", 2.0) == 0
    assert limiter.model("m").announced_wait(2.0) == pytest.approx(4.1)


@pytest.mark.rule("D3", "A refusal that the service provokes to check what an upstream says costs the line nothing.")
def test_a_refused_check_of_an_announcement_costs_nothing() -> None:
    limiter = Limiter(cap=None)
    nothing_left = RateLimits(requests=Quota(remaining=0, reset_seconds=60.0))
    for now in (1.0, 62.0):
        (start,) = limiter.start("m", 1, now)
        limiter.end(start, Sign.ANSWERED, now, rate_limits=nothing_left)
    for number in range(20):
        now = 63.0 + 16.0 * number
        assert limiter.allowance("m", now) == 1
        (check,) = limiter.start("m", 1, now)
        assert limiter.end(check, Sign.THROTTLED, now, line=number, rate_limits=nothing_left) == 0
    assert not limiter.model("m").is_refused


def test_faults_that_say_nothing_change_nothing() -> None:
    """A connection broke, or an answer came during a pause."""
    limiter = Limiter(cap=None)
    for start in limiter.start("m", FIRST_LIMIT, 0.0):
        limiter.end(start, Sign.OTHER, 0.1)
    assert limiter.room == limiter.limit == FIRST_LIMIT
    assert not limiter.model("m").is_limited


def test_overload_halves_the_limit_and_its_end_restores_it() -> None:
    """503s above 32 in flight: it stays below that, and not far below."""
    limiter, now, limits = Limiter(cap=None), 0.0, []
    for _ in range(600):
        starts = limiter.start("m", limiter.room, now)
        now += 0.1
        for number, start in enumerate(starts):
            limiter.end(start, Sign.ANSWERED if number < 32 else Sign.OVERLOADED, now, line=number)
        limits.append(limiter.limit)
    assert max(limits[100:]) <= 64
    assert sum(limits[100:]) / 500 >= 20


def test_quick_faults_of_a_gateway_are_refusals_and_slow_ones_are_not() -> None:
    """It answers 502 at once if its server accepts no more connections. They cost no attempt while a limit is known."""
    limiter = Limiter(cap=None)
    now = serve(limiter, 1.0)
    for number, start in enumerate(limiter.start("m", 32, now)):
        limiter.end(start, Sign.OVERLOADED, now + 0.002, line=number)
    assert limiter.model("m").is_refused
    (quick,) = limiter.start("m", 1, now + 1)
    assert limiter.end(quick, Sign.OVERLOADED, now + 1.002, line="quick") is not None
    (slow,) = limiter.start("m", 1, now + 2)
    assert limiter.end(slow, Sign.OVERLOADED, now + 2.2, line="slow") is None


def test_many_models_are_forgotten_when_they_are_idle_and_not_limited() -> None:
    """A file may name any number of them."""
    limiter = Limiter(cap=None)
    now = serve(limiter, 1.0, model="limited")
    refuse(limiter, 50, now, model="limited", retry_after=1000.0)
    (in_flight,) = limiter.start("in flight", 1, now)
    for number in range(5000):
        limiter.allowance(f"model {number}", now)
    assert len(limiter._models) <= 1000
    assert limiter.allowance("limited", now + 1) == 0
    limiter.end(in_flight, Sign.ANSWERED, now)


def test_many_limited_models_are_forgotten_when_they_are_idle() -> None:
    """Otherwise a tenant whose files name models that the upstream refuses would fill the memory."""
    limiter = Limiter(cap=None)
    now = serve(limiter, 1.0, model="m")
    (in_flight,) = limiter.start("m", 1, now)
    for number in range(1500):
        refuse(limiter, 8, now, model=f"model {number}", retry_after=1000.0)
    assert len(limiter._models) <= 1000
    limiter.end(in_flight, Sign.ANSWERED, now)


class Lifted(Upstream):
    """One upstream until some time, and another one from then on."""

    def __init__(self, before: Upstream, after: Upstream, *, at: float) -> None:
        super().__init__(before.world)
        self._before, self._after, self._at = before, after, at

    def handle(self, job: Job, reply: Reply) -> None:
        (self._before if self.world.time < self._at else self._after).receive(job, reply)


class Back:
    """A dispatcher whose upstream changes, and how many lines are answered in a second."""

    def __init__(self, upstream: Upstream) -> None:
        self.world = upstream.world
        self.dispatcher = SimulatedDispatcher(self.world, upstream)
        self._work = self.dispatcher.add(ENDLESS)

    def rate(self, seconds: float) -> float:
        """Let some time pass and return the answers per second in it."""
        before = self._work.open
        self.world.run_until(lambda: False, limit_seconds=seconds)
        return (before - self._work.open) / seconds


@pytest.mark.rule("D9", "When a limit is lifted, its upstream's capacity is used within 15 seconds.")
@pytest.mark.parametrize("few", [1, *(pytest.param(few, marks=pytest.mark.proof) for few in (8, 24))])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_a_lifted_limit_on_the_number_is_noticed_within_15_seconds(few: int, seed: int) -> None:
    """From 1, 8 or 24 at once to 100."""
    world = World(seed)
    back = Back(HardLimit(world, about(0.2), slots=changing(few, 100, at=10.0)))
    back.rate(25.0)
    assert back.rate(2.0) >= 0.9 * 100 / 0.2


@pytest.mark.rule("D9", "When a limit on the rate is lifted, the upstream's capacity is used within 15 seconds.")
@pytest.mark.parametrize("rate", [2, *(pytest.param(rate, marks=pytest.mark.proof) for rate in (20, 120))])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_a_lifted_limit_on_the_rate_is_noticed_within_15_seconds(rate: int, seed: int) -> None:
    """The upstream still answers only 16 at once, which is 160 a second."""
    world = World(seed)
    free = Queueing(world, about(0.1), slots=always(16))
    limited = RateLimited(world, Bucket(rate, max(1, rate / 10)))
    back = Back(Lifted(limited, free, at=10.0))
    back.rate(25.0)
    assert back.rate(2.0) >= 0.9 * 160


def test_a_limited_model_beside_a_free_one_gets_what_it_may_have() -> None:
    world = World(1)
    upstream = ByModel(
        world, {"m": Queueing(world, about(0.1), slots=always(16)), "limited": RateLimited(world, Bucket(20, 5))}
    )
    dispatcher = SimulatedDispatcher(world, upstream)
    free, limited = dispatcher.add(10_000), dispatcher.add(2000, model="limited")
    world.run_until(lambda: False, limit_seconds=20.0)
    before = free.open, limited.open
    world.run_until(lambda: False, limit_seconds=20.0)
    assert before[0] - free.open >= 0.85 * 160 * 20
    assert before[1] - limited.open >= 0.85 * 20 * 20


class Gateway:
    """Two models behind one upstream, and how many requests of each are in flight after some time."""

    def __init__(self, world: World, upstream: Upstream) -> None:
        self.world, self.dispatcher = world, SimulatedDispatcher(world, upstream)

    def in_flight_after(self, seconds: float, *models: str) -> list[int]:
        self.world.run_until(lambda: False, limit_seconds=seconds)
        limiter = self.dispatcher.limiter
        return [limiter.model(model).limit - limiter.room_of(model) for model in models]


@pytest.mark.rule("D9", "How many lines of a model are in flight does not depend on the room for other models.")
def test_a_slow_model_has_few_in_flight_although_another_one_has_room_for_many() -> None:
    """Otherwise hundreds of its lines would wait for its four slots until they time out, and be failed."""
    world = World(1)
    slow, quick = Queueing(world, about(60.0), slots=always(4)), Upstream(world, about(0.05))
    gateway = Gateway(world, ByModel(world, {"slow": slow, "quick": quick}))
    gateway.dispatcher.add(400, model="slow")
    gateway.dispatcher.add(ENDLESS, model="quick")
    beside, alone = (gateway.in_flight_after(seconds, "slow")[0] for seconds in (2.0, 60.0))
    assert 4 <= beside <= FIRST_LIMIT
    assert 4 <= alone <= FIRST_LIMIT


def test_a_model_with_many_slots_gets_them_beside_one_with_a_short_queue() -> None:
    world = World(1)
    few, many = Queueing(world, about(0.2), slots=always(4)), Queueing(world, about(1.0), slots=always(200))
    gateway = Gateway(world, ByModel(world, {"few": few, "many": many}))
    gateway.dispatcher.add(2000, model="few")
    gateway.dispatcher.add(ENDLESS, model="many")
    in_flight = gateway.in_flight_after(40.0, "few", "many")
    assert 4 <= in_flight[0] <= FIRST_LIMIT
    assert in_flight[1] >= 180


@pytest.mark.rule("D9", "Models that are names of one engine have no more in flight together than it needs.")
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_two_names_of_one_engine_share_its_limit(seed: int) -> None:
    """Each of them alone would gain by a higher limit, at the cost of the other."""
    world = World(seed)
    gateway = Gateway(world, Overloading(world, 0.1, slots=32))
    for model in ("a", "b"):
        gateway.dispatcher.add(ENDLESS, model=model)
    in_flight = gateway.in_flight_after(40.0, "a", "b")
    assert 24 <= sum(in_flight) <= 64
    assert min(in_flight) >= 8


def test_when_one_model_is_left_its_own_limit_is_used_again() -> None:
    """The limit that it had together with another one was shared."""
    world = World(1)
    engine = Queueing(world, about(0.1), slots=always(32))
    gateway = Gateway(world, engine)
    gateway.dispatcher.add(2000, model="a")
    gateway.dispatcher.add(ENDLESS, model="b")
    (in_flight,) = gateway.in_flight_after(40.0, "b")
    assert in_flight >= 32


def test_a_cap_that_changes_holds_for_all_models_together() -> None:
    limiter = Limiter(cap=None)
    limiter.start("a", 20, 0.0)
    limiter.start("b", 20, 0.0)
    limiter.set_cap(48)
    assert (limiter.room, limiter.room_below_cap) == (8, 8)
    limiter.set_cap(1024)
    assert limiter.room == 1024 - 40


def test_many_names_of_one_engine_have_few_in_flight_before_they_are_known() -> None:
    """A file may name a hundred models, and an engine with four slots may answer to all of these names."""
    limiter = Limiter(cap=None)
    for number in range(100):
        model = f"m{number}"
        while room := limiter.room_of(model):
            limiter.start(model, room, 0.0)
    assert limiter.room < 1024 - 100
    assert limiter.room > 1024 - 15 * FIRST_LIMIT


def test_answers_reported_together_count_as_those_reported_one_by_one() -> None:
    one_by_one, together, limits = Limiter(cap=None), Limiter(cap=None), list[tuple[int, int]]()
    for number in range(200):
        now, seconds = float(number), 0.1 + number % 7 / 100
        starts = one_by_one.start("m", max(1, one_by_one.room_of("m")), now)
        for start in starts:
            one_by_one.end(start, Sign.ANSWERED, now + seconds, project_id="p")
        together.end_answered(together.start("m", len(starts), now), now + seconds, project_id="p")
        limits.append((one_by_one.limit, together.limit))
    assert all(single == grouped for single, grouped in limits)
    assert max(limits)[0] > 32
