"""Reads server-sent events."""

from collections.abc import Iterable, Iterator

from msgspec import Struct

_END = b"\n\n"
"""The end of an event, as a batchline server writes it."""


class ServerEvent(Struct, frozen=True, kw_only=True):
    """An event."""

    kind: str
    id: str | None
    """The cursor after which a new connection resumes; None if the event has none."""
    data: bytes


def read_events(chunks: Iterable[bytes]) -> Iterator[list[ServerEvent]]:
    """Yield the events of a stream, in lists of those that arrived together.

    Comments are skipped, and an event that was cut off is dropped.
    """
    buffer = bytearray()
    for chunk in chunks:
        searched = max(0, len(buffer) - len(_END) + 1)
        buffer += chunk
        end = buffer.rfind(_END, searched)
        if end < 0:
            continue
        found = [_read_event(text) for text in bytes(buffer[:end]).split(_END)]
        del buffer[: end + len(_END)]
        yield [event for event in found if event is not None]


def _read_event(text: bytes) -> ServerEvent | None:
    """Return an event, or None if it has no data."""
    kind, cursor, data = "message", None, list[bytes]()
    for line in text.split(b"\n"):
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            data.append(value)
        elif name == b"event":
            kind = value.decode()
        elif name == b"id":
            cursor = value.decode()
    return ServerEvent(kind=kind, id=cursor, data=b"\n".join(data)) if data else None
