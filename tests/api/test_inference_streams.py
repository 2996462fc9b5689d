"""Streams: E1, E2, D7."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPResponse
from typing import Any

import pytest

from batchline.domain.events import MAX_EVENT_BYTES
from tests.support.api_server import CHAT, Api, wait_until
from tests.support.manual_upstream import DONE, USAGE, ManualUpstream, Peer, delta, event

RESPONSES = "/v1/responses"
PRICED = {"models": {"m": {"input_price": "1", "output_price": "10"}}, "metering": True}
QUESTION = "twelve bytes"


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": QUESTION}], "stream": True, **more}


class Client:
    """Reads the stream of one call, event by event."""

    def __init__(self, api: Api, path: str, body: dict[str, Any]) -> None:
        data = json.dumps(body, separators=(",", ":")).encode()
        self._sock = api.connect()
        self._sock.sendall(api.head(f"POST {path}", f"content-length: {len(data)}") + data)

    def begin(self) -> HTTPResponse:
        self._response = HTTPResponse(self._sock)
        self._response.begin()
        return self._response

    def next(self) -> bytes:
        """The next event, up to its blank line; nothing at the end."""
        lines = []
        while line := self._response.readline():
            lines.append(line)
            if not line.strip():
                break
        return b"".join(lines)

    def rest(self) -> list[bytes]:
        return list(iter(self.next, b""))

    def leave(self) -> None:
        if hasattr(self, "_response"):
            self._response.close()
        self._sock.close()


def estimated(asked: Any) -> int:
    """The tokens of a request, at four bytes each."""
    return -(-len(json.dumps(asked, separators=(",", ":"))) // 4)


@contextmanager
def streaming(
    api: Api, manual_upstream: ManualUpstream, path: str, body: dict[str, Any]
) -> Iterator[tuple[Client, Peer, Any]]:
    """A call whose upstream has begun to stream, and what that was asked."""
    client = Client(api, path, body)
    try:
        peer = manual_upstream.accept()
        asked = peer.read()
        assert asked.path == path
        peer.begin_stream()
        assert client.begin().status == 200
        yield client, peer, asked.json
    finally:
        client.leave()


def sent(data: bytes) -> Any:
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    return json.loads(data[6:])


def booked(api: Api) -> tuple[int, int, int]:
    """Requests, input tokens and output tokens of the account, once there is an entry."""
    wait_until(lambda: api.usage() != [])
    [entry] = api.usage()
    return entry.requests, entry.input_tokens, entry.output_tokens


@pytest.mark.rule("E1", "Events are passed on as they come.")
def test_events_are_passed_on_as_they_come(serve: Callable[..., Api], manual_upstream: ManualUpstream) -> None:
    """E1: the first is there before the second was sent; also where an event comes in pieces."""
    with streaming(serve(upstream_url=manual_upstream.url), manual_upstream, CHAT, chat()) as (client, peer, _):
        for text in ("one", "two"):
            whole = event(delta(text))
            peer.send_events(whole[:9], whole[9:])
            assert sent(client.next())["choices"] == delta(text)["choices"]
        peer.send_events(DONE)
        assert client.next() == DONE
        peer.end_stream()
        assert client.rest() == []


@pytest.mark.rule("E1", "stream: true streams server-sent events.")
def test_a_stream_says_what_it_is(api: Api) -> None:
    """E1, A5: for clients and for proxies in between."""
    client = Client(api, CHAT, chat())
    head = client.begin()
    assert head.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (head.headers["cache-control"], head.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert head.headers["x-request-id"].startswith("req_")
    events = client.rest()
    client.leave()
    assert events[-1] == DONE
    said = "".join(choice["delta"].get("content") or "" for one in events[:-1] for choice in sent(one)["choices"])
    assert said == f"scripted answer to: {QUESTION}"


def test_the_fingerprint_is_null_in_every_chunk_and_nothing_else_changes(
    serve: Callable[..., Api], manual_upstream: ManualUpstream
) -> None:
    """D7"""
    with streaming(serve(upstream_url=manual_upstream.url), manual_upstream, CHAT, chat()) as (client, peer, _):
        peer.send_events(b'data: {"system_fingerprint":"fp","choices":[{"delta":{"content":"\\u00e9"}}],"n":1.10}\n\n')
        peer.send_events(b": a comment\n\n", b'data: {"z":1}\r\n\r\n')
        passed_on = b'data: {"system_fingerprint":null,"choices":[{"delta":{"content":"\\u00e9"}}],"n":1.10}\n\n'
        assert client.next() == passed_on
        assert client.next() == b": a comment\n\n"
        assert client.next() == b'data: {"z":1,"system_fingerprint":null}\n\n'


@pytest.mark.rule("E1", "Usage is asked for, so that a stream can be charged.")
@pytest.mark.rule("E1", "And shown only to who wanted it.")
@pytest.mark.parametrize(
    ("options", "wanted"),
    [({}, False), ({"stream_options": None}, False), ({"stream_options": {"x": 1}}, False)]
    + [({"stream_options": {"include_usage": told}}, told) for told in (False, True)],
)
def test_the_usage_is_asked_for_and_shown_to_who_wanted_it(
    serve: Callable[..., Api], manual_upstream: ManualUpstream, options: dict[str, Any], wanted: bool
) -> None:
    """E1, D4"""
    api = serve(upstream_url=manual_upstream.url)
    with streaming(api, manual_upstream, CHAT, chat(**options)) as (client, peer, asked):
        assert asked["stream_options"] == (options.get("stream_options") or {}) | {"include_usage": True}
        peer.send_events(event(delta("a")), event({"choices": [], "usage": USAGE}), DONE)
        peer.end_stream()
        events = client.rest()
    shown = [sent(one)["usage"] for one in events[1:-1]]
    assert shown == ([USAGE] if wanted else [])
    assert booked(api) == (1, 11, 7)


def test_a_stream_is_charged_before_its_end(serve: Callable[..., Api]) -> None:
    """E1, D4: once, at the price of the model."""
    api = serve(**PRICED)
    before = api.funds()
    client = Client(api, CHAT, chat())
    client.begin()
    assert client.rest()[-1] == DONE
    [entry] = api.usage()
    client.leave()
    assert (entry.model, entry.requests, entry.input_tokens, entry.output_tokens) == ("m", 1, 2, 5)
    assert api.funds() == before - entry.cost == before - (2 * 1000 + 5 * 10_000)


@pytest.mark.rule("E2", "A stream that reports no usage is estimated.")
def test_a_stream_that_tells_no_usage_is_estimated(serve: Callable[..., Api], manual_upstream: ManualUpstream) -> None:
    """E2: a token for four bytes of the whole request, and for four bytes of each chunk, also of reasoning."""
    api = serve(upstream_url=manual_upstream.url)
    body = chat(tools=[{"type": "function", "function": {"name": "t" * 400}}])
    with streaming(api, manual_upstream, CHAT, body) as (client, peer, asked):
        opening = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        reasoning = {"choices": [{"delta": {"reasoning_content": "r" * 4000}}]}
        peer.send_events(event(opening), event(reasoning), event(delta("a")), event(delta("b")), event(delta("")), DONE)
        peer.end_stream()
        assert len(client.rest()) == 6
    assert booked(api) == (1, estimated(asked), 1002)


@pytest.mark.rule("E2", "A stream that the client leaves is charged like one that it reads.")
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_stream_that_the_client_leaves_is_read_to_its_end(
    serve: Callable[..., Api], manual_upstream: ManualUpstream, path: str
) -> None:
    """E2: the usage is reported last. An early report, as some servers send with each chunk, is not the last word."""
    api = serve(upstream_url=manual_upstream.url, max_project_calls=1)
    body = chat() if path == CHAT else {"model": "m", "input": QUESTION, "stream": True}
    early, last = {"prompt_tokens": 1, "completion_tokens": 1}, USAGE
    first = delta("a", usage=early) if path == CHAT else {"type": "response.output_text.delta", "delta": "a"}
    end = (
        {"choices": [], "usage": last} if path == CHAT else {"type": "response.completed", "response": {"usage": last}}
    )
    with streaming(api, manual_upstream, path, body) as (client, peer, _):
        peer.send_events(event(first))
        assert client.next()
        client.leave()
        assert api.post(path, body | {"stream": False}).status == 429
        peer.send_events(event(first), event(end), DONE)
        peer.end_stream()
        assert booked(api) == (1, 11, 7)
    wait_until(lambda: api.requests_in_flight() == 0)


@pytest.mark.rule("E2", "A stream that was left is read within bounds.")
def test_a_stream_that_was_left_is_read_for_a_bounded_time(
    serve: Callable[..., Api], manual_upstream: ManualUpstream
) -> None:
    """E2: then the upstream is not left working, and the charge is an estimate."""
    api = serve(upstream_url=manual_upstream.url, request_timeout_seconds=0.2)
    with streaming(api, manual_upstream, CHAT, chat()) as (client, peer, asked):
        client.leave()
        peer.send_events(event(delta("b" * 2000)))
        peer.wait_until_closed()
        assert booked(api) == (1, estimated(asked), 500)
    wait_until(lambda: api.requests_in_flight() == 0)


def test_a_stream_that_was_left_is_read_for_bounded_bytes(
    serve: Callable[..., Api], manual_upstream: ManualUpstream
) -> None:
    """E2: an upstream that never ends is left, and the charge is for all that it sent until then."""
    api = serve(upstream_url=manual_upstream.url, max_answer_bytes=1000)
    with streaming(api, manual_upstream, CHAT, chat()) as (client, peer, _):
        client.leave()
        with suppress(ConnectionError):
            while True:
                peer.send_events(event(delta("b" * 2000)))
        assert booked(api)[2] >= 500
    wait_until(lambda: api.requests_in_flight() == 0)


@pytest.mark.rule("F3", "A stream ends when its key is revoked or expires.")
@pytest.mark.parametrize("end", ["revoked", "expired"])
def test_a_stream_ends_with_its_key(serve: Callable[..., Api], manual_upstream: ManualUpstream, end: str) -> None:
    """F3: within 5 s; never ending is the failure here. It is charged like one that was read to its end."""
    api = serve(upstream_url=manual_upstream.url)
    api.account = api.new_account("ended", expires_at=int(api.clock.now()) + 3600)
    with streaming(api, manual_upstream, CHAT, chat()) as (client, peer, _):
        peer.send_events(event(delta("a")))
        assert client.next()
        if end == "revoked":
            assert api.await_(api.store.revoke_key(api.account.key_id, at=2))
        else:
            api.clock.ahead = 3600
        [last] = client.rest()
        assert sent(last)["error"]["message"] == "Invalid credentials"
        peer.send_events(event(delta("b")), event({"choices": [], "usage": USAGE}), DONE)
        peer.end_stream()
        assert booked(api) == (1, 11, 7)


BREAKS = [
    b"data: no json\n\n",
    b"data: [1]\n\n",
    b'data: {"a":"\xff"}\n\n',
    b'data: {"error":{"message":"at 10.0.0.1: out of memory"}}\n\n',
    b"data: " + b"x" * (1024 * 1024 + 1),
    None,
]


@pytest.mark.rule("E2", "A stream that breaks says so.")
@pytest.mark.parametrize("broken", BREAKS, ids=["text", "array", "utf8", "error", "huge", "cut"])
def test_a_stream_that_breaks_says_so_and_is_charged_for_what_was_sent(
    serve: Callable[..., Api], manual_upstream: ManualUpstream, broken: bytes | None
) -> None:
    """E2, A6: the last event is an envelope without internals, and the stream does not end as if all were well."""
    api = serve(upstream_url=manual_upstream.url)
    with streaming(api, manual_upstream, CHAT, chat()) as (client, peer, asked):
        peer.send_events(event(delta("a")))
        assert client.next()
        if broken is None:
            peer.close()
        else:
            peer.send_events(broken)
        [last] = client.rest()
    assert sent(last) == {
        "error": {
            "message": "The upstream broke off in the middle of its answer",
            "type": "internal_error",
            "code": "upstream_error",
            "param": None,
        }
    }
    # What came of an event that is too large is charged too: the usage would have come after it.
    too_large = len(broken) // 4 if broken is not None and len(broken) > MAX_EVENT_BYTES else 0
    requests, input_tokens, output_tokens = booked(api)
    assert (requests, input_tokens) == (1, estimated(asked))
    assert 1 + MAX_EVENT_BYTES // 4 <= output_tokens <= 3 + too_large if too_large else output_tokens == 1


def test_the_servers_end_cuts_a_stream_off_and_charges_it(
    serve: Callable[..., Api], manual_upstream: ManualUpstream
) -> None:
    """E2, D4: a stream in flight at the end of the grace is charged before the store is closed."""
    api = serve(upstream_url=manual_upstream.url, shutdown_grace_seconds=0)
    with streaming(api, manual_upstream, CHAT, chat()) as (client, peer, body):
        peer.send_events(event(delta("a")))
        assert client.next()
        api.stop()
        api.join()
        peer.wait_until_closed()
    asked = "SELECT count(*) || ' ' || sum(input_tokens) || ' ' || sum(output_tokens) FROM ledger WHERE requests > 0"
    assert api.ask(asked) == f"1 {estimated(body)} 1"


def test_a_stream_of_responses_is_passed_on_untouched(
    serve: Callable[..., Api], manual_upstream: ManualUpstream
) -> None:
    """E2: its last event reports the usage; nothing is added to the request."""
    api = serve(upstream_url=manual_upstream.url)
    usage = {"input_tokens": 5, "output_tokens": 6, "total_tokens": 11}
    body = {"model": "m", "input": QUESTION, "stream": True}
    events = [
        b'event: response.created\ndata: {"type": "response.created", "response": {"usage": null}}\n\n',
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n',
        b"data: no json\n\n",
        b"event: response.completed\n" + event({"type": "response.completed", "response": {"usage": usage}}),
    ]
    with streaming(api, manual_upstream, RESPONSES, body) as (client, peer, asked):
        assert asked == body
        peer.send_events(*events)
        peer.end_stream()
        assert client.rest() == events
    assert booked(api) == (1, 5, 6)


def test_an_upstream_that_does_not_stream_is_answered_for_whole(
    serve: Callable[..., Api], manual_upstream: ManualUpstream
) -> None:
    """E1"""
    api = serve(upstream_url=manual_upstream.url)
    client = Client(api, CHAT, chat())
    peer = manual_upstream.accept()
    peer.read()
    peer.answer(json.dumps({"usage": USAGE}).encode())
    head = client.begin()
    assert (head.status, head.headers["content-type"]) == (200, "application/json")
    assert json.loads(head.read()) == {"usage": USAGE, "system_fingerprint": None}
    client.leave()
    assert booked(api) == (1, 11, 7)


def test_a_connection_serves_the_next_call_after_a_stream(
    serve: Callable[..., Api], manual_upstream: ManualUpstream
) -> None:
    """E1: on both sides."""
    api = serve(upstream_url=manual_upstream.url)
    data = json.dumps(chat()).encode()
    request = api.head(f"POST {CHAT}", f"content-length: {len(data)}") + data
    with api.connect() as sock:
        peer = None
        for _ in range(3):
            sock.sendall(request)
            peer = peer or manual_upstream.accept()
            peer.read()
            peer.begin_stream()
            peer.send_events(DONE)
            peer.end_stream()
            response = HTTPResponse(sock)
            response.begin()
            assert response.read() == DONE
