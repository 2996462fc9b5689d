"""What commands print."""

import json

import pytest

from batchline.cli.output import byte_progress, moment, show_fields, show_json, show_table
from batchline.cli.text import printable


def test_a_table_aligns_text_to_the_left_and_numbers_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(("name", "count"), [("a", "1"), ("longer", "1000")], numbers=1)
    assert capsys.readouterr().out.splitlines() == ["name    count", "a           1", "longer   1000"]


def test_a_cell_can_neither_control_the_terminal_nor_push_others_off_it(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(("name",), [("\x1b[2J" + "x" * 500,)])
    [_, line] = capsys.readouterr().out.splitlines()
    assert line.startswith("\\x1b[2Jx")
    assert len(line) < 100


def test_a_table_that_is_wider_than_the_terminal_becomes_blocks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    rows = [("a" * 12, "", "1"), ("b", "c" * 8, "2")]
    show_table(("name", "more", "count"), rows, numbers=1)
    assert capsys.readouterr().out == "name   aaaaaaaaaaaa\ncount  1\n\nname   b\nmore   cccccccc\ncount  2\n"
    monkeypatch.setenv("COLUMNS", "80")
    show_table(("name", "more", "count"), rows, numbers=1)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_what_is_not_printable_is_escaped() -> None:
    assert printable("a\nb\u202ec é") == "a\\nb\\u202ec é"


def test_fields_and_json_are_printed_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    show_fields({"a": "1", "long": "2"})
    assert capsys.readouterr().out == "a     1\nlong  2\n"
    show_json([{"a": 1}])
    assert json.loads(capsys.readouterr().out) == [{"a": 1}]


def test_a_time_is_printed_in_utc() -> None:
    assert moment(0) == "1970-01-01T00:00:00Z"
    assert moment(None, without="never") == "never"


def test_progress_is_shown_only_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log would get one line per step."""
    with byte_progress("Checking") as show:
        show(5, 10)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with byte_progress("Checking") as show:
        for done in (0, 3_000_000, 3_000_001, 9_000_000):
            show(done, 9_000_000)
    shown = ("0 bytes of 9 MB", "3 MB of 9 MB   ", "9 MB of 9 MB")
    assert capsys.readouterr().err == "".join(f"\rChecking: {text}" for text in shown) + "\n"


def test_an_error_begins_on_a_line_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line with the progress ends before the error is printed."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)

    def restore() -> None:
        with byte_progress("Restoring") as show:
            show(1, 2)
            raise ValueError("the folder is not empty")

    with pytest.raises(ValueError, match="not empty"):
        restore()
    assert capsys.readouterr().err == "\rRestoring: 1 byte of 2 bytes\n"
