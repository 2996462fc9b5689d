"""When a batch is held (G6): the decision, and which lines run first."""

import pytest

from batchline.domain.hold import TRIAL_LINES, choose_trial, judge, main_error
from batchline.domain.progress import LineErrors
from batchline.domain.states import Hold


def errors(**counts: int) -> list[LineErrors]:
    return [LineErrors(code=code, count=count, sample=b"{}") for code, count in counts.items()]


@pytest.mark.rule("G6", "A batch is held from 20 recorded lines, if nineteen in twenty failed with one code.")
@pytest.mark.parametrize(
    ("recorded", "failed", "held"),
    [(19, 19, False), (20, 19, True), (20, 18, False), (20, 20, True), (100, 95, True), (100, 94, False)],
)
def test_a_batch_is_held_by_the_share_of_lines_that_failed(recorded: int, failed: int, held: bool) -> None:
    found = judge(Hold.WATCHING, errors(invalid_request_error=failed), recorded=recorded, total=50_000, running=True)
    assert (found is Hold.HELD) is held


@pytest.mark.rule("G6", "Lines that failed after retries do not hold a batch.")
@pytest.mark.parametrize("code", ["internal_error", "rate_limit_exceeded"])
def test_a_code_that_is_retried_holds_nothing(code: str) -> None:
    assert judge(Hold.TRIAL, errors(**{code: 30}), recorded=30, total=1000, running=True) is Hold.WATCHING
    assert main_error(errors(**{code: 30})) is None


def test_two_codes_together_hold_nothing() -> None:
    mixed = errors(invalid_request_error=15, not_found_error=15)
    assert judge(Hold.WATCHING, mixed, recorded=30, total=1000, running=True) is Hold.WATCHING


def test_the_trial_goes_on_until_it_shows_something_or_nothing_of_it_is_left() -> None:
    assert judge(Hold.TRIAL, [], recorded=5, total=1000, running=True) is Hold.TRIAL
    assert judge(Hold.TRIAL, [], recorded=5, total=1000, running=False) is Hold.WATCHING
    assert judge(Hold.TRIAL, [], recorded=20, total=1000, running=True) is Hold.WATCHING


def test_a_batch_that_can_no_longer_be_held_is_not_judged_any_more() -> None:
    assert judge(Hold.TRIAL, [], recorded=51, total=1000, running=True) is Hold.OFF
    for settled in (Hold.HELD, Hold.OFF):
        found = judge(settled, errors(not_found_error=40), recorded=40, total=1000, running=True)
        assert found is settled


def test_a_batch_whose_lines_are_all_recorded_is_not_held() -> None:
    found = judge(Hold.WATCHING, errors(not_found_error=30), recorded=30, total=30, running=False)
    assert found is not Hold.HELD


def test_the_trial_is_spread_over_the_shards() -> None:
    trial = choose_trial([256] * 196)
    assert len(trial) == 8
    assert sum(map(len, trial.values())) == TRIAL_LINES
    assert max(trial) > 150
    assert all(len(set(positions)) == len(positions) for positions in trial.values())


@pytest.mark.parametrize("shards", [[1], [8] * 8, [1] * 64])
def test_all_lines_of_a_small_batch_are_its_trial(shards: list[int]) -> None:
    assert choose_trial(shards) == {n: list(range(lines)) for n, lines in enumerate(shards)}


@pytest.mark.parametrize("shards", [[100], [40, 40], [1] * 1000, [3, 300]])
def test_a_trial_of_odd_shards_holds_lines_that_exist(shards: list[int]) -> None:
    for n, positions in choose_trial(shards).items():
        assert positions
        assert all(0 <= position < shards[n] for position in positions)
