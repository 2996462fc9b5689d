"""`batchline run` on a table: one request per row, answers joined to the rows."""

import csv
import json
import signal
from pathlib import Path

import click
import pyarrow  # type: ignore[import-untyped]
import pytest
from click.testing import CliRunner, Result
from pyarrow import parquet

from batchline.cli import main
from batchline.cli.loading import BASE_URL_VARIABLES, KEY_VARIABLES
from batchline.cli.run.files import RunFiles
from batchline.cli.run.rows import job
from batchline.cli.run.rows.requests import RowRequests
from batchline.pipeline.rows.requests import Prompts
from batchline.pipeline.rows.table import open_table
from batchline.pipeline.rows.template import parse_template
from tests.cli.conftest import NamedPipe
from tests.support.run_process import Environment, Tenant, running
from tests.support.service import wait_until

_JOURNAL = "rows.output.csv.batchline/part-1.journal"


def _call(environment: Environment, *arguments: object) -> Result:
    unset = dict.fromkeys([*BASE_URL_VARIABLES, *KEY_VARIABLES])
    return CliRunner(env=unset | environment).invoke(main, ["run", *map(str, arguments)])


def _write(path: Path, count: int, *, failing: int = 0, directive: str = "") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "review"])
        for number in range(count):
            fault = "[[status=400]]" if number < failing else directive
            writer.writerow([number, f"{fault} review {number}, with a comma"])
    return path


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_500_rows_become_a_joined_table_in_order(tenant: Tenant, tmp_path: Path) -> None:
    """Those that failed say why in a column of their own."""
    source = _write(tmp_path / "rows.csv", 500, failing=15)
    result = _call(tenant.environment(), source, "--prompt", "Classify: {review}", "--model", "m", "--json")
    assert result.exit_code == 3, result.output
    rows = _rows(tmp_path / "rows.output.csv")
    assert [row["id"] for row in rows] == [str(number) for number in range(500)]
    assert [bool(row["error"]) for row in rows] == [True] * 15 + [False] * 485
    assert all(bool(row["answer"]) != bool(row["error"]) for row in rows)
    assert rows[0]["error"].startswith("invalid_request_error: ")
    summary = json.loads(result.stdout)
    assert (summary["rows"], summary["completed"], summary["failed"]) == (500, 485, 15)
    assert [batch["id"] for batch in tenant.batches()] == summary["batch_ids"]
    assert "Completed: 485 of 500 rows succeeded, 15 failed in " in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"rows.csv", "rows.output.csv"}


def test_only_the_failed_rows_of_a_table_are_run_again(tenant: Tenant, tmp_path: Path) -> None:
    """The summary says how."""
    source = _write(tmp_path / "rows.csv", 30, failing=3)
    arguments = (source, "--prompt", "{review}", "--model", "m")
    first = _call(tenant.environment(), *arguments)
    assert "To run only the failed rows again, run the same command with --again --reuse" in first.stderr
    again = _call(tenant.environment(), *arguments, "--again", "--reuse", "--json")
    assert json.loads(again.stdout)["reused"] == 27
    assert len(_rows(tmp_path / "rows.output.csv")) == 30


def test_many_rows_become_several_batches(tenant: Tenant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_MAX_PART_LINES", 8)
    source = _write(tmp_path / "rows.csv", 20)
    result = _call(tenant.environment(), source, "--prompt", "{review}", "--model", "m", "-o", tmp_path / "o.jsonl")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [str(number) for number in range(20)]
    assert len(tenant.batches()) == 3
    assert "Part 3 of 3: rows 17 to 20" in result.stderr


def test_an_interrupted_job_is_resumed_and_no_row_runs_twice(tenant: Tenant, tmp_path: Path) -> None:
    source = _write(tmp_path / "rows.csv", 12, directive="[[delay=0.5]]")
    arguments = (str(source), "--prompt", "{review}", "--model", "m")
    with running(tmp_path, *arguments, environment=tenant.environment()) as run:
        wait_until(lambda: bool(tenant.batches()), what="the batch")
        run.kill()
    other = _call(tenant.environment(), source, "--prompt", "Other {review}", "--model", "m")
    assert other.exit_code == 1
    assert "belongs to a job with another table, prompt or model" in other.stderr
    again = _call(tenant.environment(), *arguments)
    assert again.exit_code == 0, again.output
    assert len(tenant.batches()) == 1
    assert len(_rows(tmp_path / "rows.output.csv")) == 12


def test_a_restart_cancels_the_batch_of_the_earlier_job(tenant: Tenant, tmp_path: Path) -> None:
    """Its lines cost money, and nobody would read their answers."""
    source = _write(tmp_path / "rows.csv", 12, directive="[[delay=10]]")
    arguments = (str(source), "--prompt", "{review}", "--model", "m")
    journal = tmp_path / _JOURNAL
    with running(tmp_path, *arguments, environment=tenant.environment()) as run:
        wait_until(lambda: journal.exists() and '"batch_id":"' in journal.read_text(), what="the batch")
        run.kill()
    _write(source, 2)
    again = _call(tenant.environment(), *arguments, "--restart")
    assert again.exit_code == 0, again.output
    second, first = tenant.batches()
    assert first["status"] in {"cancelling", "cancelled"}
    assert second["status"] == "completed"
    assert len(_rows(tmp_path / "rows.output.csv")) == 2


def test_a_restart_refuses_a_job_that_still_runs(tenant: Tenant, tmp_path: Path) -> None:
    """Its folder must not be deleted while it writes there."""
    source = _write(tmp_path / "rows.csv", 2, directive="[[delay=10]]")
    arguments = (str(source), "--prompt", "{review}", "--model", "m")
    with running(tmp_path, *arguments, environment=tenant.environment()):
        wait_until((tmp_path / _JOURNAL).exists, what="the journal")
        second = _call(tenant.environment(), *arguments, "--restart")
    assert second.exit_code == 1
    assert "Another run is working on this output" in second.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--prompt", "{nope}"], "the table has no column 'nope'; it has: id, review"),
        (["--prompt", " "], "--prompt: the text is empty"),
        (["--prompt", "{review}", "--system", "{x}"], "--system: the table has no column 'x'"),
        ([], "rows.csv is a table, and a table needs --prompt"),
        (["--model", "any"], "rows.csv is a table, and a table needs --prompt"),
        (["--prompt", "{review}", "-e", "e"], "takes neither --errors nor --follow"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(
    tenant: Tenant, tmp_path: Path, arguments: list[str], text: str
) -> None:
    source = _write(tmp_path / "rows.csv", 3)
    result = _call(tenant.environment(), source, "--model", "m", *arguments)
    if not arguments:
        result = _call(tenant.environment(), source)
    assert result.exit_code == 2
    assert text in " ".join(result.stderr.split())
    assert tenant.batches() == []
    assert {path.name for path in tmp_path.iterdir()} == {"rows.csv"}


def test_a_table_can_be_piped_on(tenant: Tenant, tmp_path: Path) -> None:
    source = _write(tmp_path / "rows.csv", 2)
    result = _call(tenant.environment(), source, "--prompt", "{review}", "--model", "m", "-o", "-")
    assert result.exit_code == 0, result.output
    assert [row["id"] for row in csv.DictReader(result.stdout.splitlines())] == ["0", "1"]
    assert {path.name for path in tmp_path.iterdir()} == {"rows.csv"}


def test_an_interrupted_table_for_stdout_is_resumed_too(tenant: Tenant, tmp_path: Path) -> None:
    """F4: its batch goes on at the server and costs money, so the same command must find it again."""
    source = _write(tmp_path / "rows.csv", 2, directive="[[delay=0.5]]")
    arguments = (str(source), "--prompt", "{review}", "--model", "m", "-o", "-")
    with running(tmp_path, *arguments, environment=tenant.environment()) as run:
        wait_until(lambda: bool(tenant.batches()), what="the batch")
        run.send(signal.SIGINT)
        assert run.end().code == 130
    again = _call(tenant.environment(), *arguments)
    assert again.exit_code == 0, again.output
    assert [row["id"] for row in csv.DictReader(again.stdout.splitlines())] == ["0", "1"]
    assert len(tenant.batches()) == 1
    assert not list(tmp_path.glob("*.batchline"))


def test_answers_are_not_joined_to_the_rows_of_a_table_that_was_edited(tmp_path: Path) -> None:
    """A row that was inserted meanwhile would shift every answer after it to the wrong row."""
    source, output = _write(tmp_path / "rows.csv", 3), tmp_path / "out.csv"
    before = source.read_bytes()
    prompts = Prompts(prompt=parse_template("--prompt", "{review}"), system=None, model="m")
    requests = RowRequests(prompts=prompts, patch={})

    def new_job() -> job.RowsJob:
        return job.RowsJob(source, open_table(source), requests, output=output, folder=tmp_path / "parts")

    def answer_and_edit(files: RunFiles) -> None:
        lines = [f'{{"custom_id":"row-{n}","response":{{"body":{{}}}}}}\n' for n in (1, 2, 3)]
        files.output.path.write_text("".join(lines))
        source.write_bytes(before.replace(b"0,", b"new,row\n0,", 1))

    begun = new_job()
    with pytest.raises(click.ClickException, match="has changed since this job was begun"), begun.locked():
        begun.run(begun.prepare(), answer_and_edit)
    assert not output.exists()
    source.write_bytes(before)
    restored = new_job()
    with restored.locked():
        assert restored.run(restored.prepare(), lambda _: pytest.fail("the part ran again")).total == 3
    assert [row["id"] for row in _rows(output)] == ["0", "1", "2"]


def test_a_folder_as_output_is_refused_before_anything_runs(tenant: Tenant, tmp_path: Path) -> None:
    """Else the table could not be written after all its rows had run."""
    source = _write(tmp_path / "rows.csv", 2)
    result = _call(tenant.environment(), source, "--prompt", "{review}", "--model", "m", "-o", tmp_path)
    assert result.exit_code == 2
    assert "is a folder, not a file" in result.stderr
    assert tenant.batches() == []


def test_a_parquet_table_becomes_joined_rows(tenant: Tenant, tmp_path: Path) -> None:
    source = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"id": list(range(40)), "review": [f"review {n}" for n in range(40)]}), source)
    result = _call(tenant.environment(), source, "--prompt", "Classify: {review}", "--model", "m")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "rows.output.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == list(range(40))
    assert all(row["answer"] for row in rows)


def test_a_pipe_as_output_gets_the_table_in_the_format_of_its_source(
    tenant: Tenant, tmp_path: Path, pipe: NamedPipe
) -> None:
    source = _write(tmp_path / "rows.csv", 2)
    result = _call(tenant.environment(), source, "--prompt", "{review}", "--model", "m", "-o", pipe.path)
    assert result.exit_code == 0, result.output
    assert [row["id"] for row in csv.DictReader(pipe.read().decode().splitlines())] == ["0", "1"]
    assert pipe.path.is_fifo()
    assert {path.name for path in tmp_path.iterdir()} == {"rows.csv", "pipe"}


def test_a_link_as_output_of_a_table_is_followed_and_stays(tenant: Tenant, tmp_path: Path) -> None:
    source, link = _write(tmp_path / "rows.csv", 2), tmp_path / "link.csv"
    link.symlink_to("target.csv")
    result = _call(tenant.environment(), source, "--prompt", "{review}", "--model", "m", "-o", link)
    assert result.exit_code == 0, result.output
    assert link.readlink() == Path("target.csv")
    assert len(_rows(tmp_path / "target.csv")) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"rows.csv", "link.csv", "target.csv"}
