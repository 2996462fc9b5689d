"""The parts of `batchline run` by themselves (F4): its journal, its progress, its words."""

import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from batchline.cli.loading import RUN_VARIABLES, load_settings
from batchline.cli.run.display import PlainLines, ProgressRate, TerminalLine, format_duration
from batchline.cli.run.journal import Journal, JournalEntry, JournalUnusable
from batchline.cli.run.report import fault_lines
from batchline.cli.run.steps import endpoint_of
from batchline.client.models import Counts, LineFault
from batchline.domain.limits import MAX_FAULTS

_JOB = JournalEntry(input_digest="d", endpoint="/v1/e", target="http://host", begun_at=1.5, idempotency_key="run-1")


class Watch:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("content", "endpoint"),
    [
        (b'{"url": "/v1/embeddings"}\n{"url": "/v1/other"}\n', "/v1/embeddings"),
        (b'\xef\xbb\xbf \r\n\t\n{"url": "/v1/embeddings"}', "/v1/embeddings"),
        (b'{"url": ""}\n', "/v1/chat/completions"),
        (b"[" * 100_000 + b"\n", "/v1/chat/completions"),
        (b'{"url": "\xff"}\n', "/v1/chat/completions"),
        (b"", "/v1/chat/completions"),
    ],
)
def test_the_endpoint_is_the_first_lines(tmp_path: Path, content: bytes, endpoint: str) -> None:
    """F4, C4: where it cannot be read, any will do for the service to say what is wrong with the file."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    assert endpoint_of(path) == endpoint


def test_a_journal_ends_with_the_last_step_that_was_written_whole(tmp_path: Path) -> None:
    """A step that a crash cut off was not taken; the steps after it are whole again."""
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.write(_JOB)
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    journal = Journal(path)
    assert journal.entry == _JOB
    later = JournalEntry(**{name: getattr(_JOB, name) for name in _JOB.__struct_fields__} | {"batch_id": "batch_1"})
    journal.write(later)
    journal.close()
    again = Journal(path)
    assert again.entry == later
    again.remove()
    again.close()
    assert not path.exists()


def test_a_first_step_that_was_cut_off_is_no_step(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b'{"input_dig')
    journal = Journal(path)
    assert journal.entry is None
    journal.close()
    assert not path.exists()


@pytest.mark.parametrize("content", [b"somebody's notes\n", b"somebody's notes", b'{"input_digest": 7}\n'])
def test_a_file_that_is_no_journal_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(JournalUnusable, match="was not written by this command"):
        Journal(path)
    assert path.read_bytes() == content


def test_a_journal_is_held_by_one(tmp_path: Path) -> None:
    """Also after the holder removed its file: what another made since then is the other's."""
    path = tmp_path / "journal"
    first = Journal(path)
    with pytest.raises(JournalUnusable, match="Another run is working"):
        Journal(path)
    first.write(_JOB)
    first.remove()
    second = Journal(path)
    second.write(_JOB)
    first.close()
    assert path.exists()
    second.close()


def test_a_pace_is_that_of_the_last_seconds() -> None:
    pace = ProgressRate()
    assert pace.seconds_for(10) is None
    for second in range(31):
        pace.record(min(second, 15) * 100, at=float(second))
        if second == 10:
            assert pace.per_second == pytest.approx(100)
            assert pace.seconds_for(500) == pytest.approx(5)
    assert pace.per_second == 0
    assert pace.seconds_for(10) is None


def test_off_a_terminal_a_line_is_written_every_tenth_or_30_seconds() -> None:
    """F4: a log of a thousand polls has a few lines; one of a job that stands still has some too."""
    written, watch = StringIO(), Watch()
    display = PlainLines(written, steady=watch)
    for done in range(1001):
        watch.now += 0.01
        display.lines(Counts(total=1000, completed=done))
    assert len(written.getvalue().splitlines()) == 10
    for _ in range(10):
        watch.now += 10
        display.lines(Counts(total=2000, completed=1000), problem=f"paused at {watch.now}")
    assert 3 <= len(written.getvalue().splitlines()) - 10 <= 4
    assert "paused at" in written.getvalue()


def test_a_terminals_line_stays_one_line_whatever_a_server_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes from outside cannot steer the terminal, and is cut where it would wrap."""
    monkeypatch.setenv("COLUMNS", "60")
    written, watch = StringIO(), Watch()
    display = TerminalLine(written, steady=watch)
    display.lines(Counts(total=4, completed=1, failed=1))
    display.retrying("\x1b[2Jgone\n" * 20)
    display.retrying("away")
    drawn = written.getvalue().split("\r\x1b[K")[1:]
    assert drawn[0] == "############............  2/4 lines  50 %  1 failed"
    assert "\n" not in written.getvalue()
    assert "\x1b" not in drawn[1]
    assert len(drawn[1]) == 59
    assert drawn[2].endswith("1 failed  (away;")


def test_a_hundred_faults_may_not_be_all() -> None:
    """C3: the service lists no more, and whoever fixes them should know."""
    faults = [LineFault(f"Line {n} is missing url", n) for n in range(1, MAX_FAULTS + 1)]
    assert fault_lines(faults)[::MAX_FAULTS] == ["line 1: is missing url", "(the first 100 are listed)"]
    assert fault_lines([LineFault("Input file contains no JSONL lines")]) == ["Input file contains no JSONL lines"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (3.44, "3.4 s"), (59.6, "1:00"), (307, "5:07"), (3907, "1:05:07")]
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_where_a_run_finds_its_server_is_no_stranger_to_the_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """F2, F4: a shell that is set up for runs also starts services, without a warning."""
    for name in RUN_VARIABLES:
        monkeypatch.setenv(name, "x")
    load_settings()
    assert capsys.readouterr().err == ""
    assert set(RUN_VARIABLES) == {"BATCHLINE_BASE_URL", "BATCHLINE_API_KEY", "BATCHLINE_PROJECT_ID"}


@pytest.mark.parametrize("module", ["uvicorn", "starlette", "batchline.app"])
def test_a_run_on_a_server_loads_no_service(module: str) -> None:
    program = f"import sys, batchline.cli.run; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
