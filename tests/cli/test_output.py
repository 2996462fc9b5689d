"""What commands print."""

import json

import pytest

from batchline.cli.output import moment, show_bytes, show_fields, show_json, show_table
from batchline.cli.text import printable


def test_a_table_aligns_text_to_the_left_and_numbers_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(("name", "count"), [("a", "1"), ("longer", "1000")], numbers=1)
    assert capsys.readouterr().out.splitlines() == ["name    count", "a           1", "longer   1000"]


def test_a_cell_can_neither_control_the_terminal_nor_push_others_off_it(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(("name",), [("\x1b[2J" + "x" * 500,)])
    [_, line] = capsys.readouterr().out.splitlines()
    assert line.startswith("\\x1b[2Jx")
    assert len(line) < 100


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
    show_bytes("Checking")(5, 10)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    show = show_bytes("Checking")
    for done in (0, 1, 3_000_000, 3_000_001, 9_000_000):
        show(done, 9_000_000)
    assert capsys.readouterr().err == "".join(
        f"\rChecking: {done} of 9 MB{end}" for done, end in ((0, ""), (3, ""), (9, "\n"))
    )
