"""Concurrency that finds an upstream's limit by itself: ARCHITECTURE's "Concurrency", and D3's lower end.

Servers are simulated in virtual time; ``pytest -m proof -s`` runs every server with many seeds and prints a table.
"""

from math import inf
from random import Random

import pytest
from _pytest.mark import ParameterSet

from batchline.pipeline.dispatch.limiter import Limiter, Sign
from tests.support.limited_servers import (
    Batching,
    Drive,
    Faulty,
    Fixed,
    Limits,
    Moody,
    Queueing,
    RateLimited,
    Seconds,
    SlotLimited,
    Span,
    Stalling,
    Stormy,
    lognormal,
    noisy,
    steady,
    with_slow_ones,
)

SEEDS = range(1, 9)
MINUTES = 60
KINDS = ["steady", "almost steady", "noisy", "lognormal"]


def proof(*values: object) -> ParameterSet:
    """A case that takes long."""
    return pytest.param(*values, marks=pytest.mark.proof)


def service(kind: str, seconds: float, seed: int) -> Seconds:
    random = Random(seed)
    return {
        "steady": steady(seconds),
        "almost steady": noisy(seconds, random, noise=0.05),
        "noisy": noisy(seconds, random),
        "lognormal": lognormal(seconds, random),
    }[kind]


def show(what: str, span: Span) -> None:
    limits = f"{min(span.limits)}..{max(span.limits)}"
    print(f"{what:48} {span.rate:8.1f}/s  in flight {span.in_flight:6.1f} ({limits})  refused {span.refused:.2%}")


def check_silent_queue(kind: str, seconds: float, seed: int, *, minutes: float) -> None:
    """32 are served at once, the rest wait in silence."""
    settling = 60 if seconds == 1.0 else 20
    drive = Drive(Limiter(cap=None), Queueing(32, service(kind, seconds, seed))).run(settling + minutes * MINUTES)
    settled = drive.span(settling, settling + minutes * MINUTES)
    show(f"serves 32 at once, {seconds} s {kind}, seed {seed}", settled)
    assert min(settled.limits) >= 28
    assert max(settled.limits) <= 48
    assert settled.rate >= 0.95 * 32 / seconds


@pytest.mark.parametrize(("seconds", "minutes"), [(0.05, 0.5), (0.2, 2), (1.0, 10)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_silent_queue_is_found_and_kept_short(kind: str, seconds: float, minutes: float) -> None:
    """For a server that serves 32 it settles between 28 and 48 in flight within 20 s, 60 s where one answer takes a
    second, and stays there."""
    check_silent_queue(kind, seconds, 2, minutes=minutes)


@pytest.mark.proof
@pytest.mark.parametrize("seconds", [0.02, 0.2, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_silent_queue_is_kept_short_for_ten_minutes(kind: str, seconds: float) -> None:
    """As above, with many seeds."""
    for seed in SEEDS:
        check_silent_queue(kind, seconds, seed, minutes=10)


def test_a_first_level_that_is_too_high_is_left() -> None:
    """A server of 4 slots gets few more than 4, within 20 s, though the first guess was 16."""
    drive = Drive(Limiter(cap=None), Queueing(4, noisy(0.2, Random(1)))).run(80)
    assert drive.span(20, 80).in_flight <= 7
    assert drive.span(20, 80).rate >= 0.95 * 4 / 0.2


@pytest.mark.parametrize("seconds", [0.01, 0.2, 2.0])
@pytest.mark.parametrize("quick", [True, False], ids=["quick refusals", "slow refusals"])
@pytest.mark.parametrize("burst", [proof(5), 40, proof(200)])
def test_a_rate_limit_is_learned(seconds: float, quick: bool, burst: float) -> None:
    """Of 40 a second at least 90 % are used and under 5 % of requests are refused, from 30 s on for 10 minutes."""
    refusal = 0.005 if quick else seconds
    server = RateLimited(40, noisy(seconds, Random(1)), burst=burst, refusal_seconds=refusal)
    settled = Drive(Limiter(cap=None), server).run(30 + 10 * MINUTES).span(30, 30 + 10 * MINUTES)
    show(f"40/s, bucket of {burst}, {seconds} s, refused after {refusal} s", settled)
    assert settled.rate >= 0.9 * 40
    assert settled.refused < 0.05


def test_a_rate_limit_that_is_lifted_is_noticed() -> None:
    """The pace grows faster the longer nothing is refused: ten times the rate is used within three minutes."""
    server = RateLimited(40, noisy(0.2, Random(1)), burst=40, refusal_seconds=0.005)
    drive = Drive(Limiter(cap=64), server).run(60)
    server.rate = inf
    assert drive.run(300).span(240, 300).rate >= 0.9 * 64 / 0.2


@pytest.mark.parametrize("share", [0.02, 0.05, proof(0.1)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_refusals_that_no_pace_avoids_are_put_up_with(share: float, seed: int) -> None:
    """Where 429 comes at any rate, at least 85 % of what a fixed 64 does is done, from 10 s on."""
    settled = {}
    for name, limiter in (("fixed", Fixed(64)), ("found", Limiter(cap=64))):
        random = Random(seed)
        drive = Drive(limiter, Moody(64, noisy(0.2, random), random=random, share=share)).run(120)
        settled[name] = drive.span(10, 120)
    show(f"{share:.0%} refused at any rate, seed {seed}", settled["found"])
    assert settled["found"].rate >= 0.85 * settled["fixed"].rate


@pytest.mark.parametrize("seconds", [proof(0.02), 0.2, 1.0])
@pytest.mark.parametrize("kind", ["steady", "lognormal"])
def test_refusals_of_the_thirty_third_at_once(kind: str, seconds: float) -> None:
    """A 429 may be about the number in flight. Hardly any is refused, and most of the capacity is used."""
    server = SlotLimited(32, service(kind, seconds, 1), sign=Sign.THROTTLED)
    settled = Drive(Limiter(cap=None), server).run(240).span(30, 240)
    show(f"429 over 32 at once, {seconds} s {kind}", settled)
    assert settled.refused < 0.02
    assert settled.rate >= 0.75 * 32 / seconds


def test_overload_by_the_thirty_third_at_once() -> None:
    """503 makes it shrink below what overloads, and not far below."""
    server = SlotLimited(32, noisy(0.2, Random(1)), sign=Sign.OVERLOADED)
    settled = Drive(Limiter(cap=None), server).run(240).span(30, 240)
    assert settled.refused < 0.05
    assert settled.rate >= 0.75 * 32 / 0.2


@pytest.mark.parametrize("seconds", [proof(0.02), 0.2])
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cap_is_reached_quickly(kind: str, seconds: float, seed: int) -> None:
    """At least 97 % of what a fixed 64 does in the first 20 s, where nothing but the cap limits."""
    fixed = Drive(Fixed(64), Queueing(inf, service(kind, seconds, seed))).run(20).span(0, 20)
    found = Drive(Limiter(cap=64), Queueing(inf, service(kind, seconds, seed))).run(20).span(0, 20)
    show(f"cap 64, {seconds} s {kind}, {found.rate / fixed.rate:.1%} of a fixed 64", found)
    assert found.rate >= 0.97 * fixed.rate
    assert max(found.limits) == 64


def test_a_small_batch_does_not_crawl() -> None:
    """200 lines of 100 ms on a fresh process need four rounds: 16, 32, 64, and the rest."""
    left = [200]
    drive = Drive(Limiter(cap=None), Queueing(inf, steady(0.1)), ready=lambda _: min(200, left[0]))
    while left[0] and drive.now < 10:
        done = drive.answered
        drive.step()
        left[0] -= drive.answered - done
    assert drive.now <= 0.41


def test_without_any_limit_it_stops_growing() -> None:
    """It grows to hundreds within two seconds and never over 1024."""
    drive = Drive(Limiter(cap=None), Queueing(inf, noisy(0.02, Random(1)))).run(4)
    assert min(drive.span(2, 4).limits) >= 300
    assert max(drive.span(0, 4).limits) <= 1024


@pytest.mark.parametrize("speed", [50, 200, proof(1000)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_batching_server_is_kept_busy(speed: float, seed: int) -> None:
    """Where throughput grows as n/(n+16), one more adds under 1 % from 33 on: at least 90 % of what 33 bring, and not
    more than three times as many in flight."""
    drive = Drive(Limiter(cap=None), Batching(speed, lognormal(1.0, Random(seed)))).run(240)
    settled = drive.span(30, 240)
    show(f"batching, {speed}/s at most, seed {seed}", settled)
    assert settled.rate >= 0.9 * speed * 33 / (33 + 16)
    assert settled.in_flight <= 99


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_follows_a_capacity_that_halves_and_doubles(seed: int) -> None:
    """A minute after each change it uses what there is and queues little."""
    server = Queueing(32, noisy(0.2, Random(seed)))
    drive = Drive(Limiter(cap=None), server).run(180)
    server.capacity = 16
    halved = drive.run(360).span(240, 360)
    server.capacity = 32
    doubled = drive.run(540).span(420, 540)
    show(f"half of 32, seed {seed}", halved)
    show(f"32 again, seed {seed}", doubled)
    assert halved.rate >= 0.9 * 16 / 0.2
    assert halved.in_flight <= 24
    assert doubled.rate >= 0.9 * 32 / 0.2
    assert doubled.in_flight <= 48


def test_it_follows_requests_that_take_twice_as_long() -> None:
    """Half the answers a second are no reason to send fewer, where the server still takes as many."""
    long = [0.2]
    drive = Drive(Limiter(cap=None), Queueing(32, lambda: long[0])).run(120)
    long[0] = 0.4
    assert drive.run(300).span(180, 300).rate >= 0.9 * 32 / 0.4


@pytest.mark.parametrize("hang_seconds", [1.0, 30.0, proof(120.0)])
def test_a_few_faults_are_no_overload(hang_seconds: float) -> None:
    """With 2 % timeouts and 5 % 500s, within 15 % of the full throughput of a server of 64."""
    random = Random(1)
    server = Faulty(64, noisy(0.2, random), random=random, hang=0.02, hang_seconds=hang_seconds, fail=0.05)
    settled = Drive(Limiter(cap=None), server).run(180).span(60, 180)
    show(f"2 % hang for {hang_seconds} s, 5 % fail", settled)
    assert settled.rate >= 0.85 * 64 / 0.2


@pytest.mark.parametrize("seconds", [proof(0.02), 0.2, 1.0])
def test_a_storm_passes(seconds: float) -> None:
    """During 30 s of 503 it shrinks to almost nothing; 30 s later 90 % of the former throughput is back."""
    drive = Drive(Limiter(cap=None), Stormy(32, noisy(seconds, Random(1)), storm=(60, 90))).run(150)
    assert min(drive.span(60, 90).limits) <= 2
    show(f"30 s after a storm of 503, {seconds} s", drive.span(120, 150))
    assert drive.span(120, 150).rate >= 0.9 * drive.span(30, 60).rate


def test_idle_slots_say_nothing() -> None:
    """With few lines ready for a minute the level stays what it was, and nothing of it is lost afterwards."""
    few = Drive(
        Limiter(cap=None),
        Queueing(32, noisy(0.2, Random(1))),
        ready=lambda now: 5 if 60 <= now < 120 else inf,
    ).run(180)
    before = min(few.span(50, 60).limits)
    assert min(few.span(60, 120).limits) >= before * 0.85
    assert few.span(121, 180).rate >= 0.95 * 32 / 0.2


def test_a_stalled_upstream_keeps_its_level() -> None:
    """Fifteen seconds without an answer are a pause, not a measure."""
    drive = Drive(Limiter(cap=None), Stalling(32, noisy(0.2, Random(1)), stall=(60, 75))).run(120)
    after = drive.span(76, 120)
    assert min(after.limits) >= 24
    assert after.rate >= 0.95 * 32 / 0.2


def test_a_few_slow_answers_among_quick_ones() -> None:
    """One in two hundred takes a hundred times as long; the server's 32 are still used and hardly more."""
    random = Random(2)
    slow = with_slow_ones(noisy(0.1, random), random, share=0.005, seconds=10.0)
    settled = Drive(Limiter(cap=None), Queueing(32, slow)).run(180).span(20, 180)
    assert settled.rate >= 0.9 * 32 / (0.995 * 0.1 + 0.005 * 10)
    assert settled.in_flight <= 48


@pytest.mark.rule("F2", "The cap is never passed.")
@pytest.mark.parametrize("cap", [1, 2, 5, 64])
@pytest.mark.parametrize("answered", [1, 1000])
def test_never_over_the_cap_and_never_under_one(cap: int, answered: int) -> None:
    """Whatever comes back, in whatever order, and though one never does."""
    random, limiter, now = Random(cap), Limiter(cap=cap), 0.0
    starts = []
    for _ in range(20_000):
        now += random.expovariate(100)
        while limiter.room() > 0 and not limiter.wait(now):
            starts += limiter.started(now, random.randint(1, limiter.room()) if limiter.rate is None else 1)
        assert 1 <= limiter.limit <= cap
        assert len(starts) <= cap
        if len(starts) > (cap > 1):
            (sign,) = random.choices(list(Sign), [answered, 1, 1, 1])
            limiter.ended(starts.pop(random.randrange(cap > 1, len(starts))), sign, now)


@pytest.mark.parametrize("now", [0.0, 25_000.0])
def test_a_refusal_in_the_first_second_does_not_stop_everything(now: float) -> None:
    """The clock of a machine that has been up for long says nothing about how fast requests started."""
    limiter = Limiter(cap=None)
    for _ in range(100):
        now += 0.001
        (start,) = limiter.started(now, 1)
        limiter.ended(start, Sign.ANSWERED, now)
    (start,) = limiter.started(now, 1)
    limiter.ended(start, Sign.THROTTLED, now + 0.001)
    assert limiter.rate is not None
    assert limiter.rate > 500


def test_the_pace_is_told_apart_from_the_slots() -> None:
    """No room while a slot must come free first; seconds when the pace holds the next one up."""
    limiter: Limits = Limiter(cap=4)
    starts = limiter.started(0.0, 4)
    assert limiter.room() == 0
    limiter.ended(starts.pop(), Sign.ANSWERED, 0.1)
    assert (limiter.room(), limiter.wait(0.1)) == (1, 0)
    drive = Drive(Limiter(cap=4), RateLimited(10, steady(0.01), burst=1, refusal_seconds=0.01)).run(30)
    limiter = drive.limiter
    (start,) = limiter.started(drive.now, 1)
    limiter.ended(start, Sign.ANSWERED, drive.now)
    wait = limiter.wait(drive.now)
    assert 0 < wait < inf
    assert limiter.wait(drive.now + 0.9 * wait) > 0
    assert limiter.wait(drive.now + 1.01 * wait) == 0


def test_a_cap_that_changes_is_kept_and_a_larger_one_is_used() -> None:
    """F2: a share of a fleet's cap may be none at first, and grows and shrinks."""
    limiter = Limiter(cap=64)
    limiter.set_cap(0)
    assert limiter.room() <= 0
    limiter.set_cap(12)
    assert limiter.limit == 12
    drive = Drive(limiter, Queueing(inf, steady(0.1))).run(5)
    limiter.set_cap(4)
    drive.run(6)
    assert max(drive.span(5.2, 6).limits) <= 4
    limiter.set_cap(48)
    assert max(drive.run(20).span(10, 20).limits) == 48
