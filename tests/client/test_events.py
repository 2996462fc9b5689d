"""Server-sent events."""

import pytest

from batchline.client.events import ServerEvent, read_events

_TEXT = b"event: line\nid: c1\ndata: {}\n\n: comment\n\ndata: a\ndata:b\n\nevent: cut\ndata: off"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, 1000])
def test_events_have_a_kind_an_id_and_data(size: int) -> None:
    """However the stream is cut into pieces."""
    chunks = [_TEXT[at : at + size] for at in range(0, len(_TEXT), size)]
    assert [event for events in read_events(chunks) for event in events] == [
        ServerEvent(kind="line", id="c1", data=b"{}"),
        ServerEvent(kind="message", id=None, data=b"a\nb"),
    ]


def test_events_that_arrive_together_are_yielded_together() -> None:
    chunks = [b"data: 1\n\ndata: 2\n\nda", b"ta: 3\n\n"]
    assert [[event.data for event in events] for events in read_events(chunks)] == [[b"1", b"2"], [b"3"]]
