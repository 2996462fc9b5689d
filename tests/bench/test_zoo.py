"""The zoo measures what it claims, with real processes."""

import pytest

from bench.zoo.__main__ import run_case
from bench.zoo.cases import CASES, Capacity, Neighbour
from bench.zoo.runs import prompts
from bench.zoo.upstreams import KINDS


def test_every_kind_of_upstream_has_its_goal() -> None:
    assert list(CASES) == list(KINDS)


def test_a_kind_is_measured_from_the_upload_to_the_last_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """8 at once and 0.1 s each are 80 a second."""
    assert run_case("hard8", Capacity(160, 2.0, 0.1))
    row = capsys.readouterr().out.split()
    assert row[0] == "hard8"
    took, failed, unanswered, peak = float(row[3]), *(int(row[index]) for index in (7, 8, 10))
    assert took >= 2.0
    assert (failed, unanswered) == (0, 0)
    assert peak >= 8


def test_a_goal_that_is_missed_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert not run_case("hard8", Capacity(8, 20.0, 1000.0))
    assert "BELOW GOAL" in capsys.readouterr().out


def test_a_batch_beside_another_project_is_compared_with_the_same_batch_alone() -> None:
    """Its own line that is always refused is not waited for, and counts neither as failed nor as open."""
    refused = prompts(1, "poison")
    result = Neighbour(100, refused, hopeless=refused, pairs=1, head_start_seconds=0.0).measure("poison")
    assert result.ideal_seconds > 0
    assert (result.end.failed, result.end.open) == (0, 0)
    assert result.seen.answered == 100
