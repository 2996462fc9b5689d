"""Synchronous calls that are answered whole: E1, E2, D6, D7."""

import json
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event
from typing import Any

import pytest

from batchline.api.inference import InferenceRoutes
from tests.support.api_server import CHAT, Api, read_reply, wait_until
from tests.support.manual_upstream import USAGE, ManualUpstream

OTHERS = ["/v1/responses", "/summary", "/usecase/classify/iab", "/gliner"]
PATHS = [CHAT, *OTHERS]
PRICES = {"input_price": "1", "cached_input_price": "0.5", "output_price": "10"}


def chat(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


def body_of(path: str) -> dict[str, Any]:
    return chat() if path == CHAT else {"model": "m", "input": "hi", "text": "hi"}


def asked(api: Api) -> int:
    """How often the upstream was asked."""
    return sum(api.script.tries.values())


@pytest.mark.rule("D7", "system_fingerprint is null in a synchronous answer.")
def test_a_chat_is_answered_as_its_line_in_a_batch_would_be(api: Api) -> None:
    """E1, D7: the upstream's answer, with the fingerprint null."""
    reply = api.post(CHAT, chat("say it"))
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"].startswith("req_")
    assert reply.json["choices"][0]["message"]["content"] == "scripted answer to: say it"
    assert reply.json["system_fingerprint"] is None


@pytest.mark.rule("E1", "Of a repeated key the last counts, and is what is sent.")
def test_values_of_a_chat_keep_their_bytes_both_ways(
    serve: Callable[..., Api], manual_upstream: ManualUpstream
) -> None:
    """E1, C4, D1: big numbers and key order survive; of a repeated key the last counts, and is what is sent."""
    api = serve(upstream_url=manual_upstream.url)
    sent = (
        b'{"z":1.10,"model":"a","messages":[{"role":"user","content":"\\u00e9"}],"model":"m","n":12345678901234567890}'
    )
    answer = b'{"b":1.10,"a":123456789012345678901,"system_fingerprint":"fp"}'
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(api.call, "POST", CHAT, body=sent)
        peer = manual_upstream.accept()
        got = peer.read()
        peer.answer(answer)
    assert got.path == CHAT
    assert (
        got.body == b'{"z":1.10,"model":"m","messages":[{"role":"user","content":"\\u00e9"}],"n":12345678901234567890}'
    )
    assert calling.result().body == answer.replace(b'"fp"', b"null")


@pytest.mark.rule("D6", "A call's rules are checked without asking the upstream.")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "model"),
        ({"model": "m"}, "messages"),
        ({"model": "m", "messages": []}, "messages"),
        ({"model": "m", "messages": [{"role": "robot", "content": "x"}]}, "messages"),
    ],
)
def test_a_chat_that_breaks_the_rules_is_refused_unasked(api: Api, body: dict[str, Any], param: str) -> None:
    """D6"""
    before = asked(api)
    reply = api.post(CHAT, body)
    assert reply.status == 400
    assert (reply.error["type"], reply.error["param"]) == ("invalid_request_error", param)
    assert asked(api) == before


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [b"", b"[]", b"no", b'{"a":"\xff"}', b"[" * 100_000, b'{"a":1}x'])
def test_a_body_that_is_no_json_object_is_refused(api: Api, path: str, body: bytes) -> None:
    """E1, E2, A6"""
    reply = api.call("POST", path, body=body)
    assert reply.status == 400
    assert reply.error["code"] == "invalid_request_error"


@pytest.mark.parametrize("path", PATHS)
def test_a_field_of_a_wrong_kind_is_named(api: Api, path: str) -> None:
    """A6, D6"""
    reply = api.post(path, body_of(path) | {"model": 5})
    assert (reply.status, reply.error["param"]) == (400, "model")
    for no_flag in ("yes", 1, 0, [True]):
        reply = api.post(path, body_of(path) | {"stream": no_flag})
        assert (reply.status, reply.error["param"]) == (400, "stream")


@pytest.mark.parametrize("path", OTHERS[1:])
def test_a_route_that_does_not_stream_says_so(api: Api, path: str) -> None:
    """E2: the upstream's events would be no answer here."""
    reply = api.post(path, body_of(path) | {"stream": True})
    assert (reply.status, reply.error["param"]) == (400, "stream")
    assert api.post(path, body_of(path) | {"stream": False}).status == 200


@pytest.mark.rule("D6", "A call with a field that may not reach the upstream is refused.")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"Model": "dear"}, "Model"),
        ({"MODEL": "dear"}, "MODEL"),
        ({"models": ["dear"]}, "models"),
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
    ],
)
def test_a_field_that_may_not_reach_the_upstream_is_refused(
    api: Api, path: str, fields: dict[str, Any], param: str
) -> None:
    """D6: it would be answered with the operator's key, and charged as another model."""
    before = asked(api)
    reply = api.post(path, body_of(path) | fields)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert asked(api) == before


def test_the_operator_decides_what_reaches_an_upstream(shared: Callable[..., Api]) -> None:
    """D6: for all upstreams, and for one of them."""
    other = {"url": "http://127.0.0.1:1/v1", "forbidden_fields": ["seed"], "tool_types": ["*"]}
    api = shared(
        forbidden_fields="temperature",
        media_hosts="images.example.org",
        upstreams={"other": other},
        models={"m": {}, "n": {"upstream": "other"}},
    )
    linked = [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}]
    for fields in ({"temperature": 1}, {"messages": [{"role": "user", "content": linked}]}):
        assert api.post(CHAT, chat() | fields).status == 400
    assert api.post(CHAT, chat(background=True, seed=1)).status == 200
    assert api.post(CHAT, chat(seed=1) | {"model": "n"}).error["param"] == "seed"
    assert api.post(CHAT, chat(temperature=1, tools=[{"type": "mcp"}]) | {"model": "n"}).status == 502


def test_the_usage_of_a_stream_cannot_be_refused_in_other_letters(api: Api) -> None:
    """E1: a server that ignores case would take the last of the two."""
    reply = api.post(CHAT, chat(stream=True, stream_options={"Include_Usage": False}))
    assert (reply.status, reply.error["param"]) == (400, "stream_options")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("end", ["%0A", "%0D%0A", "%20", "%00", "/"])
def test_another_path_is_not_taken_for_a_route(api: Api, path: str, end: str) -> None:
    """D6: its call would miss the rules of the route, and break the request line that the upstream reads."""
    before = asked(api)
    assert api.post(path + end, body_of(path)).status == 404
    assert asked(api) == before


@pytest.mark.parametrize("path", PATHS)
def test_the_name_of_a_model_has_a_limit(shared: Callable[..., Api], path: str) -> None:
    """D6: it is stored with the charge, and labels metrics."""
    api = shared()
    account = api.new_account(f"long-name{PATHS.index(path)}")
    reply = api.post(path, body_of(path) | {"model": "m" * 257}, account=account)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "invalid_request_error", "model")
    assert api.post(path, body_of(path) | {"model": "m" * 256}, account=account).status == 200
    assert [len(entry.model) for entry in api.usage(account)] == [256]


@pytest.mark.parametrize("path", PATHS)
def test_a_body_has_a_limit(shared: Callable[..., Api], path: str) -> None:
    """A6: 413 in the envelope, from the length alone."""
    api = shared(max_request_bytes=1000)
    reply = api.call("POST", path, body=b"x" * 1001)
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    assert api.post(path, body_of(path)).status == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "PUT"])
def test_only_post_is_answered(api: Api, path: str, method: str) -> None:
    """A6"""
    reply = api.call(method, path)
    assert reply.status == 405
    assert reply.headers["allow"] == "OPTIONS, POST"


@pytest.mark.rule("E2", "The other routes are reachable synchronously.")
@pytest.mark.rule("E2", "Their answers come back as they are.")
@pytest.mark.parametrize("path", OTHERS)
def test_other_routes_are_handed_to_the_upstream_that_serves_them(
    serve: Callable[..., Api], manual_upstream: ManualUpstream, path: str
) -> None:
    """E2: at its base without ``/v1``, and the answer comes back as it is."""
    api = serve(upstream_url=manual_upstream.url)
    answer = b'{\n "system_fingerprint": "fp", "x": [1.10]\n}\n'
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(api.post, path, {"text": "t"})
        peer = manual_upstream.accept()
        assert peer.read().path == path
        peer.answer(answer)
    assert (calling.result().status, calling.result().body) == (200, answer)


TROUBLES = [
    ("status=400", 400, "invalid_request_error", "invalid_request_error"),
    ("error=context_length_exceeded", 400, "invalid_request_error", "context_length_exceeded"),
    ("status=401", 401, "authentication_error", "authentication_error"),
    ("status=402", 402, "insufficient_quota", "insufficient_quota"),
    ("status=403", 403, "authentication_error", "authentication_error"),
    ("status=404", 404, "invalid_request_error", "not_found_error"),
    ("status=408", 408, "invalid_request_error", "invalid_request_error"),
    ("status=409", 409, "invalid_request_error", "invalid_request_error"),
    ("status=413", 413, "invalid_request_error", "request_too_large"),
    ("status=418", 418, "invalid_request_error", "invalid_request_error"),
    ("status=420", 420, "insufficient_quota", "insufficient_quota"),
    ("status=422", 422, "invalid_request_error", "invalid_request_error"),
    ("status=429", 429, "rate_limit_exceeded", "rate_limit_exceeded"),
    ("status=429 error=insufficient_quota", 429, "insufficient_quota", "insufficient_quota"),
    ("status=500", 502, "internal_error", "upstream_error"),
    ("status=503", 502, "internal_error", "upstream_error"),
    ("redirect", 502, "internal_error", "upstream_error"),
    ("html", 502, "internal_error", "upstream_error"),
    ("status=204", 502, "internal_error", "upstream_error"),
    ("cut", 502, "internal_error", "upstream_error"),
    ("huge=2000000", 502, "internal_error", "upstream_error"),
]
WHOLE_ONLY = {"cut", "huge=2000000"}


@pytest.mark.rule("A10", "An upstream's 408 or 409 is no reason to call again, nor is its insufficient_quota.")
@pytest.mark.rule("E1", "The same answer as a line gets: what is no JSON is the upstream's fault.")
@pytest.mark.rule("E2", "Synchronous calls are not retried.")
@pytest.mark.rule("E2", "The upstream's 4xx is passed on.")
@pytest.mark.rule("E2", "A 5xx is 502.")
@pytest.mark.parametrize(
    ("stream", "directive", "status", "kind", "code"),
    [(False, *trouble) for trouble in TROUBLES]
    + [(True, *trouble) for trouble in TROUBLES if trouble[0] not in WHOLE_ONLY],
)
def test_what_went_wrong_is_told_in_the_envelope_and_not_tried_again(
    shared: Callable[..., Api], stream: bool, directive: str, status: int, kind: str, code: str
) -> None:
    """E2, A10: the upstream's 4xx as they are, its troubles as 502, and only throttling is for the SDKs to retry."""
    api = shared(max_answer_bytes=1_000_000)
    before = asked(api)
    reply = api.post(CHAT, chat(f"[[{directive}]]", stream=stream))
    assert (reply.status, reply.error["type"], reply.error["code"]) == (status, kind, code)
    assert asked(api) == before + 1
    assert "127.0.0.1" not in reply.error["message"]
    assert (reply.headers["retry-after"] is not None) == (code == "rate_limit_exceeded")
    is_charged = directive.startswith("huge")
    final = status in {408, 409} or code == "insufficient_quota" or is_charged
    assert (reply.headers["x-should-retry"] == "false") == final


@pytest.mark.rule("A10", "An upstream's throttling is passed on with its wait, a minute at most.")
def test_throttling_tells_when_to_try_again(api: Api) -> None:
    """A4, A10: as the upstream says, and never more than a minute."""
    for told, passed_on in [("7", "7"), ("0.2", "1"), ("500", "60")]:
        reply = api.post(CHAT, chat(f"[[status=429 retry-after={told}]]"))
        assert reply.headers["retry-after"] == passed_on


@pytest.mark.rule("E2", "An unreachable upstream is 502.")
@pytest.mark.parametrize("stream", [False, True])
def test_an_upstream_that_cannot_be_reached_is_502(
    serve: Callable[..., Api], manual_upstream: ManualUpstream, stream: bool
) -> None:
    """E2"""
    api = serve(upstream_url=manual_upstream.url)
    manual_upstream.__exit__()
    reply = api.post(CHAT, chat(stream=stream))
    assert (reply.status, reply.error["type"]) == (502, "internal_error")
    assert reply.error["message"] == "The upstream cannot be reached"


@pytest.mark.rule("E2", "A timeout is 504.")
@pytest.mark.parametrize("stream", [False, True])
def test_an_upstream_that_takes_too_long_is_504(shared: Callable[..., Api], stream: bool) -> None:
    """E2"""
    api = shared(request_timeout_seconds=0.05)
    reply = api.post(CHAT, chat("[[hang]]", stream=stream))
    assert (reply.status, reply.error["type"], reply.error["code"]) == (504, "internal_error", "upstream_timeout")


MODELS = {
    "open": {"name": "its/name", **PRICES},
    "short": {"max_tokens": 3},
    "labels": {"kind": "classification"},
    "closed": {"projects": ["somebody-else"], "paths": ["/gliner"]},
    "summaries": {"paths": ["/summary"], **PRICES},
}


@pytest.mark.parametrize("path", PATHS)
def test_a_model_must_be_enabled_for_the_project(shared: Callable[..., Api], path: str) -> None:
    """D6, A8: one that exists elsewhere looks like one that does not exist."""
    api = shared(models=MODELS)
    replies = [api.post(path, body_of(path) | {"model": name}) for name in ("closed", "nosuch")]
    assert {reply.status for reply in replies} == {404}
    assert (replies[0].error["code"], replies[0].error["param"]) == ("not_found_error", "model")
    assert replies[0].error["message"] == "The model closed does not exist, or is not enabled for this project"
    assert replies[0].body == replies[1].body.replace(b"nosuch", b"closed")
    assert api.post(path, body_of(path) | {"model": "open"}).status == 200


def test_the_upstream_hears_its_own_name_of_a_model(serve: Callable[..., Api], manual_upstream: ManualUpstream) -> None:
    """E1"""
    api = serve(upstream_url=manual_upstream.url, models=MODELS)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(api.post, CHAT, chat() | {"model": "open"})
        peer = manual_upstream.accept()
        assert peer.read().json == chat() | {"model": "its/name"}
        peer.answer(b"{}")
    assert calling.result().status == 200


@pytest.mark.rule("D6", "A call's input is held against the limit.")
def test_an_input_over_the_models_limit_is_refused(shared: Callable[..., Api]) -> None:
    """D6"""
    reply = shared(models=MODELS).post(CHAT, chat("a " * 2000) | {"model": "short"})
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


@pytest.mark.rule("E2", "A request without a model goes to the one that serves its route.")
def test_a_route_without_a_model_goes_to_the_one_that_serves_it(shared: Callable[..., Api]) -> None:
    """E2: and is booked on it."""
    api = shared(models=MODELS)
    account = api.new_account("summaries")
    assert api.post("/summary", {"text": "t"}, account=account).status == 200
    assert [entry.model for entry in api.usage(account)] == ["summaries"]


def test_a_route_that_nobody_serves_says_what_to_do(shared: Callable[..., Api]) -> None:
    """E2: also where the model that serves it is another project's."""
    reply = shared(models=MODELS).post("/gliner", {"text": "t"})
    assert reply.status == 404
    assert reply.error["message"] == ('No model serves /gliner. Give a model of the settings file paths = ["/gliner"]')
    for path in PATHS:
        reply = shared(mocked=False).post(path, body_of(path))
        assert reply.status == 404
        assert reply.error["message"].startswith(f"No model serves {path}. Set upstream_url, or give a model")


@pytest.mark.rule("D7", "A call's classification is held to it.")
@pytest.mark.parametrize(
    ("content", "passed_on"),
    [
        (b'{"label": "news", "score": 0.10}', '{"label": "news", "score": 0.10}'),
        (b'"{\\"label\\":1}"', '{"label":1}'),
        (b'"no document"', None),
    ],
)
def test_a_classification_is_a_document_in_a_string(
    serve: Callable[..., Api], manual_upstream: ManualUpstream, content: bytes, passed_on: str | None
) -> None:
    """D7: made one where it is an object, and an upstream's fault where it is neither."""
    api = serve(upstream_url=manual_upstream.url, models=MODELS)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(api.post, CHAT, chat() | {"model": "labels"})
        peer = manual_upstream.accept()
        peer.read()
        peer.answer(b'{"choices":[{"message":{"role":"assistant","content":%b}}]}' % content)
    reply = calling.result()
    if passed_on is None:
        assert reply.status == 502
    else:
        assert reply.json["choices"][0]["message"]["content"] == passed_on


@pytest.mark.rule("E1", "A call is charged before its answer is sent.")
@pytest.mark.rule("E1", "A call costs the whole price.")
def test_an_answer_is_charged_for_before_it_is_sent(shared: Callable[..., Api]) -> None:
    """E1, D4: at the full price, cached input at its own; the books and the funds agree."""
    api = shared(models=MODELS, metering=True)
    account = api.new_account("charged")
    before = api.funds(account)
    assert api.post(CHAT, chat("one two three [[cached=2]]") | {"model": "open"}, account=account).status == 200
    [entry] = api.usage(account)
    assert (entry.model, entry.requests, entry.batch_id) == ("open", 1, None)
    assert (entry.input_tokens, entry.cached_tokens, entry.output_tokens) == (4, 2, 7)
    assert entry.cost == 2 * 1000 + 2 * 500 + 7 * 10_000
    assert api.funds(account) == before - entry.cost


def test_a_call_without_a_model_is_booked_under_no_name(shared: Callable[..., Api]) -> None:
    """E2: and costs nothing, as nothing has a price."""
    api = shared(metering=True)
    account = api.new_account("nameless")
    assert api.post("/gliner", {"text": "t"}, account=account).status == 200
    assert [(entry.model, entry.requests, entry.cost) for entry in api.usage(account)] == [("", 1, 0)]


@pytest.mark.rule("D4", "A refused call is not charged.")
def test_a_refused_call_is_not_charged(shared: Callable[..., Api]) -> None:
    """D4"""
    api = shared(models=MODELS, metering=True)
    account = api.new_account("refused")
    for directive in ("status=400", "status=503", "html"):
        assert api.post(CHAT, chat(f"[[{directive}]]") | {"model": "open"}, account=account).status >= 400
    assert api.usage(account) == []


@pytest.mark.rule("E2", "An answer over the size limit is charged, at most what was held.")
@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_over_the_size_limit_is_charged(
    serve: Callable[..., Api], manual_upstream: ManualUpstream, announced: bool, stream: bool
) -> None:
    """E2: the upstream did the work, and the tenant asked for it."""
    api = serve(upstream_url=manual_upstream.url, max_answer_bytes=1000)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(api.post, CHAT, chat(stream=stream, max_tokens=100))
        peer = manual_upstream.accept()
        asked = peer.read()
        if announced:
            peer.answer(b"x" * 2000)
        else:
            peer.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n7d0\r\n" + b"x" * 2000)
        reply = calling.result()
    assert reply.status == 502
    assert reply.headers["x-should-retry"] == "false"
    [entry] = api.usage()
    assert (entry.input_tokens, entry.output_tokens) == (-(-len(asked.body) // 4), 100)


@pytest.mark.rule("E2", "A refusal over the size limit costs nothing.")
def test_a_refusal_over_the_size_limit_is_not_charged(
    serve: Callable[..., Api], manual_upstream: ManualUpstream
) -> None:
    """E2: it may be the page of a proxy whose server is down."""
    api = serve(upstream_url=manual_upstream.url, max_answer_bytes=1000)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(api.post, CHAT, chat())
        peer = manual_upstream.accept()
        peer.read()
        peer.answer(b"x" * 2000, status="503 Service Unavailable")
        assert calling.result().status == 502
    assert api.usage() == []


@pytest.mark.rule("E2", "A call that ends in a timeout costs nothing.")
def test_a_call_that_the_upstream_does_not_answer_in_time_is_not_charged(
    serve: Callable[..., Api], manual_upstream: ManualUpstream
) -> None:
    """E2: the client has nothing of it, and cannot know why."""
    api = serve(upstream_url=manual_upstream.url, request_timeout_seconds=0.2)
    assert api.post(CHAT, chat()).status == 504
    assert api.usage() == []


@pytest.mark.rule("D4", "A call whose body comes slowly is checked against the balance after the body.")
def test_a_balance_that_was_spent_while_the_body_came_counts(
    serve: Callable[..., Api], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4: otherwise bodies that are held back could spend one balance many times."""
    read, waits = InferenceRoutes._read, Event()

    def note_wait(*arguments: Any) -> Any:
        waits.set()
        return read(*arguments)

    monkeypatch.setattr("batchline.api.auth._TRUSTED_SECONDS", 0)
    monkeypatch.setattr(InferenceRoutes, "_read", note_wait)
    api = serve(models=MODELS, metering=True)
    body = json.dumps(chat() | {"model": "open"}).encode()
    with api.connect() as sock:
        sock.sendall(api.head(f"POST {CHAT}", f"content-length: {len(body)}") + body[:-1])
        assert waits.wait(60)
        api.set_funds(0)
        sock.sendall(body[-1:])
        assert read_reply(sock).status == 429
    assert asked(api) == 0


@pytest.mark.rule("E2", "A call that the client leaves is charged like one that it reads.")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_charged_like_one_that_stays(
    serve: Callable[..., Api], manual_upstream: ManualUpstream, stream: bool
) -> None:
    """E2: also before the upstream began to answer; until then its slot is taken."""
    api = serve(upstream_url=manual_upstream.url, max_project_calls=1)
    body = json.dumps(chat(stream=stream)).encode()
    with api.connect() as sock:
        sock.sendall(api.head(f"POST {CHAT}", f"content-length: {len(body)}") + body)
        peer = manual_upstream.accept()
        peer.read()
    assert api.post(CHAT, chat()).status == 429
    peer.answer(json.dumps({"usage": USAGE}).encode())
    wait_until(lambda: api.usage() != [])
    [entry] = api.usage()
    assert (entry.requests, entry.input_tokens, entry.output_tokens) == (1, 11, 7)
    wait_until(lambda: api.requests_in_flight() == 0)


NO_COUNTS = [
    None,
    {},
    {"prompt_tokens": 12},
    {"prompt_tokens": -1, "completion_tokens": 5},
    {"prompt_tokens": 1, "completion_tokens": 0.5},
    {"prompt_tokens": True, "completion_tokens": True},
    {"prompt_tokens": 2**40, "completion_tokens": 5},
]


@pytest.mark.rule("E2", "What is no count is estimated over the whole request and answer.")
@pytest.mark.parametrize("usage", NO_COUNTS)
def test_what_is_no_count_is_estimated(
    serve: Callable[..., Api], manual_upstream: ManualUpstream, usage: dict[str, Any] | None
) -> None:
    """E2: the tools of the request and the reasoning of the answer count too."""
    api = serve(upstream_url=manual_upstream.url)
    answer = {"choices": [{"message": {"reasoning_content": "r" * 4000}}], "usage": usage}
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(api.post, CHAT, chat(tools=[{"type": "function", "function": {"name": "t" * 400}}]))
        peer = manual_upstream.accept()
        asked = peer.read()
        peer.answer(json.dumps(answer).encode())
        assert calling.result().status == 200
    [entry] = api.usage()
    assert entry.input_tokens == -(-len(asked.body) // 4) > 100
    assert entry.output_tokens == -(-len(json.dumps(answer)) // 4) > 1000


def test_a_project_has_so_many_calls_at_once_and_no_more(
    serve: Callable[..., Api], manual_upstream: ManualUpstream
) -> None:
    """A4: they are counted apart from uploads, and every project's for itself."""
    api = serve(upstream_url=manual_upstream.url, max_project_calls=1, max_project_requests=1)
    other = api.new_account("other")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(api.post, CHAT, chat())
        waiting = manual_upstream.accept()
        waiting.read()
        refused = api.post(CHAT, chat())
        uploaded = api.upload()
        remote = pool.submit(api.post, CHAT, chat(), account=other)
        peer = manual_upstream.accept()
        peer.read()
        peer.answer(b"{}")
        assert remote.result().status == 200
        waiting.answer(b"{}")
        assert first.result().status == 200
    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
    assert "1 synchronous calls" in refused.error["message"]
    assert refused.headers["retry-after"] == "1"
    assert uploaded.status == 200


def test_two_calls_share_a_connection_one_after_the_other(
    serve: Callable[..., Api], manual_upstream: ManualUpstream
) -> None:
    """E1: a call that ended well leaves its connections in order, on both sides."""
    api = serve(upstream_url=manual_upstream.url)
    body = json.dumps(chat()).encode()
    with api.connect() as sock:
        peer = None
        for _ in range(3):
            sock.sendall(api.head(f"POST {CHAT}", f"content-length: {len(body)}") + body)
            peer = peer or manual_upstream.accept()
            peer.read()
            peer.answer(json.dumps({"usage": USAGE}).encode())
            assert read_reply(sock).json["usage"] == USAGE


def _large_chat(size: int) -> bytes:
    return json.dumps(chat("x" * size)).encode()


@pytest.mark.rule("A4", "The bodies of calls under way are bounded for a project and for the service.")
@pytest.mark.parametrize("chunked", [False, True])
def test_the_bodies_of_calls_under_way_are_bounded(
    serve: Callable[..., Api], manual_upstream: ManualUpstream, chunked: bool
) -> None:
    """A4: refused before the body is read, from the length alone, or as the largest body if it has no length."""
    api = serve(
        upstream_url=manual_upstream.url,
        max_request_bytes=600_000,
        max_project_call_bytes=1_000_000,
        max_call_bytes=1_600_000,
    )
    other, third = api.new_account("other"), api.new_account("third")
    body = _large_chat(590_000)
    with ThreadPoolExecutor(2) as pool:
        calls = []
        for account in (api.account, other):
            calls.append(pool.submit(api.call, "POST", CHAT, body=body, account=account))
            peer = manual_upstream.accept()
            peer.read()
        with api.connect() as sock:
            framing = "transfer-encoding: chunked" if chunked else f"content-length: {len(body)}"
            sock.sendall(api.head(f"POST {CHAT}", framing, "expect: 100-continue"))
            refused = read_reply(sock)
        full = api.call("POST", CHAT, body=body, account=third)
        for peer in manual_upstream.peers:
            peer.answer(b"{}")
        assert [call.result().status for call in calls] == [200, 200]
    for reply in (refused, full):
        assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
        assert reply.headers["retry-after"] == "1"
    sample = api.services.metrics.registry.get_sample_value
    assert sample("batchline_refusals_total", {"bound": "project_call_bytes"}) == 1
    assert sample("batchline_refusals_total", {"bound": "call_bytes"}) == 1


def test_a_large_call_is_held_once(serve: Callable[..., Api], manual_upstream: ManualUpstream) -> None:
    """A4: what is reserved is near to what a call takes."""
    api = serve(upstream_url=manual_upstream.url)
    body = _large_chat(4_000_000)
    head = api.head(f"POST {CHAT}", f"content-length: {len(body)}")
    with ExitStack() as stack:
        # Not the memory of the process: what earlier tests have freed changes that.
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        held = []
        for _ in range(12):
            stack.enter_context(sock := api.connect())
            sock.sendall(head + body)
            manual_upstream.accept().read()
            held.append(tracemalloc.get_traced_memory()[0])
        # With a second copy of the body it would be 8 MB.
        assert (held[-1] - held[1]) / 10 < 7_000_000


@pytest.mark.rule("E4", "An endpoint that is allowed in batches is served synchronously too, and others are not.")
def test_an_endpoint_of_batches_is_served_synchronously_too(
    serve: Callable[..., Api], manual_upstream: ManualUpstream
) -> None:
    api = serve(upstream_url=manual_upstream.url, batch_endpoints="/v1/chat/completions,/v1/embeddings")
    answer = b'{"object":"list","data":[{"embedding":[0.10]}],"usage":{"prompt_tokens":3,"total_tokens":3}}'
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(api.post, "/v1/embeddings", {"model": "m", "input": "hi"})
        peer = manual_upstream.accept()
        got = peer.read()
        peer.answer(answer)
    assert got.path == "/v1/embeddings"
    reply = calling.result()
    assert (reply.status, reply.body) == (200, answer)
    assert [(entry.model, entry.input_tokens) for entry in api.usage()] == [("m", 3)]
    missing = api.post("/v1/embeddings", {"input": "hi"})
    assert (missing.status, missing.error["param"]) == (400, "model")
    assert api.post("/v1/embeddings", {"model": "m", "input": "hi", "stream": True}).error["param"] == "stream"
    assert "/v1/embeddings" in api.call("GET", "/openapi.json").json["paths"]
    assert api.post("/v1/completions", {"model": "m"}).status == 404


def test_an_endpoint_that_is_not_allowed_in_batches_is_not_served(api: Api) -> None:
    """E4: by default only chats are allowed in batches."""
    assert api.post("/v1/embeddings", {"model": "m", "input": "hi"}).status == 404
