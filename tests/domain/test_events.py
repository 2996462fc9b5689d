"""Server-sent events: E1, E2, D7."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchline.domain.errors import BadGateway, StreamBroken
from batchline.domain.events import (
    MAX_EVENT_BYTES,
    Chunk,
    EventReader,
    error_event,
    read_chat_event,
    read_response_event,
)
from batchline.domain.usage import NOTHING, Usage


def read_all(*pieces: bytes) -> list[bytes]:
    reader = EventReader()
    found = [event for piece in pieces for event in reader.feed(piece)]
    return [*found, *reader.end()]


@given(
    events=st.lists(st.sampled_from([b"data: a", b"event: x\ndata: b", b": c", b"data: d\r\ndata: e"]), max_size=6),
    end=st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n"]),
    cuts=st.lists(st.integers(0, 120), max_size=8),
)
def test_events_are_found_however_they_come(events: list[bytes], end: bytes, cuts: list[int]) -> None:
    """E1: nothing is lost or added, for every split and every kind of line end."""
    stream = b"".join(event + end for event in events)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:stop] for start, stop in pairwise(places)]
    found = read_all(*pieces)
    assert [event.strip() for event in found] == events
    assert b"".join(found).rstrip() == stream.rstrip()


def test_an_event_comes_out_as_soon_as_it_is_whole() -> None:
    """E1"""
    reader = EventReader()
    assert list(reader.feed(b"data: a\n")) == []
    assert list(reader.feed(b"\ndata: b\n\ndata")) == [b"data: a\n\n", b"data: b\n\n"]


def test_a_last_event_without_its_blank_line_counts() -> None:
    """E1: the answer was complete, so it is too."""
    assert read_all(b"data: a\n\ndata: [DONE]\n") == [b"data: a\n\n", b"data: [DONE]\n\n"]
    assert read_all(b"data: a\n\n\n ") == [b"data: a\n\n"]


@pytest.mark.parametrize("size", [MAX_EVENT_BYTES, MAX_EVENT_BYTES + 1])
def test_an_event_has_the_same_limit_however_it_comes(size: int) -> None:
    """E2"""
    event = b"data: ".ljust(size - 2, b"x") + b"\n\n"
    for pieces in ([event], [event[:1000], event[1000:]]):
        if size > MAX_EVENT_BYTES:
            with pytest.raises(StreamBroken):
                read_all(*pieces)
        else:
            assert read_all(*pieces) == [event]


def test_an_event_has_a_limit() -> None:
    """E2: memory does not grow with what an upstream sends."""
    reader = EventReader()
    assert list(reader.feed(b"x" * MAX_EVENT_BYTES)) == []
    with pytest.raises(StreamBroken):
        list(reader.feed(b"x"))


@pytest.mark.parametrize("event", [b"data: [DONE]\n\n", b": ping\n\n", b"event: x\n\n", b"data:\n\n"])
def test_what_is_no_chunk_is_left_alone(event: bytes) -> None:
    """D7"""
    assert read_chat_event(event) == Chunk(event=event)


@pytest.mark.rule("D7", "And in every chunk of a stream.")
@pytest.mark.parametrize(
    ("event", "passed_on"),
    [
        (b'data: {"a":1.10,"system_fingerprint":"fp"}\n\n', b'data: {"a":1.10,"system_fingerprint":null}\n\n'),
        (b'data:{"a":1}\r\n\r\n', b'data: {"a":1,"system_fingerprint":null}\n\n'),
        (b'data: {"a":[1,\ndata: 2]}\n\n', b'data: {"a":[1, 2],"system_fingerprint":null}\n\n'),
        (b'data: {"error":null}\n\n', b'data: {"error":null,"system_fingerprint":null}\n\n'),
    ],
)
def test_the_fingerprint_of_a_chunk_is_null(event: bytes, passed_on: bytes) -> None:
    """D7: and other values keep their bytes."""
    assert read_chat_event(event).event == passed_on


def chunk(choices: Any, **more: Any) -> Chunk:
    return read_chat_event(b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n")


@pytest.mark.parametrize(
    ("choices", "tokens"),
    [
        ([{"delta": {"content": "a"}}], 1),
        ([{"delta": {"content": "\u00e9" * 4}}, {"delta": {"content": "abc"}}], 3),
        ([{"delta": {"reasoning_content": "12345678"}}], 2),
        ([{"delta": {"role": "assistant", "tool_calls": [{"index": 0, "function": {"arguments": "1234"}}]}}], 1),
        ([{"delta": {"role": "assistant", "content": ""}}], 0),
        ([{"delta": {}, "finish_reason": "stop"}], 0),
        ([], 0),
        (None, 0),
        (5, 0),
        ([5, {"delta": 5}], 0),
    ],
)
def test_what_counts_as_text_of_the_answer(choices: Any, tokens: int) -> None:
    """E2: also reasoning and calls of tools."""
    assert chunk(choices).text_tokens == tokens


def test_what_counts_as_a_chunk_for_the_usage_alone() -> None:
    """E1: a chunk that says something else as well is never kept back."""
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    assert chunk([], usage=usage).only_usage
    assert chunk([], usage=usage).usage == Usage(input_tokens=3, output_tokens=2)
    assert not chunk([{"delta": {}}], usage=usage).only_usage
    assert not chunk([]).only_usage
    assert not chunk([], usage=None).only_usage


def test_the_usage_of_a_response_is_in_its_last_event() -> None:
    """E2"""
    told = {"type": "response.incomplete", "response": {"usage": {"input_tokens": 3, "output_tokens": 2}}}
    event = b"event: response.incomplete\ndata: " + json.dumps(told).encode() + b"\n\n"
    assert read_response_event(event) == Chunk(event=event, usage=Usage(input_tokens=3, output_tokens=2))
    early = b'data: {"type":"response.created","response":{"usage":null}}\n\n'
    assert read_response_event(early) == Chunk(event=early)


@pytest.mark.parametrize("event", [b"data: [DONE]\n\n", b"data: 5\n\n", b": x\n\n", b'data: {"response":5}\n\n'])
def test_other_events_of_a_response_are_left_alone(event: bytes) -> None:
    """E2"""
    assert read_response_event(event) == Chunk(event=event, usage=NOTHING)


def test_an_error_is_an_event_of_its_own() -> None:
    """A6"""
    event = error_event(BadGateway("it\nbroke"))
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(event[6:])["error"]["message"] == "it\nbroke"
