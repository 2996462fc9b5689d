"""How far a batch is: rates, what is left, and errors by code."""

import json
from itertools import pairwise

import pytest

from batchline.domain.outcomes import BATCH_CANCELLED, TOO_LONG, Failure, error_line
from batchline.domain.progress import BUCKET_SECONDS, KEPT_SECONDS, Eta, ProgressSample, count_errors, eta_of, rate_of

BEGAN = 1_000


def _samples(*lines: int, since: int = BEGAN) -> list[ProgressSample]:
    """One bucket after the other; those without a line are not kept."""
    return [ProgressSample(at=since + n * BUCKET_SECONDS, lines=count) for n, count in enumerate(lines) if count]


def _eta(*lines: int, remaining: int) -> Eta:
    """Right after the last of these buckets."""
    now = BEGAN + len(lines) * BUCKET_SECONDS
    eta = eta_of(_samples(*lines), remaining=remaining, began=BEGAN, now=now)
    assert eta is not None
    return eta


@pytest.mark.parametrize(
    ("now", "rate"), [(BEGAN + 0.2, 10.0), (BEGAN + 2, 5.0), (BEGAN + 50, 0.2), (BEGAN + 59.5, 10 / 59.5)]
)
def test_a_young_batch_is_measured_since_it_began(now: float, rate: float) -> None:
    """And as if for a second at least: a first flush says little of the next."""
    assert rate_of(_samples(10), began=BEGAN, now=now) == pytest.approx(rate)


def test_a_batch_that_began_within_a_bucket_is_measured_from_there() -> None:
    assert rate_of(_samples(6), began=BEGAN + 2, now=BEGAN + 5) == 2.0


def test_an_old_batch_is_measured_over_the_last_minute() -> None:
    """What was before does not count, whether it was faster or slower."""
    samples = _samples(*[500] * 12, *[5] * 12)
    assert rate_of(samples, began=BEGAN, now=BEGAN + 119.999) == pytest.approx(1.0, abs=0.001)
    assert rate_of(samples, began=BEGAN, now=BEGAN + 600) == 0.0


def test_no_end_is_estimated_without_a_rate_or_lines_left() -> None:
    assert eta_of([], remaining=5, began=BEGAN, now=BEGAN + 10) is None
    assert eta_of(_samples(5), remaining=0, began=BEGAN, now=BEGAN + 10) is None
    assert eta_of(_samples(5), remaining=5, began=BEGAN, now=BEGAN + 600) is None


def test_lines_that_are_silent_for_long_are_expected_to_be_so_as_long_again() -> None:
    """A thousand quick lines promise nothing about the last, which hangs."""
    etas = [eta_of(_samples(1000), remaining=1, began=BEGAN, now=BEGAN + seconds) for seconds in (5, 25, 45)]
    assert [eta.seconds for eta in etas if eta is not None] == [1, 20, 40]


def test_a_steady_pace_has_no_spread() -> None:
    assert _eta(*[10] * 6, remaining=100) == Eta(seconds=50, low=50, high=50)


def test_the_spread_is_that_of_the_formula() -> None:
    """Ten and thirty lines in turn: m = 20, s = 11.547 of 4 buckets, k = 25."""
    eta = _eta(10, 30, 10, 30, remaining=500)
    assert eta == Eta(seconds=125, low=77, high=203), "1 + 2e = 1.6218"


def test_the_more_is_known_the_narrower_it_gets_and_the_bumpier_the_wider() -> None:
    known = [_eta(*[10, 30] * times, remaining=1000) for times in (1, 2, 5)]
    bumpy = [_eta(*[20 - by, 20 + by] * 3, remaining=1000) for by in (15, 8, 2)]
    for wider, narrower in (*pairwise(known), *pairwise(bumpy)):
        assert wider.seconds == narrower.seconds == 250
        assert wider.low < narrower.low < 250 < narrower.high < wider.high


def test_a_bucket_without_lines_is_one_of_the_buckets() -> None:
    assert _eta(20, 0, 20, 0, remaining=100).high > _eta(10, 10, 10, 10, remaining=100).high


@pytest.mark.parametrize("lines", [(), (40,)])
def test_with_less_than_two_buckets_anything_is_possible(lines: tuple[int, ...]) -> None:
    """Also when all there is came in the bucket that is not over."""
    now = BEGAN + len(lines) * BUCKET_SECONDS + 1
    current = ProgressSample(at=BEGAN + len(lines) * BUCKET_SECONDS, lines=10)
    eta = eta_of([*_samples(*lines), current], remaining=1000, began=BEGAN, now=now)
    assert eta is not None
    assert eta.low < eta.seconds / 3 < 3 * eta.seconds < eta.high


def test_the_variation_is_that_of_whole_buckets_which_are_kept() -> None:
    """Neither the one that the batch began in, nor the one that is not over, nor what is older than five minutes."""
    steady = _samples(*[20] * (KEPT_SECONDS // BUCKET_SECONDS), since=BEGAN)
    partial = [
        ProgressSample(at=BEGAN - BUCKET_SECONDS, lines=1),
        *steady,
        ProgressSample(at=BEGAN + KEPT_SECONDS, lines=4),
    ]
    young = eta_of(partial[:7], remaining=400, began=BEGAN - 1, now=BEGAN + 26)
    old = eta_of(partial, remaining=400, began=0, now=BEGAN + KEPT_SECONDS + 1)
    for eta in (young, old):
        assert eta is not None
        assert eta.high - eta.low <= 1


def _line(custom_id: object, failure: Failure) -> bytes:
    return error_line("batch_req_1", json.dumps(custom_id, ensure_ascii=False).encode(), failure)


def test_errors_are_counted_by_code_and_the_first_of_each_is_shown() -> None:
    """D2: code and message are those of the error file."""
    lines = [_line("a", TOO_LONG), _line("b", BATCH_CANCELLED), _line("c", TOO_LONG)]
    told = {each.code: (each.count, json.loads(each.sample)) for each in count_errors(lines)}
    assert told == {
        "context_length_exceeded": (2, {"custom_id": "a", "message": json.loads(lines[0])["error"]["message"]}),
        "batch_cancelled": (1, {"custom_id": "b", "message": json.loads(lines[1])["error"]["message"]}),
    }
    assert count_errors([]) == []


def test_long_texts_are_cut() -> None:
    (long,) = count_errors([_line("ü" * 1000, Failure("internal_error", "retries_exhausted", "💥" * 1000))])
    sample = json.loads(long.sample)
    assert sample["custom_id"] == "ü" * 300
    assert len(sample["message"]) == 300


@pytest.mark.parametrize("custom_id", ["\0", "\u2028", '"\\', "\x85 \n"])
def test_any_name_is_shown_as_it_is(custom_id: str) -> None:
    """C5"""
    (told,) = count_errors([_line(custom_id, TOO_LONG)])
    assert json.loads(told.sample)["custom_id"] == custom_id
