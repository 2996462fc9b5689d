"""Limits in headers that are those of several servers."""

from collections.abc import Iterable

import pytest

from batchline.pipeline.dispatch.limiter.rises import Rises

LIMIT = 500.0


def announced(numbers: Iterable[float], *, seconds: float = 0.1, reset: float = 60.0, unseen: float = 0.0) -> bool:
    """Announce these numbers one after another, all with the same reset, and return whether they are contradictory."""
    rises, result = Rises(), False
    for index, remaining in enumerate(numbers):
        now = seconds * index
        result = rises.add(remaining, limit=LIMIT, reset_seconds=reset - now, unseen=unseen, now=now)
    return result


def test_numbers_of_two_servers_contradict_each_other() -> None:
    assert announced([480, 20, 470, 18, 455, 15, 440, 12, 430])
    assert not announced([480, 20, 470, 18, 455, 15, 440]), "three rises may be chance"


@pytest.mark.parametrize(
    ("numbers", "unseen"),
    [
        (range(480, 80, -10), 0.0),
        ([480, 440, 460, 420, 450, 410, 430, 390, 420], 0.0),
        ([400, 300, 400, 280, 390, 270, 380, 260, 370, 250], 100.0),
    ],
    ids=["it falls", "tokens are given back", "answers to many requests overtake each other"],
)
def test_numbers_of_one_server_do_not(numbers: Iterable[float], unseen: float) -> None:
    assert not announced(numbers, unseen=unseen)


def test_a_window_that_begins_again_is_no_contradiction() -> None:
    rises = Rises()
    for second in range(100):
        remaining, reset = 500 - 50 * (second % 10), 10.0 - second % 10
        assert not rises.add(remaining, limit=LIMIT, reset_seconds=reset, unseen=0.0, now=float(second))


def test_windows_that_end_before_the_announced_time_are_no_contradiction() -> None:
    """A reset is announced for 30 s too late, and there is one each 20 s."""
    rises = Rises()
    for second in range(200):
        remaining, reset = 500 - 25 * (second % 20), 50.0 - second % 20
        assert not rises.add(remaining, limit=LIMIT, reset_seconds=reset, unseen=0.0, now=float(second))


def test_a_bucket_that_fills_is_no_contradiction() -> None:
    """It gains 50 a second, and lines come in groups."""
    rises = Rises()
    for second in range(100):
        remaining = 100.0 if second % 4 == 0 else 100.0 + 50 * (second % 4)
        assert not rises.add(
            remaining, limit=LIMIT, reset_seconds=(LIMIT - remaining) / 50, unseen=0.0, now=float(second)
        )
