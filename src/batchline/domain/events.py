"""Splits a stream into server-sent events, and reads the token usage that the events of an answer report.

Events are passed on with the bytes they came with; only the chunks of a chat completion are changed (D7).
"""

import re
from collections.abc import Iterator
from typing import Any

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder, encode

from batchline.domain.errors import ApiError, StreamBroken
from batchline.domain.estimates import text_tokens
from batchline.domain.usage import NOTHING, Usage, reported_usage, usage_in
from batchline.domain.wire import ErrorBody

MAX_EVENT_BYTES = 1024 * 1024
_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_MAX_BLANK_LINE_BYTES = 4
_NULL = Raw(b"null")

_fields = Decoder(dict[str, Raw])
_anything = Decoder()


class EventReader:
    """Splits a stream into events, and buffers at most one event."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the events that are complete now, each with its blank line. Raise StreamBroken if one is too large."""
        self._buffer += piece
        end: int | None = 0
        while end is not None:
            end = self._end_of_event()
            # An event that arrives in one piece is bounded like one that arrives in many.
            if (len(self._buffer) if end is None else end) > MAX_EVENT_BYTES:
                raise StreamBroken(f"an event over {MAX_EVENT_BYTES} bytes")
            if end is not None:
                yield self._take(end)

    @property
    def oversized_bytes(self) -> int:
        """The bytes that were received since the last event if they make an event that is too large, else 0."""
        return len(self._buffer) if len(self._buffer) > MAX_EVENT_BYTES else 0

    def end(self) -> Iterator[bytes]:
        """Yield the last event if the stream ended without its blank line."""
        rest = self._take(len(self._buffer)).rstrip()
        if rest:
            yield rest + b"\n\n"

    def _end_of_event(self) -> int | None:
        found = _BLANK_LINE.search(self._buffer, self._searched)
        if found is None:
            self._searched = max(0, len(self._buffer) - _MAX_BLANK_LINE_BYTES + 1)
            return None
        return found.end()

    def _take(self, end: int) -> bytes:
        event = bytes(self._buffer[:end])
        del self._buffer[:end]
        self._searched = 0
        return event


class Chunk(Struct, frozen=True, kw_only=True):
    """An event as it is passed on, and what it contains."""

    event: bytes
    usage: Usage = NOTHING
    text_tokens: int = 0
    """The estimated tokens of the text in it: of answers, of reasoning and of calls of tools."""
    only_usage: bool = False
    """Whether the event reports the usage and has no choices."""


def read_chat_event(event: bytes) -> Chunk:
    """Return a chunk of a chat completion with ``system_fingerprint`` null. Raise StreamBroken if it is not a chunk."""
    data = _data_of(event)
    if not data or data == b"[DONE]":
        return Chunk(event=event)
    try:
        data.decode()
        fields = _fields.decode(data)
        choices = _anything.decode(fields.get("choices", _NULL))
    except (DecodeError, UnicodeDecodeError, RecursionError):
        raise StreamBroken("an event that is no JSON object") from None
    if bytes(fields.get("error", _NULL)) != b"null":
        raise StreamBroken("an event that reports an error")
    usage = usage_in(fields.get("usage", _NULL))
    return Chunk(
        event=_event(fields | {"system_fingerprint": _NULL}),
        usage=usage,
        text_tokens=_delta_tokens(choices),
        only_usage=usage != NOTHING and choices == [],
    )


class _ResponseEvent(Struct):
    type: str = ""
    delta: Any = None
    response: Raw = Raw(b"{}")


_response_event = Decoder(_ResponseEvent)


def read_response_event(event: bytes) -> Chunk:
    """Return an event of ``/v1/responses`` unchanged; the last event has the response with its usage."""
    try:
        decoded = _response_event.decode(_data_of(event))
        usage = reported_usage(decoded.response)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return Chunk(event=event)
    return Chunk(event=event, usage=usage, text_tokens=text_tokens(_text_bytes(decoded.delta)))


def error_event(error: ApiError) -> bytes:
    """Return the last event of a stream that broke, since its status line was sent long before."""
    return _event(ErrorBody.from_error(error))


def _delta_tokens(choices: Any) -> int:
    deltas = (
        [choice.get("delta") for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    )
    # A role is no text of the answer.
    texts = [{**delta, "role": None} for delta in deltas if isinstance(delta, dict)]
    return text_tokens(_text_bytes(texts))


def _text_bytes(value: Any) -> int:
    """Return the bytes of all texts inside a value."""
    if isinstance(value, str):
        return len(value.encode(errors="replace"))
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_text_bytes, value)) if isinstance(value, list) else 0


def _data_of(event: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def _event(document: object) -> bytes:
    # A line end can only stand between the tokens of a value that came over several data lines.
    return b"data: %b\n\n" % encode(document).replace(b"\n", b" ")
