"""Writes logs to stderr, one line per record: in logfmt, which people can read, or in JSON for log collectors.

::

    time=2026-01-31T12:00:00.000Z level=info logger=batchline.loops.worker msg="upstream paused" reason=refused

The fields that a call passes as ``extra={...}`` follow the message as key=value, or are further fields of the object.
"""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import NamedTuple, TextIO

_BARE = re.compile(r'[^\s"=]+')
_NOT_EXTRA = frozenset(vars(logging.makeLogRecord({}))) | {
    "asctime",
    "message",
    "taskName",
    "color_message",  # uvicorn's copy of the message with terminal colours
}


LOGFMT, JSON = "logfmt", "json"
_WINDOW_SECONDS = 60.0
_LINES_PER_WINDOW = 5
"""The number of times that a warning which differs only in its time is written in a window. Otherwise an outage of the
database would write the same line several times a second for as long as it lasts."""
_MAX_REMEMBERED = 1000
_SUBJECTS = ("task", "part", "upstream", "model", "batch", "webhook", "object", "file", "error")
"""The fields that say what a warning is about. Two warnings with the same text and subject are the same."""


def configure_logs(stream: TextIO | None = None, *, level: str = "info", form: str = LOGFMT) -> None:
    """Send every logger's records of this level and above to ``stream``, or to stderr."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == JSON else LogfmtFormatter())
    handler.addFilter(RepeatFilter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


class _Window(NamedTuple):
    """The records of one kind since a moment."""

    since: float
    written: int = 0
    dropped: int = 0


class RepeatFilter(logging.Filter):
    """Drops warnings and errors that are repeated too often. The next one that is written says how many were."""

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[tuple[object, ...], _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record."""
        if record.levelno < logging.WARNING:
            return True
        key = record.name, record.msg, *(str(getattr(record, name, "")) for name in _SUBJECTS)
        window = self._windows.get(key, _Window(record.created))
        is_over = not 0 <= record.created - window.since < _WINDOW_SECONDS
        if window.written >= _LINES_PER_WINDOW and not is_over:
            self._windows[key] = window._replace(dropped=window.dropped + 1)
            return False
        if window.dropped:
            record.repeated = window.dropped
        if len(self._windows) >= _MAX_REMEMBERED:
            self._windows.clear()
        self._windows[key] = _Window(record.created, 1) if is_over else window._replace(written=window.written + 1)
        return True


class _FieldsFormatter(logging.Formatter):
    """Collects the fields of a record."""

    def fields(self, record: logging.LogRecord) -> dict[str, object]:
        fields: dict[str, object] = {
            "time": _time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        fields |= {name: value for name, value in vars(record).items() if name not in _NOT_EXTRA}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = record.stack_info
        return fields


class LogfmtFormatter(_FieldsFormatter):
    """Formats a record as one line of key=value pairs."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for a record."""
        return " ".join(f"{_word(name)}={_word(value)}" for name, value in self.fields(record).items())


class JsonFormatter(_FieldsFormatter):
    """Formats a record as one JSON object on a line, in ASCII, so that no text of a client reaches a terminal raw."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for a record."""
        return json.dumps(self.fields(record), default=str)


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _word(value: object) -> str:
    """Return a value as one word: bare if that is unambiguous, else as a JSON string.

    Characters that are not printable (line ends of any kind, terminal controls, changes of text direction) are
    escaped, so that a client cannot add a line to the log or disguise one.
    """
    text = _TEXTS[value] if value is None or isinstance(value, bool) else str(value)
    if not text.isprintable():
        return json.dumps(text)
    return text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


_TEXTS = {None: "null", True: "true", False: "false"}
