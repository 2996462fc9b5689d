"""How `batchline run` reports results (F4)."""

import json
from pathlib import Path

import pytest
from msgspec import Raw
from msgspec.structs import replace

from batchline.cli.destination import file_destination
from batchline.cli.output import place_flags
from batchline.cli.run.report import SavedResults, fault_lines, show_results, show_summary
from batchline.client.models import Counts, LineFault, RemoteBatch, RemoteProgress
from batchline.domain.limits import MAX_FAULTS


def test_a_hundred_faults_may_not_be_all() -> None:
    """C3: the service lists no more, and the user should know that."""
    faults = [LineFault(f"Line {n} is missing url", n) for n in range(1, MAX_FAULTS + 1)]
    assert fault_lines(faults)[::MAX_FAULTS] == ["line 1: is missing url", "(the first 100 are listed)"]
    assert fault_lines([LineFault("Input file contains no JSONL lines")]) == ["Input file contains no JSONL lines"]


def test_faults_of_a_table_name_its_rows() -> None:
    """The lines of a part are made from later rows, and the file with them is deleted."""
    fault = LineFault("Line 3 exceeds maximum of 1048576 bytes", 3)
    assert fault_lines([fault], first_row=50_001) == ["row 50003: exceeds maximum of 1048576 bytes"]


def _results(tmp_path: Path) -> SavedResults:
    errors = tmp_path / "errors.jsonl"
    lines = [("b", "other"), ("a", "[legacy:x] first"), ("a", "second\x1b[2J")]
    errors.write_text("".join(json.dumps({"error": {"code": code, "message": text}}) + "\n" for code, text in lines))
    batch = RemoteBatch(
        id="batch_1",
        status="completed",
        request_counts=Counts(total=1003, completed=1000, failed=3),
        usage=Raw(b'{"input_tokens": 5000, "output_tokens": 7, "total_tokens": 5007}'),
    )
    return SavedResults(batch=batch, output=None, errors=file_destination(errors), seconds=3.44)


def test_errors_are_counted_by_code_with_the_first_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = _results(tmp_path)
    show_results(results)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "Completed: 1,000 of 1,003 lines succeeded, 3 failed, in 3.4 s; 5,000 tokens in, 7 out",
        f"  errors  {tmp_path}/errors.jsonl",
        "  code  lines  first message",
        "  a         2  first",
        "  b         1  other",
        "  To run the failed lines again: batchline rerun batch_1",
    ]


def test_the_printed_rerun_names_the_same_server_or_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"data_dir": tmp_path / "my data", "config": None, "upstream_url": "http://host"}
    show_results(_results(tmp_path), place=place_flags(None, flags))
    assert capsys.readouterr().err.endswith(f": batchline rerun batch_1 --data-dir '{tmp_path}/my data'\n")
    show_results(_results(tmp_path), place=place_flags("http://host/v1", {"data_dir": None}))
    assert capsys.readouterr().err.endswith(": batchline rerun batch_1 --base-url http://host/v1\n")


def test_the_summary_for_programs_is_json_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_summary(_results(tmp_path))
    summary = json.loads(capsys.readouterr().out)
    assert (summary["batch_id"], summary["failed"], summary["output"], summary["seconds"]) == ("batch_1", 3, None, 3.44)
    assert summary["usage"]["input_tokens"] == 5000


def test_the_summary_says_what_was_paid_and_what_was_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = replace(_results(tmp_path), progress=RemoteProgress(cost=0.25, reused=990, saved=24.5))
    show_results(results)
    assert "; cost 0.25; 990 lines reused, which saved 24.5\n" in capsys.readouterr().err
    show_results(replace(results, progress=RemoteProgress(cost=0.000003)))
    assert "; cost 0.000003\n" in capsys.readouterr().err
    show_summary(results)
    summary = json.loads(capsys.readouterr().out)
    assert (summary["cost"], summary["reused"], summary["saved"]) == (0.25, 990, 24.5)
