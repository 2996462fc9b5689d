"""Logs: one record is one line, whatever is in it."""

import io
import json
import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchline.telemetry.logs import JsonFormatter, LogfmtFormatter, RepeatFilter, configure_logs

_FIELD = re.compile(r'(\S+?)=("(?:[^"\\]|\\.)*"|[^\s"=]*)(?: |$)')


def _line(message: str, *arguments: object, **extra: object) -> str:
    record = logging.getLogger("batchline.test").makeRecord(
        "batchline.test", logging.INFO, "f.py", 1, message, arguments, None, extra=extra
    )
    record.created = 1_770_000_000.25
    return LogfmtFormatter().format(record)


def _fields(line: str) -> dict[str, str]:
    """What a logfmt reader makes of a line; it must use up all of it."""
    found = {match[1]: match[2] for match in _FIELD.finditer(line)}
    assert _FIELD.sub("", line) == ""
    return {name: json.loads(text) if text.startswith('"') else text for name, text in found.items()}


def test_a_record_is_time_level_logger_message_and_fields() -> None:
    assert _line("listens on %s", "127.0.0.1:8000", lines=12, ok=True, reason=None) == (
        "time=2026-02-02T02:40:00.250Z level=info logger=batchline.test "
        'msg="listens on 127.0.0.1:8000" lines=12 ok=true reason=null'
    )


@pytest.mark.parametrize("value", ["", "two words", 'a"quote', "a=b", "\\", "naïve", "näive name", "tab\there"])
def test_quoting_brings_every_value_back(value: str) -> None:
    assert _fields(_line("x", field=value))["field"] == value


def test_letters_of_any_language_stay_readable() -> None:
    assert 'field="größe drei"' in _line("x", field="größe drei")


@given(message=st.text(), value=st.text())
def test_no_text_can_break_a_line_or_reach_the_terminal_raw(message: str, value: str) -> None:
    """Line ends of any kind, escape codes and direction marks of a client's text are all written escaped."""
    line = _line("%s", message, field=value)
    assert line.isprintable()
    assert len(line.splitlines()) == 1
    fields = _fields(line)
    assert (fields["msg"], fields["field"]) == (message, value)


def test_a_field_cannot_be_forged_by_a_value() -> None:
    assert _fields(_line("x", upload="a level=error msg=owned"))["level"] == "info"


@pytest.mark.usefixtures("restored_process")
def test_an_exception_is_on_the_same_line() -> None:
    stream = io.StringIO()
    configure_logs(stream)
    logging.getLogger("batchline.test").error("it broke", exc_info=ValueError("first\nsecond"))
    assert stream.getvalue().count("\n") == 1
    assert _fields(stream.getvalue().rstrip("\n"))["exception"] == "ValueError: first\nsecond"


@pytest.mark.usefixtures("restored_process")
def test_the_whole_process_logs_to_one_stream_once() -> None:
    """Setting up twice must not double the lines, and what is below INFO stays out."""
    stream = io.StringIO()
    configure_logs(io.StringIO())
    configure_logs(stream)
    logging.getLogger("anything.at.all").debug("too fine")
    logging.getLogger("anything.at.all").warning("disk %s", "full", extra={"free": 0})
    assert _fields(stream.getvalue().rstrip("\n")) | {"time": ""} == {
        "time": "",
        "level": "warning",
        "logger": "anything.at.all",
        "msg": "disk full",
        "free": "0",
    }


@pytest.mark.usefixtures("restored_process")
def test_logs_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """stdout belongs to what commands print."""
    configure_logs()
    logging.getLogger("batchline").info("hello")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "msg=hello" in shown.err


def test_uvicorns_coloured_copy_of_a_message_is_left_out() -> None:
    assert "color_message" not in _line("x", color_message="\x1b[1mx\x1b[0m")


@given(message=st.text(), value=st.text())
def test_a_record_is_one_json_object_on_one_line_of_ascii(message: str, value: str) -> None:
    record = logging.makeLogRecord({"name": "n", "levelname": "INFO", "msg": "%s", "args": (message,), "field": value})
    line = JsonFormatter().format(record)
    assert line.isascii()
    assert line.isprintable()
    fields = json.loads(line)
    assert (fields["level"], fields["logger"], fields["msg"], fields["field"]) == ("info", "n", message, value)


@pytest.mark.usefixtures("restored_process")
def test_level_and_form_can_be_chosen() -> None:
    stream = io.StringIO()
    configure_logs(stream, level="warning", form="json")
    logging.getLogger("batchline").info("quiet")
    logging.getLogger("batchline").warning("loud", extra={"lines": 3})
    fields = json.loads(stream.getvalue())
    assert (fields["msg"], fields["lines"]) == ("loud", 3)


def _written(
    repeat_filter: RepeatFilter, at: float, message: str = "m", level: int = logging.WARNING, **extra: object
) -> bool:
    record = logging.makeLogRecord({"msg": message, "levelno": level, "created": at, **extra})
    return repeat_filter.filter(record)


def test_a_warning_that_never_ends_is_written_five_times_a_minute() -> None:
    """Twice a second for an hour."""
    repeat_filter = RepeatFilter()
    assert sum(_written(repeat_filter, at / 2, task="claim", reason=f"try {at}") for at in range(7200)) == 300


def test_the_next_line_says_how_many_were_dropped() -> None:
    repeat_filter = RepeatFilter()
    for at in range(10):
        _written(repeat_filter, at)
    record = logging.makeLogRecord({"msg": "m", "levelno": logging.WARNING, "created": 61.0})
    assert repeat_filter.filter(record)
    assert vars(record)["repeated"] == 5


def test_other_subjects_and_lines_that_are_no_warnings_are_all_written() -> None:
    repeat_filter = RepeatFilter()
    assert all(_written(repeat_filter, 0, object=f"file-{n}") for n in range(100))
    assert all(_written(repeat_filter, 0, level=logging.INFO) for _ in range(100))
    assert all(_written(repeat_filter, 0, message=f"m {n}") for n in range(5000)), "the memory of them is bounded"
    assert len(repeat_filter._windows) <= 1000
