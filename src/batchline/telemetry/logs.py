"""Writes logs to stderr in logfmt, one line per record, which people can read and log collectors can parse.

::

    time=2026-01-31T12:00:00.000Z level=info logger=batchline.loops.worker msg="upstream paused" reason=refused

The fields that a call passes as ``extra={...}`` follow the message as key=value.
"""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import TextIO

_BARE = re.compile(r'[^\s"=]+')
_NOT_EXTRA = frozenset(vars(logging.makeLogRecord({}))) | {
    "asctime",
    "message",
    "taskName",
    "color_message",  # uvicorn's copy of the message with terminal colours
}


def configure_logs(stream: TextIO | None = None) -> None:
    """Send every logger's records of level INFO and above to ``stream``, or to stderr."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LogfmtFormatter())
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)


class LogfmtFormatter(logging.Formatter):
    """Formats a record as one line of key=value pairs."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for a record."""
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
        return " ".join(f"{_word(name)}={_word(value)}" for name, value in fields.items())


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
