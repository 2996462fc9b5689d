"""How many requests of a model its upstream accepts, learned from refusals: by number, by rate, or by chance."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from math import inf
from random import Random

import pytest

from batchline.pipeline.dispatch.limiter.load import Start
from batchline.pipeline.dispatch.limiter.refusals import RefusalLimit
from tests.support.starts import start_of
from tests.support.zoo.upstreams import Bucket, Window
from tests.support.zoo.world import World

SLOTS = 100
"""As many are in flight at most, whatever the limit is."""
LATENCY_SECONDS, REFUSAL_SECONDS = 0.1, 0.002
CAPACITY = SLOTS / LATENCY_SECONDS

Accepts = Callable[[float, int], bool]
"""Returns whether the upstream accepts a request at a time, beside so many that it accepted and did not answer yet."""


class Drive:
    """Starts requests as fast as a limit allows, and counts what becomes of them."""

    def __init__(self, *, latency: float = LATENCY_SECONDS, most_delay: float | None = None) -> None:
        self.limit, self.world = RefusalLimit(), World(1)
        self.accepted, self.refused = Counter[int](), Counter[int]()
        """By the second in which they started."""
        self.retry_after: Callable[[float], float] | None = None
        self.part_about_lines = 0.0
        """The part of the refusals that seems to be only about their lines."""
        self._latency = latency
        self._most_delay = most_delay
        """The longest time for which answers are on their way, if each is processed in the same time. Otherwise the
        latencies vary, and answers arrive at once."""
        self._in_flight = self._processed = 0
        self._due = inf

    @property
    def now(self) -> float:
        return self.world.time

    def run(self, accepts: Accepts, *, until: float) -> None:
        self._accepts = accepts
        self._pump()
        self.world.run_until(lambda: False, limit_seconds=until - self.now)

    def _pump(self) -> None:
        while (count := int(min(SLOTS - self._in_flight, self.limit.allowance(self._in_flight, self.now)))) > 0:
            self.limit.on_start(self.now, count, self._in_flight + count)
            for order in range(self.limit.started - count + 1, self.limit.started + 1):
                self._in_flight += 1
                self._send(start_of("m", self.now, in_flight=self._in_flight, order=order))
        wait = self.limit.wait(self._in_flight, self.now)
        due = self.now + max(wait, 0.001)
        if wait > 0 and due < self._due:
            self._due = due
            self.world.after(due - self.now, partial(self._on_timer, due))

    def _on_timer(self, due: float) -> None:
        if due == self._due:
            self._due = inf
            self._pump()

    def _send(self, start: Start) -> None:
        if self._accepts(self.now, self._processed):
            self.accepted[int(self.now)] += 1
            self._processed += 1
            seconds, delay = self._latency * self.world.uniform(0.8, 1.2), 0.0
            if self._most_delay is not None:
                seconds, delay = self._latency, self.world.uniform(0.002, self._most_delay)
            self.world.after(seconds, self._end)
            self.world.after(seconds + delay, partial(self._answer, start))
        else:
            self.refused[int(self.now)] += 1
            self.world.after(REFUSAL_SECONDS, partial(self._refuse, start))

    def _end(self) -> None:
        self._processed -= 1

    def _answer(self, start: Start) -> None:
        self._in_flight -= 1
        self.limit.on_answers([start], self.now)
        self._pump()

    def _refuse(self, start: Start) -> None:
        self._in_flight -= 1
        retry_after = None if self.retry_after is None else self.retry_after(self.now)
        if self.world.uniform(0, 1) < self.part_about_lines:
            self.limit.on_other_refusal(start)
        else:
            self.limit.on_refusal(start, self.now, retry_after=retry_after)
        self._pump()


def begin(limit: RefusalLimit, count: int, now: float) -> list[Start]:
    """Start so many requests, with none beside them."""
    limit.on_start(now, count, count)
    return [
        start_of("m", now, in_flight=number, order=limit.started - count + number) for number in range(1, count + 1)
    ]


def number(slots: int) -> Accepts:
    return lambda _, processed: processed < slots


def rate(per_second: float, *, burst: float | None = None) -> Accepts:
    bucket = Bucket(per_second, max(1.0, per_second / 10) if burst is None else burst)
    return lambda now, _: bucket.take(now)


def chance(refused: float, *, seed: int = 1) -> Accepts:
    random = Random(seed)
    return lambda *_: random.random() >= refused


def everything(now: float, processed: int) -> bool:
    return True


def nothing(now: float, processed: int) -> bool:
    return False


def mean(counts: Counter[int], seconds: range) -> float:
    return sum(counts[second] for second in seconds) / len(seconds)


def test_until_something_is_refused_nothing_is_held_back() -> None:
    drive = Drive()
    drive.run(everything, until=5.0)
    limit = drive.limit
    assert (limit.allowance(500, 5.0), limit.wait(500, 5.0), limit.rate, limit.is_limiting) == (inf, 0.0, None, False)


@pytest.mark.rule("D9", "An upstream that accepts a number at once has about that number, and few are refused.")
@pytest.mark.parametrize("slots", [1, *(pytest.param(slots, marks=pytest.mark.proof) for slots in (3, 8)), 30])
def test_a_number_is_learned_and_seldom_exceeded(slots: int) -> None:
    drive = Drive()
    drive.run(number(slots), until=40.0)
    settled = range(5, 40)
    assert mean(drive.accepted, settled) >= 0.92 * slots / LATENCY_SECONDS
    assert mean(drive.refused, settled) <= 0.15 * mean(drive.accepted, settled) + 2


@pytest.mark.rule("D9", "An upstream that accepts a rate gets about that rate, and few are refused.")
@pytest.mark.parametrize("per_second", [4, *(pytest.param(rate, marks=pytest.mark.proof) for rate in (20, 100)), 250])
def test_a_rate_is_learned_and_seldom_exceeded(per_second: int) -> None:
    drive = Drive()
    drive.run(rate(per_second), until=40.0)
    settled = range(5, 40)
    assert mean(drive.accepted, settled) >= 0.78 * per_second
    assert mean(drive.refused, settled) <= 0.25 * per_second


def test_the_first_refusals_show_the_number_that_is_accepted() -> None:
    """It is known when the first burst was refused, and need not be approached."""
    drive = Drive()
    drive.run(number(8), until=0.3)
    assert 6 <= drive.limit.limit <= 12


@pytest.mark.parametrize("latency", [0.02, 2.0])
def test_a_rate_is_learned_however_long_answers_take(latency: float) -> None:
    drive = Drive(latency=latency)
    drive.run(rate(20, burst=20), until=60.0)
    assert mean(drive.accepted, range(20, 60)) >= 0.85 * 20


@pytest.mark.rule(
    "D9", "When refusals end, the capacity is used again within 15 seconds, whatever the rate was cut to."
)
@pytest.mark.parametrize("per_second", [1, *(pytest.param(rate, marks=pytest.mark.proof) for rate in (10, 100)), 700])
@pytest.mark.parametrize("seconds", [3.0, 20.0])
def test_the_capacity_is_used_again_15_seconds_after_the_last_refusal(per_second: int, seconds: float) -> None:
    drive = Drive()
    drive.run(rate(per_second), until=seconds)
    drive.run(everything, until=seconds + 16.0)
    assert drive.accepted[int(seconds) + 15] >= 0.97 * CAPACITY


@pytest.mark.rule("D9", "After refusals of everything, the capacity is used again within 15 seconds.")
@pytest.mark.parametrize("seconds", [1.0, 10.0, 30.0])
def test_the_capacity_is_used_again_15_seconds_after_everything_was_refused(seconds: float) -> None:
    """Also where no circuit breaker says that it was an outage."""
    drive = Drive()
    drive.run(everything, until=5.0)
    drive.run(nothing, until=5.0 + seconds)
    drive.run(everything, until=5.0 + seconds + 16.0)
    assert drive.accepted[int(seconds) + 20] >= 0.97 * CAPACITY


@pytest.mark.parametrize("kind", [number, rate])
def test_a_limit_that_grows_tenfold_is_used_within_15_seconds(kind: Callable[[int], Accepts]) -> None:
    few, many = (5, 50) if kind is number else (50, 500)
    drive = Drive()
    drive.run(kind(few), until=20.0)
    drive.run(kind(many), until=36.0)
    assert drive.accepted[35] >= 0.9 * 500


@pytest.mark.parametrize(
    "seconds", [20, *(pytest.param(seconds, marks=pytest.mark.proof) for seconds in (22, 24, 26)), 28]
)
def test_a_number_that_grows_is_used_soon_although_starts_are_evenly_spaced(seconds: int) -> None:
    """If answers are a while on their way, it may seem that requests are refused that follow others too closely."""
    drive = Drive(most_delay=0.012)
    drive.run(number(17), until=seconds)
    drive.run(number(SLOTS), until=seconds + 3.0)
    assert drive.accepted[seconds + 2] >= 0.85 * CAPACITY


@pytest.mark.parametrize("kind", [number, rate])
def test_a_limit_that_falls_to_a_tenth_is_followed_within_seconds(kind: Callable[[int], Accepts]) -> None:
    few, many = (5, 50) if kind is number else (50, 500)
    drive = Drive()
    drive.run(kind(many), until=20.0)
    drive.run(kind(few), until=40.0)
    assert mean(drive.refused, range(25, 40)) <= 0.25 * 50
    assert mean(drive.accepted, range(25, 40)) >= 0.88 * 50


@pytest.mark.rule("D9", "Refusals that no rate avoids do not slow anything down.")
@pytest.mark.parametrize("part", [0.02, 0.05])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.proof) for seed in (2, 3))])
def test_few_refusals_that_no_limit_avoids_are_tolerated(part: float, seed: int) -> None:
    drive = Drive()
    drive.run(everything, until=2.0)
    drive.run(chance(part, seed=seed), until=20.0)
    assert mean(drive.accepted, range(3, 20)) >= 0.9 * CAPACITY * (1 - part)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.proof) for seed in (2, 3))])
def test_many_refusals_that_no_limit_avoids_are_tolerated_after_a_test(seed: int) -> None:
    """At a lower limit the same part is refused: so the limit does not matter."""
    drive = Drive()
    drive.run(everything, until=2.0)
    drive.run(chance(0.35, seed=seed), until=30.0)
    assert mean(drive.accepted, range(10, 30)) >= 0.9 * CAPACITY * 0.65


@pytest.mark.rule("D9", "Refusals do not slow anything down if more are accepted the more are sent.")
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.proof) for seed in (2, 3))])
def test_refusals_are_tolerated_while_more_are_accepted_the_more_are_sent(seed: int) -> None:
    """A balancer chooses by chance between a server of 4 slots, which is full, and one of 64."""
    random = Random(seed)
    drive = Drive()
    drive.run(lambda _, processed: processed < 4 or (processed < 68 and random.random() < 0.5), until=30.0)
    assert mean(drive.accepted, range(15, 30)) >= 0.65 * 68 / LATENCY_SECONDS


def test_a_limit_that_holds_nothing_back_is_not_raised() -> None:
    """It would be raised without end while half of the requests are refused, and more refusals would be tolerated."""
    drive = Drive()
    drive.run(chance(0.5), until=30.0)
    assert drive.limit.limit <= 4 * SLOTS
    assert drive.limit._parts.usual < 0.6


@pytest.mark.rule("D3", "Where some are refused at any limit, a refusal costs a half, so that no line fails by chance.")
def test_a_refusal_costs_a_half_where_some_are_refused_at_any_limit() -> None:
    drive = Drive()
    drive.run(everything, until=2.0)
    assert drive.limit.cost == 1.0
    drive.run(chance(0.35), until=30.0)
    assert drive.limit.cost == 0.5


def test_the_wait_ends_when_one_may_start() -> None:
    """Below one in flight, starts are spaced by time."""
    drive = Drive()
    drive.run(rate(4), until=20.0)
    limit, now = drive.limit, drive.now
    assert limit.limit < 1
    while limit.allowance(0, now) >= 1:
        limit.on_start(now, 1, 1)
    wait = limit.wait(0, now)
    assert 0 < wait < 0.5
    assert limit.allowance(0, now + 0.9 * wait) < 1
    assert limit.allowance(0, now + 1.01 * wait) >= 1


def test_probes_do_not_hide_that_the_limit_is_too_high() -> None:
    """A sample takes 10 s if answers take 5 s. Probes that happen upon a free slot come more often."""
    drive = Drive(latency=5.0)
    drive.run(number(6), until=180.0)
    limits = []
    for second in range(181, 240):
        drive.run(number(6), until=float(second))
        limits.append(drive.limit.limit)
    assert 6 <= sum(limits) / len(limits) <= 7.5


@pytest.mark.rule("D9", "A Retry-After that most answers carry is heeded by all lines of the model.")
def test_a_retry_after_blocks_all_starts() -> None:
    drive = Drive()
    drive.run(everything, until=1.0)
    drive.retry_after = lambda _: 5.0
    drive.run(nothing, until=2.0)
    limit = drive.limit
    assert limit.allowance(0, 2.0) == 0
    assert 5.0 <= limit.blocked_until <= 6.5
    refused = drive.refused.total()
    drive.run(nothing, until=5.0)
    assert refused <= 3 * SLOTS
    assert drive.refused.total() <= refused + 1
    drive.run(everything, until=20.0)
    assert drive.accepted[19] >= 0.97 * CAPACITY


def test_refusals_that_seem_to_be_about_lines_do_not_count_as_accepted() -> None:
    """Some lines are refused again and again by a limit for each span of time, as if it were about these lines."""
    drive = Drive()
    drive.run(everything, until=1.0)
    drive.retry_after, drive.part_about_lines = (lambda now: 31.0 - now), 0.3
    drive.run(nothing, until=3.0)
    assert drive.limit.blocked_until == pytest.approx(31.0)


def test_a_retry_after_of_a_few_lines_is_about_those_lines() -> None:
    """If one in fifty is refused and asked to wait for a minute, the others go on."""
    drive = Drive()
    drive.run(everything, until=2.0)
    drive.retry_after = lambda _: 60.0
    drive.run(chance(0.02), until=20.0)
    assert mean(drive.accepted, range(5, 20)) >= 0.9 * CAPACITY


@pytest.mark.rule(
    "D9", "After an outage of 429s the capacity is used again within 15 seconds, whatever Retry-After says."
)
@pytest.mark.parametrize("retry_after", [60.0, 300.0])
def test_an_outage_that_ends_before_its_retry_after_is_noticed(retry_after: float) -> None:
    drive = Drive()
    drive.run(everything, until=2.0)
    drive.retry_after = lambda _: retry_after
    drive.run(nothing, until=62.0)
    assert sum(drive.refused[second] for second in range(4, 62)) <= 58 / 5
    drive.run(everything, until=80.0)
    assert mean(drive.accepted, range(77, 80)) >= 0.95 * CAPACITY


@pytest.mark.parametrize("latency", [0.2, 0.5])
def test_a_low_rate_without_bursts_is_used_though_two_at_once_are_always_refused(latency: float) -> None:
    """Two in flight are refused as by an upstream with one slot, but two that come evenly are accepted."""
    drive = Drive(latency=latency)
    drive.run(rate(2 / latency, burst=1), until=120.0)
    assert mean(drive.accepted, range(40, 120)) >= 0.8 * 2 / latency


def test_a_trial_of_even_starts_that_is_cut_short_leaves_them_free() -> None:
    drive = Drive(latency=0.2)
    while not drive.limit._tries_even:
        drive.run(number(1), until=drive.now + 0.01)
    assert drive.limit._slots.is_even
    drive.limit.measure_again(drive.now)
    assert not drive.limit._slots.is_even


def test_one_slot_is_used_although_evenly_spaced_starts_are_tried() -> None:
    drive = Drive(latency=0.2)
    drive.run(number(1), until=120.0)
    assert mean(drive.accepted, range(20, 120)) >= 0.9 / 0.2


def cools_down(slots: int, seconds: float) -> Accepts:
    """Refuse everything for so long after each request beyond the slots."""
    until = 0.0

    def accepts(now: float, processed: int) -> bool:
        nonlocal until
        if now >= until and processed >= slots:
            until = now + seconds
        return now >= until

    return accepts


@pytest.mark.parametrize("seconds", [1.0, 5.0])
def test_probes_that_lead_to_blocks_become_rare(seconds: float) -> None:
    """Each costs the time in which nothing is accepted: with one a second, 1 / (1 + seconds) would be left."""
    drive = Drive()
    drive.run(cools_down(20, seconds), until=200.0)
    assert mean(drive.accepted, range(50, 200)) >= 0.7 * 20 / LATENCY_SECONDS


def test_a_limit_that_has_grown_is_found_although_probes_led_to_blocks() -> None:
    drive = Drive()
    drive.run(cools_down(20, 2.0), until=30.0)
    drive.run(cools_down(60, 2.0), until=200.0)
    assert mean(drive.accepted, range(150, 200)) >= 0.7 * 60 / LATENCY_SECONDS


def test_refusals_that_arrive_during_a_block_do_not_lower_the_limit() -> None:
    """The requests that were in flight when the block began say nothing about the limit after it."""
    window = Window(300, 2.0)
    drive = Drive(latency=0.02)
    drive.retry_after = lambda now: max(0.1, window.ends - now)
    drive.run(lambda now, _: window.take(now), until=40.0)
    assert mean(drive.accepted, range(10, 40)) >= 0.97 * 300 / 2.0


def test_slots_that_free_before_their_retry_after_are_used() -> None:
    """Some upstreams send the same Retry-After whatever they refuse. Four slots of 10 s are 0.4 answers a second."""
    drive = Drive(latency=10.0)
    drive.retry_after = lambda _: 60.0
    drive.run(number(4), until=600.0)
    assert mean(drive.accepted, range(60, 600)) >= 0.85 * 0.4


@pytest.mark.rule(
    "D3", "A line that is tried before the time of a Retry-After to others, and is refused, spends nothing."
)
def test_a_refused_try_in_a_block_costs_nothing() -> None:
    drive = Drive()
    drive.run(everything, until=1.0)
    drive.retry_after = lambda _: 60.0
    drive.run(nothing, until=2.0)
    limit, now = drive.limit, 10.0
    assert limit.allowance(0, now) == 1
    (tried,) = begin(limit, 1, now)
    assert limit.allowance(0, now) == 0
    assert limit.on_refusal(tried, now, retry_after=70.0) == 0.0
    assert limit.blocked_until == 80.0


def test_a_probe_that_happens_upon_a_free_slot_does_not_remove_the_limit() -> None:
    """The slots of refused requests are free when a probe begins, so few are taken then."""
    drive = Drive(latency=10.0)
    drive.run(number(4), until=600.0)
    assert max(drive.refused[second] for second in range(60, 600)) < SLOTS / 2


def test_a_window_with_retry_after_is_used_at_once_when_it_opens() -> None:
    """1,000 in each 10 s: nearly all of them are used, and about two rounds are refused at the end of each window."""
    window, drive = Window(1000, 10.0), Drive()
    drive.retry_after = lambda now: window.ends - now
    drive.run(lambda now, _: window.take(now), until=50.0)
    assert drive.accepted.total() >= 0.95 * 5 * 1000
    assert drive.refused.total() <= 5 * 3 * SLOTS


def test_a_bucket_with_retry_after_is_used_evenly_in_the_end() -> None:
    """Blocking for a second after every refusal would waste most of it."""
    drive = Drive()
    drive.retry_after = lambda _: 1.0
    drive.run(rate(100, burst=10), until=40.0)
    assert mean(drive.accepted, range(10, 40)) >= 0.9 * 100


@pytest.mark.rule("D9", "After an outage the last good rate is reached again within seconds.")
def test_after_an_outage_the_last_good_rate_is_soon_reached() -> None:
    drive = Drive()
    drive.run(rate(200), until=20.0)
    drive.run(nothing, until=25.0)
    drive.limit.on_outage_over(drive.now)
    drive.run(rate(200), until=35.0)
    assert mean(drive.accepted, range(28, 35)) >= 0.88 * 200


def test_after_an_outage_that_nothing_was_learned_in_nothing_is_held_back() -> None:
    drive = Drive()
    drive.run(everything, until=5.0)
    drive.run(chance(0.03), until=6.0)
    drive.limit.on_outage_over(6.0)
    assert drive.limit.allowance(0, 6.0) == inf


def test_however_much_is_refused_something_starts() -> None:
    """Lines must end, also if none of them is accepted."""
    drive = Drive()
    drive.run(nothing, until=60.0)
    assert (
        min(drive.refused[second] + drive.refused[second + 1] + drive.refused[second + 2] for second in range(58)) >= 1
    )


@pytest.mark.rule("D3", "A refusal that the search for a limit provoked costs a line nothing.")
def test_refusals_while_more_is_tried_cost_nothing_and_others_do() -> None:
    """Nor do those of requests that started before the limit was set."""
    limit = RefusalLimit()
    first = begin(limit, 20, 0.0)
    for start in first[:4]:
        limit.on_answers([start], LATENCY_SECONDS)
    early, late = first[4:9], first[9:]
    assert all(limit.on_refusal(start, 0.2, retry_after=None) == 1.0 for start in early)
    assert limit.is_limiting
    assert all(limit.on_refusal(start, 0.2, retry_after=None) == 0.0 for start in late)
    (held,) = begin(limit, 1, 0.3)
    assert 0.5 <= limit.on_refusal(held, 0.3, retry_after=None) <= 1.0
    full = int(limit.limit)
    assert limit.allowance(full, 9.0) > 0
    (probe,) = begin(limit, 1, 9.0)
    assert limit.on_refusal(probe, 9.0, retry_after=None) == 0.0


def test_a_refusal_that_is_about_a_line_takes_its_slot_and_changes_nothing_else() -> None:
    """Otherwise the slot would be used again at once, and the rate would exceed the limit."""
    drive = Drive()
    drive.run(number(8), until=5.4)
    limit, now = drive.limit, drive.now
    before, free = limit.limit, limit.allowance(0, now)
    limit.on_start(now, 1, 1)
    limit.on_other_refusal(start_of("m", now, in_flight=1, order=limit.started))
    assert limit.limit == before
    assert abs(limit.allowance(0, now) - (free - 1)) <= 1


def test_a_limit_that_is_given_up_holds_nothing_back() -> None:
    drive = Drive()
    drive.run(number(8), until=5.0)
    assert drive.limit.is_limiting
    drive.limit.give_up()
    assert (drive.limit.is_limiting, drive.limit.allowance(50, 5.0), drive.limit.rate) == (False, inf, None)


def test_the_rate_is_the_limit_divided_by_the_latency() -> None:
    drive = Drive()
    drive.run(number(8), until=10.0)
    assert drive.limit.rate == pytest.approx(8 / LATENCY_SECONDS, rel=0.2)
