"""Before a large job a run says what it takes, and asks on a terminal (G5, F4)."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from batchline.cli import main
from batchline.cli.loading import RUN_VARIABLES
from batchline.cli.run import command
from batchline.cli.run.estimate import describe
from batchline.client.models import CheckedModel, RemoteCheck, SecondsRange
from tests.support.run_process import Tenant


def _call(tenant: Tenant, *arguments: object, answer: str = "") -> Result:
    runner = CliRunner(env=dict.fromkeys(RUN_VARIABLES) | tenant.environment())
    return runner.invoke(main, ["run", *map(str, arguments)], input=answer)


@pytest.mark.rule("F4", "Before a job with many lines the run says its tokens, cost and time.")
def test_a_large_job_is_estimated_and_runs_without_a_terminal(tenant: Tenant, source: Path) -> None:
    result = _call(tenant, source, "--ask-over", 19)
    assert result.exit_code == 0, result.output
    assert "This job takes: 20 lines; about " in result.stderr
    assert "tokens in, without a limit out" in result.stderr
    assert "Run it?" not in result.stderr
    again = _call(tenant, source, "--ask-over", 20, "--again")
    assert again.exit_code == 0
    assert "This job takes" not in again.stderr


@pytest.mark.rule("F4", "On a terminal the run asks before a job with many lines.")
def test_nothing_runs_if_the_user_says_no(tenant: Tenant, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_has_terminal", lambda: True)
    refused = _call(tenant, source, "--ask-over", 5, answer="n\n")
    assert refused.exit_code == 1
    assert refused.stderr.endswith("Run it? [y/N]: n\nError: Nothing was run.\n")
    assert tenant.batches() == []
    assert tenant.service.client(tenant.account).files.list().data == []
    assert {path.name for path in source.parent.iterdir()} == {"in.jsonl"}
    assert _call(tenant, source, "--ask-over", 5, answer="y\n").exit_code == 0


def test_a_table_is_estimated_as_a_whole(tenant: Tenant, tmp_path: Path) -> None:
    source = tmp_path / "rows.csv"
    source.write_text("name\n" + "".join(f"row {n}\n" for n in range(30)))
    result = _call(tenant, source, "--prompt", "{name}", "--model", "m", "--ask-over", 10)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("This job takes: 30 lines") == 1
    assert "tokens in, " in result.stderr.rpartition("Completed")[2]


def test_faults_are_told_as_ever(tenant: Tenant, source: Path) -> None:
    source.write_bytes(source.read_bytes() + b"{nope\n")
    result = _call(tenant, source, "--ask-over", 5)
    assert result.exit_code == 1
    assert "This job takes" not in result.stderr
    assert "line 21: is not valid JSON" in result.stderr


def test_what_is_known_is_described() -> None:
    one = CheckedModel(model="m", lines=40_000, input_tokens=1_000_000, output_tokens_at_most=2_000, cost_at_most=1.5)
    other = CheckedModel(model="x", lines=10_000, enabled=False, input_tokens=5, estimated=True)
    found = RemoteCheck(valid=True, lines=50_000, models=[one], seconds=SecondsRange(60, 90))
    assert describe(found) == [
        "This job takes: 50,000 lines; 1,000,000 tokens in, at most 2,000 out; cost at most 1.5; about 1:00 to 1:30"
    ]
    assert describe(found, job_lines=100_000) == [
        "This job takes: 100,000 lines; about 2,000,000 tokens in, at most 4,000 out; cost at most 3; about 2:00 to "
        "3:00"
    ]
    assert describe(RemoteCheck(valid=True, lines=50_000, models=[one, other])) == [
        "This job takes: 50,000 lines; about 1,000,005 tokens in, without a limit out; cost at most 1.5 and more",
        "  x: 10,000 lines will fail, because the project may not use it",
    ]
