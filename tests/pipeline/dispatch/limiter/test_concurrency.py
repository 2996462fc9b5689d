"""How many requests an upstream should have in flight, found by throughput.

``pytest -m proof -s`` runs every kind of upstream with many seeds.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import chain, cycle
from typing import NamedTuple

import pytest

from batchline.domain.engine_queue import QueueLength
from batchline.domain.outcomes import Retryable
from batchline.pipeline.dispatch.limiter import Limiter, Start
from batchline.pipeline.dispatch.limiter.concurrency import FIRST_LIMIT, ConcurrencyLimit
from tests.support.zoo.dispatcher import SimulatedDispatcher, Work
from tests.support.zoo.upstreams import (
    OVERLOAD,
    TIMEOUT,
    Engine,
    Overloading,
    Queueing,
    Refusing,
    Seconds,
    Upstream,
    about,
    always,
    changing,
    lognormal,
)
from tests.support.zoo.world import World

_SAMPLE_SECONDS = 0.1
SEEDS = range(1, 9)
KINDS: dict[str, Callable[[float], Seconds]] = {
    "steady": lambda seconds: about(seconds, noise=0.0),
    "almost steady": lambda seconds: about(seconds, noise=0.05),
    "noisy": lambda seconds: about(seconds, noise=0.5),
    "lognormal": lambda seconds: lognormal(0.88 * seconds, 0.5, most=20 * seconds),
}
UNLIKE = [pytest.param(kind, marks=[] if kind in ("steady", "lognormal") else pytest.mark.proof) for kind in KINDS]
"""The two kinds that differ most. The proof runs those between them too."""


class Span(NamedTuple):
    """What happened in some time: answers per second, and the limits."""

    rate: float
    limits: list[int]

    @property
    def usual_limit(self) -> float:
        return sum(self.limits) / len(self.limits)


class Drive:
    """A dispatcher with lines enough, or as many as a test adds, and the limits that its limiter sets."""

    def __init__(self, upstream: Upstream, *, lines: int = 10_000, cap: int | None = None) -> None:
        self.world = upstream.world
        self.dispatcher = SimulatedDispatcher(self.world, upstream, cap=cap)
        self.works: list[Work] = [self.dispatcher.add(lines)] if lines else []

    def run(self, seconds: float) -> Span:
        answered, limits, end = -self._open, list[int](), self.world.time + seconds
        while self.world.time < end - 1e-9:
            self.world.run_until(lambda: False, limit_seconds=_SAMPLE_SECONDS)
            limits.append(self.dispatcher.limiter.limit)
        return Span((answered + self._open) / -seconds, limits)

    def settle(self, seconds: float) -> "Drive":
        self.run(seconds)
        return self

    @property
    def _open(self) -> int:
        return sum(work.open for work in self.works)


def check_queue(
    kind: str, seconds: float, seed: int, *, settling: float, measured: float, least: int = 24, usual: int = 48
) -> None:
    """Check an upstream that serves 32 at once and queues the rest without a word.

    ``least`` is the lowest limit that is right at any time, and ``usual`` the highest that is right on average.
    """
    world = World(seed)
    lines = int(1.2 * 32 / seconds * (settling + measured))
    drive = Drive(Queueing(world, KINDS[kind](seconds), slots=always(32)), lines=lines)
    span = drive.settle(settling).run(measured)
    print(f"32 at once, {seconds} s {kind}, seed {seed}: {span.rate:.1f}/s, {min(span.limits)}..{max(span.limits)}")
    assert min(span.limits) >= least
    assert 30 <= span.usual_limit <= usual
    assert span.rate >= 0.95 * 32 / seconds


@pytest.mark.rule("F2", "Where no cap is set, few more lines are in flight than are needed for the best throughput.")
@pytest.mark.parametrize(("seconds", "settling"), [(0.2, 20.0), (1.0, 60.0)])
@pytest.mark.parametrize("kind", UNLIKE)
def test_a_queue_that_nobody_tells_of_is_found_and_kept_short(kind: str, seconds: float, settling: float) -> None:
    check_queue(kind, seconds, 2, settling=settling, measured=30.0)


def test_a_lower_limit_is_not_tried_while_latencies_are_as_low_as_ever() -> None:
    """By Little's law fewer in flight with the same latency are slower, so a look at them would only cost time."""
    drive = Drive(Queueing(World(1), KINDS["steady"](0.2), slots=always(32)), lines=10_000)
    assert min(drive.settle(20.0).run(30.0).limits) >= 32


@pytest.mark.proof
@pytest.mark.parametrize(("seconds", "settling"), [(0.02, 20.0), (0.2, 20.0), (1.0, 60.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_queue_is_kept_short_for_ten_minutes(kind: str, seconds: float, settling: float) -> None:
    """As above, with many seeds. In that time the limit is raised or lowered by mistake now and then."""
    measured = 600.0 if seconds > 0.1 else 60.0
    for seed in SEEDS:
        check_queue(kind, seconds, seed, settling=settling, measured=measured, least=16, usual=80)


@pytest.mark.parametrize("slots", [16, 4, 1])
def test_a_first_limit_that_is_too_high_is_left(slots: int) -> None:
    """A server of few slots gets few more than it has, after 40 s."""
    world = World(1)
    span = Drive(Queueing(world, about(0.2, noise=0.3), slots=always(slots)), lines=6000).settle(40.0).run(20.0)
    assert span.rate >= 0.95 * slots / 0.2
    assert span.usual_limit <= 1.5 * slots + 4


@pytest.mark.parametrize("kind", UNLIKE)
@pytest.mark.parametrize(("slots", "seconds"), [(1, 3.0), pytest.param(2, 5.0, marks=pytest.mark.proof), (4, 2.0)])
def test_requests_of_others_do_not_wait_long_at_a_small_server(kind: str, slots: int, seconds: float) -> None:
    """D8: the first round shows a deep queue, so the limit falls at once and not by many rounds of a minute each."""
    drive = Drive(Queueing(World(2), KINDS[kind](seconds), slots=always(slots)), lines=1000)
    first_round = FIRST_LIMIT * seconds / slots
    span = drive.settle(first_round).run(10 * first_round)
    assert span.usual_limit <= 3 * slots + 3
    assert span.rate >= 0.95 * slots / seconds


def test_a_quick_answer_that_is_not_usual_does_not_lower_the_limit_for_long() -> None:
    """By one answer from a cache, a server of eight slots seems to have less than one."""
    latencies = iter([0.001, *[1.0] * 7])
    world = World(1)
    queueing = Queueing(world, lambda _: next(latencies, 1.0), slots=always(8))
    span = Drive(queueing, lines=2000).settle(60.0).run(60.0)
    assert span.rate >= 0.95 * 8


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_of_limits_with_the_same_throughput_the_lowest_is_held(seed: int) -> None:
    """An engine of 16 slots has about 16 in flight in the end, though 128 would be as fast."""
    world = World(seed)
    engine = Engine(world, slots=16, tokens=32, step_seconds=0.0018, request_seconds=0.00023, noise=0.15)
    span = Drive(engine).settle(80.0).run(20.0)
    assert 14 <= span.usual_limit <= 26


def test_an_upstream_that_gets_less_done_with_more_is_not_overloaded() -> None:
    world = World(1)
    span = Drive(Overloading(world, 0.1, slots=32)).settle(10.0).run(20.0)
    assert span.rate >= 0.95 * 320
    assert span.usual_limit <= 40


def test_waves_are_not_taken_for_a_change_of_throughput() -> None:
    """An engine answers all of its 64 slots at about the same time; the limit stays about there."""
    world = World(1)
    engine = Engine(world, slots=64, tokens=64, step_seconds=0.01, request_seconds=0.0001, noise=0.01)
    span = Drive(engine).settle(20.0).run(30.0)
    assert min(span.limits) >= 48
    assert max(span.limits) <= 130
    assert span.rate >= 0.9 * 64 / (64 * 0.0164)


def test_without_any_limit_it_soon_has_hundreds_in_flight_and_never_over_1024() -> None:
    drive = Drive(Upstream(World(1), about(0.2)), lines=10_000)
    assert min(drive.settle(2.0).run(0.5).limits) >= 300
    assert max(drive.run(1.0).limits) <= 1024


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_cap_is_reached_quickly(kind: str) -> None:
    """If nothing but the cap limits, 95 % of what it allows is done in the first 20 s."""
    drive = Drive(Upstream(World(1), KINDS[kind](0.2)), lines=8000, cap=64)
    assert drive.run(20.0).rate >= 0.95 * 64 / 0.2


@pytest.mark.parametrize("latency", [0.0002, 0.003])
def test_turns_of_this_process_are_not_taken_for_a_gain_of_the_upstream(latency: float) -> None:
    """If the upstream answers at once, this process is the bottleneck, and each connection more only costs CPU."""
    limits = [limit for seed in SEEDS for limit in _limits_of_a_busy_process(latency, seed=seed, answers=10_000)]
    assert max(limits) <= 512
    assert sum(limits) / len(limits) <= 160


def test_a_ramp_opens_few_connections_that_a_busy_process_cannot_use() -> None:
    """To open one costs as much as several lines, so a small batch would take longer."""
    limits = [max(_limits_of_a_busy_process(0.003, seed=seed, answers=3_000)) for seed in SEEDS]
    assert sorted(limits)[len(limits) // 2] <= 2 * FIRST_LIMIT


def _limits_of_a_busy_process(latency: float, *, seed: int, answers: int) -> list[int]:
    """Return the limit after each turn of a process that handles up to 64 answers in a turn, 0.1 ms for each.

    In some turns it does other work.
    """
    world, limiter, limits = World(seed), Limiter(cap=None), list[int]()
    arrived, answered = deque[Start](), 0
    while answered < answers:
        world.run_until(lambda: False, limit_seconds=0.0)
        group = [arrived.popleft() for _ in range(min(64, len(arrived)))]
        if group:
            limiter.end_answered(group, world.time)
        answered += len(group)
        started = max(0, min(limiter.room, limiter.room_of("m")))
        for start in limiter.start("m", started, world.time) if started else ():
            world.after(latency * world.uniform(0.5, 1.5), partial(arrived.append, start))
        limits.append(limiter.limit)
        world.time += 0.0001 * world.uniform(0.8, 1.2) * (len(group) + 1)
        if world.uniform(0, 1) < 0.05:
            world.time += world.uniform(0.002, 0.012)
    return limits


def test_slow_answers_that_come_after_a_measurement_correct_it() -> None:
    """The first 20 answers take 0.1 s. By them alone, the first limit would seem to be better than all others."""
    latencies = chain([0.1] * 20, cycle([5.0, 0.1]))
    drive = Drive(Upstream(World(1), lambda _: next(latencies)))
    assert drive.settle(6.0).run(1.0).limits[0] > 4 * FIRST_LIMIT


def test_a_small_batch_does_not_crawl() -> None:
    """200 lines of 100 ms on a fresh process need few rounds."""
    drive = Drive(Upstream(World(1), about(0.1)), lines=200)
    drive.world.run_until(lambda: drive.works[0].is_done, limit_seconds=10.0)
    assert drive.world.time <= 0.4


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.proof) for seed in (2, 3))])
def test_it_follows_a_capacity_that_halves_and_one_that_doubles(seed: int) -> None:
    """20 seconds later it uses what there is, and the queue is at most about two rounds long."""
    for before, after in ((32, 16), (16, 32)):
        world = World(seed)
        upstream = Queueing(world, about(0.2, noise=0.3), slots=changing(before, after, at=20.0))
        span = Drive(upstream).settle(40.0).run(20.0)
        assert span.rate >= 0.93 * after / 0.2
        assert span.usual_limit <= 3.2 * after


def test_it_follows_answers_that_take_twice_as_long() -> None:
    """Half the answers a second are no reason to send fewer, if the server still takes as many."""
    world = World(1)
    slower = changing(0.2, 0.4, at=20.0)
    span = Drive(Queueing(world, lambda world: slower(world.time), slots=always(32))).settle(40.0).run(20.0)
    assert span.rate >= 0.9 * 32 / 0.4


@pytest.mark.parametrize(
    "fault", [pytest.param(TIMEOUT, id="timeouts"), pytest.param(OVERLOAD, id="503", marks=pytest.mark.proof)]
)
def test_a_few_faults_are_no_overload(fault: Retryable) -> None:
    """With 2 % of them, within 10 % of the full throughput of a server of 64."""
    world = World(1)
    upstream = Refusing(
        Queueing(world, about(0.2, noise=0.3), slots=always(64)),
        lambda _, attempt: attempt < 3 and world.random.random() < 0.02,
        fault=fault,
        seconds=5.0,
    )
    assert Drive(upstream, lines=13_000).settle(20.0).run(20.0).rate >= 0.9 * 64 / 0.2


def test_with_few_lines_the_limit_stays_as_it_is() -> None:
    """Free slots say nothing about the upstream, and nothing of the limit is lost."""
    world = World(1)
    drive = Drive(Queueing(world, about(0.2, noise=0.3), slots=always(32)), lines=3200)
    before = drive.settle(15.0).run(4.0).usual_limit
    drive.world.run_until(lambda: drive.works[0].is_done, limit_seconds=10.0)
    for _ in range(60):
        drive.works.append(drive.dispatcher.add(5))
        drive.run(0.5)
    drive.works.append(drive.dispatcher.add(4000))
    span = drive.run(20.0)
    assert span.limits[0] >= 0.75 * before
    assert span.rate >= 0.95 * 32 / 0.2


def test_an_engine_that_tells_its_queue_is_believed() -> None:
    """Its slots are busy from the end of the ramp on, and its queue is hardly longer than what it processes."""
    world = World(1)
    engine = Engine(world, slots=64, tokens=256, step_seconds=0.0018, request_seconds=0.00015, noise=0.15)
    drive = Drive(engine, lines=3000)
    drive.dispatcher.read_queue_length(engine.queue_length)
    drive.settle(20.0)
    waiting, running = list[float](), list[float]()
    for _ in range(100):
        drive.run(0.2)
        length = engine.queue_length()
        waiting.append(length.waiting)
        running.append(length.running or 0.0)
    assert sum(running) / 100 >= 60
    assert sum(waiting) / 100 <= 80


@pytest.mark.parametrize(
    ("steps", "seed", "reads"),
    [
        (2, 2, True),
        (16, 2, False),
        *(
            pytest.param(*engine, marks=pytest.mark.proof)
            for engine in ((2, 2, False), (4, 1, True), (4, 1, False), (16, 2, True))
        ),
    ],
)
def test_requests_that_wait_for_the_next_step_are_no_queue(steps: int, seed: int, reads: bool) -> None:
    """An engine whose answers need few steps always has requests that wait for the next one. Its slots are used all the
    same: at least 0.95 of the answers that it gives with three times as many in flight as it has slots."""
    rates = dict[int | None, float]()
    for cap in (None, 192):
        engine = Engine(
            World(seed),
            slots=64,
            tokens=32,
            step_seconds=0.0018,
            request_seconds=0.00015,
            noise=0.15,
            steps=steps,
            at_once=False,
        )
        drive = Drive(engine, lines=8_000, cap=cap)
        if reads:
            drive.dispatcher.read_queue_length(engine.queue_length)
        rates[cap] = drive.settle(20.0).run(20.0).rate
    assert (rates[None] or 0.0) >= 0.95 * (rates[192] or 0.0)


class Rounds:
    """Answers rounds of requests by hand: each takes as long as the function of the number in flight says."""

    def __init__(self, limit: ConcurrencyLimit, latency: Callable[[int], float]) -> None:
        self.limit, self.latency, self.now = limit, latency, 0.0

    def run(self, rounds: int) -> list[int]:
        """Return the limits."""
        limits = []
        for _ in range(rounds):
            number = self.limit.limit
            limits.append(number)
            started = [
                (in_flight, self.limit.on_start("m", in_flight, self.now)) for in_flight in [number] * 2 * number
            ]
            self.now += self.latency(number)
            for in_flight, round_ in started:
                if round_ is not None:
                    self.limit.on_answer(round_, "m", in_flight, in_flight, self.latency(number), self.now)
        return limits


def test_the_first_limit_is_the_cap_if_that_is_lower() -> None:
    assert ConcurrencyLimit(cap=1024).limit == FIRST_LIMIT
    assert ConcurrencyLimit(cap=4).limit == 4


def test_a_ramp_goes_on_while_more_in_flight_means_more_answers() -> None:
    limits = Rounds(ConcurrencyLimit(cap=1000), lambda _: 1.0).run(20)
    assert limits[:3] == sorted(limits[:3])
    assert limits[3] == 1000
    assert min(limits[3:]) >= 800


def test_a_limit_that_was_cut_before_anything_was_answered_is_raised_at_once() -> None:
    """If everything fails at first, it is cut, and nobody knows whether it was too high."""
    limit = ConcurrencyLimit(cap=1024)
    limit.set_limit(16, 5.0)
    limits = Rounds(limit, lambda number: max(0.5, number / 512)).run(6)
    assert limits[:2] == [16, 24], "the first step is a small one"
    assert max(limits) >= 256


def test_a_limit_that_is_cut_after_it_was_measured_is_held() -> None:
    limit = ConcurrencyLimit(cap=1024)
    rounds = Rounds(limit, lambda number: max(0.5, number / 512))
    rounds.run(10)
    limit.set_limit(100, rounds.now)
    assert rounds.run(2) == [100, 100]


def test_a_ramp_ends_when_more_in_flight_only_take_longer() -> None:
    """Beyond 64 each more makes all others wait."""
    limits = Rounds(ConcurrencyLimit(cap=1000), lambda number: max(1.0, number / 64)).run(60)
    assert max(limits) <= 512
    assert 64 <= sum(limits[20:]) / 40 <= 80


@pytest.mark.rule("F2", "The limit is never above the cap, also when the cap changes.")
def test_the_cap_bounds_the_limit_and_what_it_lowered_is_restored() -> None:
    limit = ConcurrencyLimit(cap=1000)
    rounds = Rounds(limit, lambda _: 1.0)
    rounds.run(5)
    limit.set_cap(10)
    assert max(rounds.run(20)) <= 10
    limit.set_cap(500)
    assert limit.limit == 500


def test_a_ramp_waits_for_the_round_at_the_cap_even_if_the_engine_has_no_queue() -> None:
    """Otherwise each reading would begin the round again, and the limit would stay at the cap for ever."""
    limit = ConcurrencyLimit(cap=FIRST_LIMIT)
    rounds = [limit.on_start("m", in_flight, 0.0) for in_flight in range(1, FIRST_LIMIT + 1)]
    limit.on_queue_length(QueueLength(running=FIRST_LIMIT, waiting=0), in_flight=FIRST_LIMIT, now=5.0)
    limit.on_start("m", FIRST_LIMIT, 5.0)
    assert limit.on_start("m", FIRST_LIMIT, 5.0) is None, "the round is full"
    assert rounds[0] is rounds[-1]


@pytest.mark.rule("D9", "While an engine tells that nothing waits, a ramp does not wait for slow answers.")
def test_a_ramp_does_not_wait_for_slow_answers_of_an_engine_without_a_queue() -> None:
    limit = ConcurrencyLimit(cap=1024)
    for in_flight in range(1, FIRST_LIMIT + 1):
        limit.on_start("m", in_flight, 0.0)
    all_run = QueueLength(running=FIRST_LIMIT, waiting=0)
    limit.on_queue_length(all_run, in_flight=FIRST_LIMIT, now=0.5)
    assert limit.limit == FIRST_LIMIT, "quick answers are waited for"
    limit.on_queue_length(all_run, in_flight=FIRST_LIMIT, now=5.0)
    assert limit.limit == 4 * FIRST_LIMIT
    for in_flight in range(FIRST_LIMIT + 1, limit.limit + 1):
        limit.on_start("m", in_flight, 5.0)
    limit.on_queue_length(QueueLength(running=100, waiting=28), in_flight=limit.limit, now=10.0)
    assert limit.limit == 4 * FIRST_LIMIT


@pytest.mark.parametrize(
    ("queue", "looks_up"), [(QueueLength(running=50, waiting=0), True), (QueueLength(running=19, waiting=31), False)]
)
def test_a_probe_looks_first_where_the_queue_of_the_engine_points(queue: QueueLength, looks_up: bool) -> None:
    limit = ConcurrencyLimit(cap=100)
    rounds = Rounds(limit, lambda number: max(1.0, number / 50))
    rounds.run(10)
    limit.set_limit(50, rounds.now)
    limit.on_queue_length(queue, in_flight=50, now=rounds.now)
    first = next(number for number in rounds.run(8) if number != 50)
    assert (first > 50) == looks_up


@pytest.mark.rule(
    "D9", "If an engine tells that many of our requests wait in it, the limit falls to what keeps it busy."
)
def test_a_long_queue_of_our_requests_is_cut_at_once() -> None:
    """The first probe leaves as many waiting as are processed, and nothing higher is tried while the queue is long."""
    limit = ConcurrencyLimit(cap=1024)
    rounds = Rounds(limit, lambda number: max(1.0, number / 16))
    limit.set_limit(128, 0.0)
    limits = list[int]()
    for _ in range(20):
        running = min(16, limit.limit)
        limit.on_queue_length(
            QueueLength(running=running, waiting=limit.limit - running), in_flight=limit.limit, now=rounds.now
        )
        limits += rounds.run(1)
    assert next(number for number in limits if number != 128) == 33
    assert limit.limit == 33
    assert max(limits) == 128


@pytest.mark.rule("D9", "A queue of others inside an engine does not keep the limit from growing.")
def test_a_long_queue_does_not_forbid_higher_limits() -> None:
    """Fewer than 200 in flight are slower, although 400 requests of another model wait."""
    limit = ConcurrencyLimit(cap=400)
    rounds = Rounds(limit, lambda number: max(1.0, number / 200))
    limit.set_limit(50, 0.0)
    for _ in range(40):
        limit.on_queue_length(QueueLength(running=8, waiting=400), in_flight=limit.limit, now=rounds.now)
        rounds.run(1)
    assert limit.limit >= 150


@pytest.mark.rule("D9", "A queue length that does not contain the requests in flight is ignored.")
def test_an_engine_without_our_requests_is_not_believed() -> None:
    """It is another one, or one of several, and tells nothing about the one that answers."""
    limit = ConcurrencyLimit(cap=1024)
    for in_flight in range(1, FIRST_LIMIT + 1):
        limit.on_start("m", in_flight, 0.0)
    limit.on_queue_length(QueueLength(running=0, waiting=0), in_flight=FIRST_LIMIT, now=5.0)
    assert limit.limit == FIRST_LIMIT


def test_a_queue_length_beside_free_slots_says_nothing() -> None:
    """The engine is idle because there is little to do, or it is busy with the requests of others."""
    limit = ConcurrencyLimit(cap=100)
    limit.set_limit(50, 0.0)
    limit.on_queue_length(QueueLength(running=1, waiting=500), in_flight=10, now=0.0)
    assert limit.limit == 50
