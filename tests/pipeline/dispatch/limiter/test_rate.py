"""How many requests of a model its upstream accepts in a second, learned from refusals."""

from collections import Counter, deque
from collections.abc import Callable
from math import inf
from random import Random

import pytest

from batchline.pipeline.dispatch.limiter.rate import RateLimit
from tests.support.zoo.upstreams import Bucket, Window

CAPACITY = 1000
"""As many a second as the slots let through."""
_STEP_SECONDS = 1 / CAPACITY
_REFUSAL_SECONDS = 0.002

Accepts = Callable[[float], bool]
"""Returns whether the upstream accepts a request that comes now."""


class Drive:
    """Starts requests as fast as a limit allows, up to the capacity, and counts what becomes of them."""

    def __init__(self, limit: RateLimit) -> None:
        self.limit, self.now = limit, 0.0
        self.accepted = Counter[int]()
        self.refused = Counter[int]()
        """By the second in which they started."""
        self._refusals: deque[tuple[float, float | None]] = deque()

    def run(self, accepts: Accepts, *, until: float, retry_after: Callable[[float], float] | None = None) -> None:
        while self.now < until:
            self.now += _STEP_SECONDS
            self._report_refusals()
            if self.limit.allowance(self.now) >= 1:
                self.limit.on_start(self.now, 1)
                if accepts(self.now):
                    self.accepted[int(self.now)] += 1
                    self.limit.on_answer()
                else:
                    self.refused[int(self.now)] += 1
                    self._refusals.append((self.now, None if retry_after is None else retry_after(self.now)))

    def _report_refusals(self) -> None:
        while self._refusals and self._refusals[0][0] + _REFUSAL_SECONDS <= self.now:
            started, retry_after = self._refusals.popleft()
            self.limit.on_refusal(started, self.now, retry_after=retry_after)


def bucket(rate: float, *, burst: float | None = None) -> Accepts:
    level = Bucket(rate, max(1.0, rate / 10) if burst is None else burst)
    return level.take


def everything(now: float) -> bool:
    return True


def nothing(now: float) -> bool:
    return False


def mean(counts: Counter[int], seconds: range) -> float:
    return sum(counts[second] for second in seconds) / len(seconds)


def test_until_something_is_refused_nothing_is_held_back() -> None:
    limit = RateLimit()
    limit.on_start(1.0, 5000)
    assert (limit.allowance(1.0), limit.wait(1.0), limit.rate(1.0)) == (inf, 0.0, inf)
    assert not limit.paced


@pytest.mark.parametrize("rate", [2, 20, 100, 500])
def test_a_rate_is_learned_and_hardly_ever_exceeded(rate: int) -> None:
    """At least 88 % of it are used, and at most 5 % of the requests are refused, from 10 s on."""
    drive = Drive(RateLimit())
    drive.run(bucket(rate), until=40.0)
    settled = range(10, 40)
    assert mean(drive.accepted, settled) >= 0.88 * rate
    assert mean(drive.refused, settled) <= max(0.05 * rate, 0.2)


@pytest.mark.rule(
    "D9", "When refusals end, the capacity is used again within 15 seconds, whatever the rate was cut to."
)
@pytest.mark.parametrize("rate", [1, 10, 100, 700])
@pytest.mark.parametrize("seconds", [3.0, 20.0])
def test_the_capacity_is_used_again_15_seconds_after_the_last_refusal(rate: int, seconds: float) -> None:
    drive = Drive(RateLimit())
    drive.run(bucket(rate), until=seconds)
    drive.run(everything, until=seconds + 16.0)
    assert drive.accepted[int(seconds) + 15] >= 0.97 * CAPACITY


@pytest.mark.rule("D9", "After refusals of everything, the capacity is used again within 15 seconds.")
@pytest.mark.parametrize("seconds", [1.0, 10.0, 30.0])
def test_the_capacity_is_used_again_15_seconds_after_everything_was_refused(seconds: float) -> None:
    """Also where no circuit breaker says that it was an outage."""
    drive = Drive(RateLimit())
    drive.run(everything, until=5.0)
    drive.run(nothing, until=5.0 + seconds)
    drive.run(everything, until=5.0 + seconds + 16.0)
    assert drive.accepted[int(seconds) + 20] >= 0.97 * CAPACITY


def test_a_rate_that_grows_tenfold_is_used_within_15_seconds() -> None:
    drive = Drive(RateLimit())
    drive.run(bucket(50), until=20.0)
    drive.run(bucket(500), until=36.0)
    assert drive.accepted[35] >= 0.9 * 500


def test_a_rate_that_falls_to_a_tenth_is_followed_within_seconds() -> None:
    drive = Drive(RateLimit())
    drive.run(bucket(500), until=20.0)
    drive.run(bucket(50), until=40.0)
    assert mean(drive.refused, range(25, 40)) <= 5
    assert mean(drive.accepted, range(25, 40)) >= 0.9 * 50


@pytest.mark.rule("D9", "Refusals that no rate avoids do not slow anything down.")
@pytest.mark.parametrize("part", [0.02, 0.05, 0.2])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_refusals_that_no_rate_avoids_are_tolerated(part: float, seed: int) -> None:
    """Half as fast, the same part is refused: so the rate does not matter."""
    random = Random(seed)
    drive = Drive(RateLimit())
    drive.run(everything, until=2.0)
    drive.run(lambda _: random.random() >= part, until=20.0)
    started = drive.accepted + drive.refused
    assert mean(started, range(5, 20)) >= 0.9 * CAPACITY


def test_an_even_rate_is_spaced_evenly() -> None:
    """A tenth of a second has a tenth of the starts, not all of them at once."""
    drive = Drive(RateLimit())
    drive.run(bucket(100), until=20.0)
    limit, now, starts = drive.limit, drive.now, list[float]()
    for _ in range(10):
        before = len(starts)
        for _ in range(100):
            now += 0.001
            if limit.allowance(now) >= 1:
                limit.on_start(now, 1)
                starts.append(now)
        assert 7 <= len(starts) - before <= 13


def test_the_wait_ends_when_one_may_start() -> None:
    drive = Drive(RateLimit())
    drive.run(bucket(20), until=20.0)
    limit, now = drive.limit, drive.now
    while limit.allowance(now) >= 1:
        limit.on_start(now, 1)
    wait = limit.wait(now)
    assert 0 < wait < 0.1
    assert limit.allowance(now + 0.9 * wait) < 1
    assert limit.allowance(now + 1.01 * wait) >= 1


@pytest.mark.rule("D9", "A Retry-After that most answers carry is heeded by all lines of the model.")
def test_a_retry_after_blocks_all_starts() -> None:
    drive = Drive(RateLimit())
    drive.run(everything, until=1.0)
    drive.run(nothing, until=1.1, retry_after=lambda _: 5.0)
    blocked_at, limit = drive.now, drive.limit
    assert limit.allowance(blocked_at) == 0
    assert 4.9 <= limit.wait(blocked_at) <= 5.0
    assert limit.allowance(blocked_at + 4.5) == 0
    drive.run(everything, until=20.0)
    assert sum(drive.refused.values()) <= 100
    assert mean(drive.accepted, range(2, 5)) == 0
    assert drive.accepted[19] >= 0.97 * CAPACITY


def test_a_retry_after_of_a_few_lines_is_about_those_lines() -> None:
    """If one in fifty is refused and asked to wait for a minute, the others go on."""
    drive, random = Drive(RateLimit()), Random(1)
    drive.run(everything, until=2.0)
    drive.run(lambda _: random.random() >= 0.02, until=20.0, retry_after=lambda _: 60.0)
    assert mean(drive.accepted, range(5, 20)) >= 0.8 * CAPACITY


def test_a_window_with_retry_after_is_used_at_once_when_it_opens() -> None:
    """1,000 in each 10 s: most of them start in the first second of each, and few are refused."""
    window = Window(1000, 10.0)
    drive = Drive(RateLimit())
    drive.run(window.take, until=50.0, retry_after=lambda now: window.ends - now)
    assert sum(drive.accepted.values()) >= 0.95 * 5 * 1000
    assert sum(drive.refused.values()) <= 100


def test_a_bucket_with_retry_after_is_used_evenly_in_the_end() -> None:
    """Blocking for a second after every refusal would waste most of it."""
    drive = Drive(RateLimit())
    drive.run(bucket(100, burst=10), until=40.0, retry_after=lambda _: 1.0)
    assert mean(drive.accepted, range(10, 40)) >= 0.9 * 100


@pytest.mark.rule("D9", "After an outage the last good rate is reached again within seconds.")
def test_after_an_outage_the_last_good_rate_is_soon_reached() -> None:
    drive = Drive(RateLimit())
    drive.run(bucket(200), until=20.0)
    drive.run(nothing, until=21.0)
    drive.now = 80.0
    drive.limit.on_outage_over(drive.now)
    drive.run(bucket(200), until=90.0)
    assert mean(drive.accepted, range(83, 90)) >= 0.9 * 200


def test_after_an_outage_without_a_known_rate_nothing_is_held_back() -> None:
    drive = Drive(RateLimit())
    drive.run(everything, until=5.0)
    drive.run(nothing, until=6.0)
    drive.limit.on_outage_over(60.0)
    assert not drive.limit.paced
    assert drive.limit.allowance(60.0) == inf


def test_however_much_is_refused_something_starts() -> None:
    """Lines must end, also if none of them is accepted."""
    drive = Drive(RateLimit())
    drive.run(nothing, until=60.0)
    assert min(drive.refused[second] for second in range(60)) >= 1
