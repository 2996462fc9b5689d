"""`batchline run` on a table: what its batches have in common."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
from msgspec.json import encode as encode_json

from batchline.cli.run.display import PlainLines
from batchline.cli.run.files import RunFiles
from batchline.cli.run.report import SavedResults
from batchline.cli.run.rows import command, job
from batchline.cli.run.rows.command import RowsRequest
from batchline.cli.run.runner import RunOptions
from batchline.client.models import RemoteBatch, RemoteProgress
from batchline.system import SystemClock


class _Context:
    """Runs batches in which every line costs one unit. The batch with the number ``broken`` fails."""

    def __init__(self, *, broken: int = 0) -> None:
        self.clock, self._broken = SystemClock(), broken
        self.display = PlainLines(io.StringIO(), steady=self.clock.steady)
        self.target = None
        self.limits: list[float | None] = []

    def run_batch(self, files: RunFiles, options: RunOptions) -> SavedResults:
        self.limits.append(options.max_cost)
        if len(self.limits) == self._broken:
            raise click.ClickException("broken")
        lines = [json.loads(line) for line in files.source.read_bytes().splitlines()]
        answer = {"body": {"choices": [{"message": {"content": "yes"}}]}}
        files.output.path.write_bytes(
            b"".join(encode_json({"custom_id": line["custom_id"], "response": answer}) + b"\n" for line in lines)
        )
        batch = RemoteBatch(id=f"batch_{lines[0]['custom_id']}", status="completed")
        progress = RemoteProgress(cost=float(len(lines)))
        return SavedResults(batch=batch, output=files.output, errors=None, seconds=0.0, progress=progress)

    def give_up_batch(self, files: RunFiles) -> None:
        pytest.fail("no batch of an earlier run is unfinished")


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of three batches with two rows each."""
    monkeypatch.setattr(job, "_MAX_PART_LINES", 2)
    path = tmp_path / "rows.csv"
    path.write_text("n\n" + "".join(f"{number}\n" for number in range(6)))
    return path


def _run(
    table: Path,
    context: _Context,
    monkeypatch: pytest.MonkeyPatch,
    *,
    max_cost: float | None = None,
    output: str | None = None,
    restart: bool = False,
) -> int:
    @contextmanager
    def opened(*_: Any) -> Iterator[_Context]:
        yield context

    monkeypatch.setattr(command, "open_context", opened)
    request = RowsRequest(
        source=table, output=output, prompt="{n}", system=None, model="m", schema=None, patch={}, again=False
    )
    return request.run(RunOptions(restart=restart, max_cost=max_cost), None, {}, as_json=True)


@pytest.mark.parametrize(("max_cost", "limits"), [(5.0, [5.0, 3.0, 1.0]), (3.0, [3.0, 1.0, 0.0]), (None, [None] * 3)])
def test_the_batches_of_a_table_share_the_limit_of_the_cost(
    table: Path, monkeypatch: pytest.MonkeyPatch, max_cost: float | None, limits: list[float | None]
) -> None:
    """G8: who names a limit means all rows, and does not know how many batches they become."""
    context = _Context()
    assert _run(table, context, monkeypatch, max_cost=max_cost) == 0
    assert context.limits == limits


def test_a_resumed_table_counts_what_its_earlier_batches_cost(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(click.ClickException, match="broken"):
        _run(table, _Context(broken=2), monkeypatch, max_cost=5.0)
    resumed = _Context()
    assert _run(table, resumed, monkeypatch, max_cost=5.0) == 0
    assert resumed.limits == [3.0, 1.0]
    summary = json.loads(capsys.readouterr().out)
    assert summary["batch_ids"] == ["batch_row-1", "batch_row-3", "batch_row-5"]
    assert summary["cost"] == 6.0


def test_a_file_that_cannot_be_written_is_told_in_words(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk or a folder of someone else is not a fault of the program."""
    (table.parent / "rows.output.csv.batchline" / "part-2.jsonl").mkdir(parents=True)
    with pytest.raises(click.ClickException, match=r"part-2.jsonl: Is a directory. Run the same command again"):
        _run(table, _Context(), monkeypatch)


def test_the_journal_of_a_run_without_a_table_is_not_touched(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of run keep what they need to resume under the same name, one in a file and one in a folder."""
    journal = table.parent / "rows.output.csv.batchline"
    journal.write_text("state")
    with pytest.raises(click.ClickException, match="a run without --prompt that was not finished"):
        _run(table, _Context(), monkeypatch)
    assert journal.read_text() == "state"


@pytest.mark.parametrize("restart", [False, True])
def test_two_runs_of_one_table_do_not_write_the_same_files(
    table: Path, monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    """The second would write the requests anew while the first sends them, or delete the folder of the first."""
    context = _Context()
    answer = context.run_batch

    def run_twice(files: RunFiles, options: RunOptions) -> SavedResults:
        with pytest.raises(click.ClickException, match="Another run is working on this output"):
            _run(table, _Context(), monkeypatch, restart=restart)
        return answer(files, options)

    monkeypatch.setattr(context, "run_batch", run_twice)
    assert _run(table, context, monkeypatch) == 0


def test_an_output_that_would_not_be_what_its_name_says_is_refused(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(click.UsageError, match="Parquet cannot be written"):
        _run(table, _Context(), monkeypatch, output=str(table.with_name("answers.parquet")))


@pytest.mark.parametrize("content", ["n\n", "n\n1\n1,2\n"])
def test_a_table_that_is_refused_leaves_no_folder(table: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    table.write_text(content)
    with pytest.raises(click.UsageError):
        _run(table, _Context(), monkeypatch)
    assert [path.name for path in table.parent.iterdir()] == ["rows.csv"]


def test_a_table_that_is_refused_does_not_end_an_earlier_job(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = table.read_text()
    with pytest.raises(click.ClickException, match="broken"):
        _run(table, _Context(broken=2), monkeypatch)
    table.write_text("n\n")
    with pytest.raises(click.ClickException, match="belongs to a job with another table"):
        _run(table, _Context(), monkeypatch)
    table.write_text(before)
    resumed = _Context()
    assert _run(table, resumed, monkeypatch) == 0
    assert len(resumed.limits) == 2


def test_a_restart_begins_with_an_empty_folder(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(click.ClickException, match="broken"):
        _run(table, _Context(broken=3), monkeypatch)
    restarted = _Context()
    assert _run(table, restarted, monkeypatch, restart=True) == 0
    assert len(restarted.limits) == 3, "no part of the earlier job counts as complete"
    assert {path.name for path in table.parent.iterdir()} == {"rows.csv", "rows.output.csv"}
