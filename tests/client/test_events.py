"""Server-sent events."""

from batchline.client.events import ServerEvent, read_events


def test_events_have_a_kind_an_id_and_data() -> None:
    text = "event: line\nid: c1\ndata: {}\n\n: comment\n\ndata: a\ndata:b\n\nevent: cut\ndata: off"
    assert list(read_events(text.split("\n"))) == [
        ServerEvent(kind="line", id="c1", data="{}"),
        ServerEvent(kind="message", id=None, data="a\nb"),
    ]
