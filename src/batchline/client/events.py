"""Reads server-sent events."""

from collections.abc import Iterable, Iterator

from msgspec import Struct


class ServerEvent(Struct, frozen=True, kw_only=True):
    """An event."""

    kind: str
    id: str | None
    """The cursor after which a new connection resumes; None if the event has none."""
    data: str


def read_events(lines: Iterable[str]) -> Iterator[ServerEvent]:
    """Yield the events of a stream. Comments are skipped, and an event that was cut off is dropped."""
    kind, cursor, data = "message", None, list[str]()
    for line in lines:
        if not line:
            if data:
                yield ServerEvent(kind=kind, id=cursor, data="\n".join(data))
            kind, cursor, data = "message", None, []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            kind = value
        elif name == "id":
            cursor = value
        elif name == "data":
            data.append(value)
