"""Overloads that are about the load, and those that are not."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from random import Random

import pytest

from batchline.pipeline.dispatch.limiter.load import Start
from batchline.pipeline.dispatch.limiter.overload import Overload
from tests.support.starts import start_of


class Drive:
    """Keeps as many requests in flight as the limit says, and ends each after its time."""

    def __init__(self, *, limit: int) -> None:
        self.overload, self.limit, self.limits = Overload(), limit, [limit]
        self._started, self._now = 0, 0.0
        self._in_flight: list[tuple[float, int, bool, Start]] = []

    def end(self, count: int, ending: Callable[[int], tuple[float, bool]]) -> list[int]:
        """End so many requests. ``ending`` returns for a limit how long a request takes and whether it is an overload.

        Return the limits that were set meanwhile.
        """
        before = len(self.limits)
        for _ in range(count):
            while len(self._in_flight) < self.limit:
                self._started += 1
                seconds, overloaded = ending(self.limit)
                start = start_of("m", self._now, in_flight=len(self._in_flight) + 1, order=self._started)
                heappush(self._in_flight, (self._now + seconds, self._started, overloaded, start))
            self._now, _, overloaded, start = heappop(self._in_flight)
            changed = self.overload.on_end([start], overloaded=overloaded, limit=self.limit, started=self._started)
            if changed is not None:
                self.limit = changed
                self.limits.append(changed)
        return self.limits[before:]


def by_chance(part: float, *, seconds: float = 0.1, seed: int = 1) -> Callable[[int], tuple[float, bool]]:
    """Return what ends that part with an overload, whatever the limit is; overloads may take longer than answers."""
    random = Random(seed)

    def ending(limit: int) -> tuple[float, bool]:
        overloaded = random.random() < part
        return (seconds if overloaded else random.uniform(0.08, 0.12)), overloaded

    return ending


def above(slots: int, *, seed: int = 1) -> Callable[[int], tuple[float, bool]]:
    """Return what ends with a timeout the part of the requests that are more than so many."""
    random = Random(seed)
    return lambda limit: (1.0, True) if random.random() > slots / limit else (0.5, False)


def by_half(limit: int) -> tuple[float, bool]:
    """End a request with an overload if the limit is more than half of what it was at first, which is 64."""
    return 0.1, limit > 32


def test_the_limit_is_halved_until_few_requests_are_too_many() -> None:
    drive = Drive(limit=128)
    drive.end(3000, above(24))
    assert 16 <= drive.limit <= 32
    assert drive.limits == sorted(drive.limits, reverse=True)


def test_a_few_faults_are_no_overload() -> None:
    assert Drive(limit=64).end(6400, by_chance(0.12)) == []


def test_a_handful_of_ends_is_too_little_to_decide_by() -> None:
    assert Drive(limit=4).end(28, by_chance(1.0)) == []


def test_the_limit_is_never_below_one() -> None:
    drive = Drive(limit=4)
    drive.end(2000, above(1))
    assert drive.limit == 1


def test_a_cut_that_helps_is_kept() -> None:
    assert Drive(limit=64).end(3000, by_half) == [32]


@pytest.mark.rule("D3", "A part of the requests that fails whatever the load is does not slow down the others.")
@pytest.mark.parametrize("seconds", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("part", [0.25, 0.3])
def test_overloads_that_a_cut_does_not_change_are_not_about_the_load(seconds: float, part: float) -> None:
    """One of four servers behind a balancer may fail, and its failures may take longer than answers."""
    limits = [Drive(limit=64).end(10_000, by_chance(part, seconds=seconds, seed=seed)) for seed in range(4)]
    assert min(map(min, limits)) == 32
    assert [each[-1] for each in limits].count(64) >= 3


def test_more_of_them_than_are_usual_cut_again() -> None:
    drive = Drive(limit=64)
    drive.end(3000, by_chance(0.3))
    assert drive.end(1000, by_half) == [32]


def test_after_they_have_ended_as_many_cut_again() -> None:
    drive = Drive(limit=64)
    drive.end(3000, by_chance(0.5))
    drive.end(3000, by_chance(0.0))
    half = drive.limit // 2
    assert drive.end(500, lambda limit: (0.1, limit > half)) == [half]


def test_requests_that_never_end_do_not_keep_others_from_being_judged() -> None:
    numbers = count(1)
    assert Drive(limit=64).end(200, lambda limit: by_half(limit) if next(numbers) % 40 else (1e9, False)) == [32]
