"""Overloads that are about the load, and those that are not."""

from batchline.pipeline.dispatch.limiter.overload import Overload
from tests.support.starts import start_of


def end(overload: Overload, count: int, *, overloaded: int, limit: int, now: float) -> list[int]:
    """Report the ends of requests that started now, the overloaded ones among the others, and return the new limits."""
    signs = [number * overloaded // count < (number + 1) * overloaded // count for number in range(count)]
    changes = [
        overload.on_end([start_of("m", now, in_flight=1, order=1)], now, overloaded=sign, limit=limit) for sign in signs
    ]
    return [change for change in changes if change is not None]


def test_when_a_quarter_says_so_the_limit_is_halved() -> None:
    assert end(Overload(), 64, overloaded=16, limit=64, now=1.0) == [32]


def test_a_few_faults_are_no_overload() -> None:
    overload = Overload()
    for second in range(100):
        assert end(overload, 64, overloaded=8, limit=64, now=float(second)) == []


def test_a_handful_of_ends_is_too_little_to_decide_by() -> None:
    assert end(Overload(), 15, overloaded=15, limit=4, now=1.0) == []


def test_the_limit_is_never_below_one() -> None:
    overload, limit = Overload(), 4
    for second in range(1, 20):
        for changed in end(overload, 16, overloaded=16 if second % 2 else 4, limit=limit, now=float(second)):
            limit = changed
    assert limit == 1


def test_a_cut_that_helps_is_kept() -> None:
    overload = Overload()
    assert end(overload, 64, overloaded=32, limit=64, now=1.0) == [32]
    assert end(overload, 64, overloaded=0, limit=32, now=2.0) == []


def test_overloads_that_a_cut_does_not_change_are_not_about_the_load() -> None:
    """The limit is what it was before, and as many of them are tolerated from then on."""
    overload = Overload()
    assert end(overload, 64, overloaded=32, limit=64, now=1.0) == [32]
    assert end(overload, 32, overloaded=16, limit=32, now=2.0) == [64]
    assert end(overload, 640, overloaded=320, limit=64, now=3.0) == []


def test_more_of_them_than_are_tolerated_cut_again() -> None:
    overload = Overload()
    end(overload, 64, overloaded=20, limit=64, now=1.0)
    end(overload, 32, overloaded=10, limit=32, now=2.0)
    assert end(overload, 64, overloaded=60, limit=64, now=3.0) == [32]


def test_what_started_before_a_cut_shows_nothing_about_it() -> None:
    overload = Overload()
    end(overload, 64, overloaded=32, limit=64, now=1.0)
    early = [start_of("m", 0.5, in_flight=1, order=1)]
    assert all(overload.on_end(early, 1.5, overloaded=True, limit=32) is None for _ in range(200))
