"""Whether requests are refused because they follow others too closely, or for another reason."""

import random

import pytest

from batchline.pipeline.dispatch.limiter.gaps import gap_evidence
from tests.support.zoo.upstreams import Bucket


def random_starts(number: int, *, rate: float) -> list[float]:
    rng, now, starts = random.Random(1), 0.0, []
    for _ in range(number):
        now += rng.expovariate(rate)
        starts.append(now)
    return starts


@pytest.mark.parametrize(("burst", "least"), [(1, 1.0), (2, 0.85)])
def test_a_limit_on_the_rate_is_clear(burst: int, least: float) -> None:
    bucket, starts = Bucket(20, burst), random_starts(100, rate=30)
    refused = [index for index, start in enumerate(starts) if not bucket.take(start)]
    evidence = gap_evidence(starts, refused)
    assert evidence is not None
    assert evidence >= least


def test_chance_is_no_evidence() -> None:
    starts, rng = random_starts(1000, rate=30), random.Random(2)
    evidence = gap_evidence(starts, [index for index in range(1000) if rng.random() < 0.2])
    assert evidence == pytest.approx(0.5, abs=0.1)


def test_every_other_one_of_even_starts_is_too_close() -> None:
    """So it is if their spaces are a little too short."""
    assert gap_evidence([n * 0.049 for n in range(16)], list(range(1, 16, 2))) == 1.0


@pytest.mark.parametrize("refused", [[], [3, 4], list(range(1, 15))], ids=["none", "two", "all but two"])
def test_a_few_say_nothing(refused: list[int]) -> None:
    assert gap_evidence(random_starts(16, rate=30), refused) is None
