"""The list of models: E3."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from batchline.api import models as api_models
from batchline.api.models import UpstreamModels
from batchline.domain.errors import BadGateway, GatewayTimeout
from batchline.domain.replies import Answer, Fault, FaultKind
from batchline.ports import Clock, SyncUpstream
from tests.support.api_server import Api, Reply
from tests.support.clocks import SettableClock
from tests.support.manual_upstream import ManualUpstream

MODELS = {
    "small": {},
    "vendor/large:v1": {},
    "theirs": {"projects": ["another-project"]},
}


def listed(model_id: str, **more: Any) -> dict[str, Any]:
    return {"id": model_id, "object": "model", "created": 0, "owned_by": "batchline"} | more


@pytest.mark.rule("E3", "The list shows the models enabled for the project.")
@pytest.mark.rule("E3", "In OpenAI's shape.")
def test_the_list_shows_what_is_enabled_for_the_project(shared: Callable[..., Api]) -> None:
    """E3"""
    reply = shared(models=MODELS).call("GET", "/v1/models")
    assert reply.status == 200
    assert reply.json == {"object": "list", "data": [listed("small"), listed("vendor/large:v1")]}


@pytest.mark.rule("E3", "A model is found by its id, slashes and all.")
@pytest.mark.parametrize("path", ["small", "vendor/large:v1", "vendor%2Flarge%3Av1"])
def test_one_model_is_found_by_its_id_slashes_and_all(shared: Callable[..., Api], path: str) -> None:
    """E3"""
    reply = shared(models=MODELS).call("GET", f"/v1/models/{path}")
    assert reply.status == 200
    assert reply.json in [listed("small"), listed("vendor/large:v1")]


def test_a_model_of_other_projects_does_not_exist(shared: Callable[..., Api]) -> None:
    """E3, A8: byte for byte."""
    api = shared(models=MODELS)
    foreign, absent = api.call("GET", "/v1/models/theirs"), api.call("GET", "/v1/models/nobody")
    assert (foreign.status, foreign.error["code"]) == (404, "model_not_found")
    assert foreign.body.replace(b"theirs", b"nobody") == absent.body


def test_an_empty_id_is_refused(shared: Callable[..., Api]) -> None:
    """A12"""
    reply = shared(models=MODELS).call("GET", "/v1/models/")
    assert (reply.status, reply.error["param"]) == (400, "model")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/small"])
def test_the_list_is_read_only_and_for_clients(shared: Callable[..., Api], path: str) -> None:
    """A1, A6"""
    api = shared(models=MODELS)
    assert api.call("GET", path, anonymous=True).status == 401
    assert api.call("DELETE", path).status == 405
    head = api.call("HEAD", path)
    assert (head.status, head.body) == (200, b"")


def ask_by_hand(api: Api, manual_upstream: ManualUpstream, path: str, body: bytes, status: str = "200 OK") -> Reply:
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(api.call, "GET", path)
        peer = manual_upstream.accept()
        assert peer.read().path == "/v1/models"
        peer.answer(body, status=status)
        return calling.result()


def test_where_any_model_may_be_asked_the_upstream_tells_its_own(
    serve: Callable[..., Api], manual_upstream: ManualUpstream
) -> None:
    """E3, F2: reduced to what the list has."""
    api = serve(upstream_url=manual_upstream.url)
    told = [
        {"id": "a/b", "object": "llm", "created": 5, "owned_by": "vllm", "root": "/secret"},
        {"id": "bare", "created": None},
    ]
    reply = ask_by_hand(api, manual_upstream, "/v1/models", json.dumps({"object": "list", "data": told}).encode())
    expected = [listed("a/b", created=5, owned_by="vllm"), listed("bare")]
    assert reply.json == {"object": "list", "data": expected}


def test_one_model_of_the_upstreams_own(api: Api) -> None:
    """E3"""
    [model] = api.call("GET", "/v1/models").json["data"]
    assert api.call("GET", f"/v1/models/{model['id']}").json == model
    assert api.call("GET", "/v1/models/nobody").error["code"] == "model_not_found"


@pytest.mark.parametrize("status", ["404 Not Found", "405 Method Not Allowed"])
def test_an_upstream_without_such_a_route_has_no_list(
    serve: Callable[..., Api], manual_upstream: ManualUpstream, status: str
) -> None:
    """E3"""
    reply = ask_by_hand(serve(upstream_url=manual_upstream.url), manual_upstream, "/v1/models", b"{}", status)
    assert reply.json == {"object": "list", "data": []}


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{}", "500 Oops"), (b"{}", "401 No"), (b"<html>", "200 OK"), (b'{"data":[{"id":5}]}', "200 OK")],
)
def test_a_list_that_cannot_be_had_is_502(
    serve: Callable[..., Api], manual_upstream: ManualUpstream, body: bytes, status: str
) -> None:
    """E3, E2"""
    reply = ask_by_hand(serve(upstream_url=manual_upstream.url), manual_upstream, "/v1/models", body, status)
    assert (reply.status, reply.error["type"]) == (502, "internal_error")


@pytest.mark.parametrize(("gone", "status"), [(False, 504), (True, 502)])
def test_an_upstream_that_is_gone_or_silent_is_told_apart(
    serve: Callable[..., Api], manual_upstream: ManualUpstream, gone: bool, status: int
) -> None:
    """E3, E2"""
    api = serve(upstream_url=manual_upstream.url, request_timeout_seconds=0.5)
    if gone:
        manual_upstream.__exit__()
    assert api.call("GET", "/v1/models").status == status


@pytest.mark.rule("A4", "A list of models takes one of the lists of its project.")
@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m"])
def test_a_list_of_models_takes_a_place_of_its_project(
    serve: Callable[..., Api], manual_upstream: ManualUpstream, path: str
) -> None:
    api = serve(upstream_url=manual_upstream.url, max_project_requests=1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(api.call, "GET", path)
        peer = manual_upstream.accept()
        assert api.call("GET", path).status == 429
        peer.answer(b'{"data":[{"id":"m"}]}')
        assert first.result().status == 200


class _Upstream:
    """An upstream that counts how often it is asked for its models, and answers when the test lets it."""

    def __init__(self) -> None:
        self.asked, self.answers = 0, asyncio.Event()
        self.reply: Any = Answer(status=200, body=b'{"data":[{"id":"m"}]}')

    async def get(self, _path: str) -> Any:
        self.asked += 1
        await self.answers.wait()
        return self.reply


def _upstream_models(upstream: _Upstream, clock: SettableClock) -> UpstreamModels:
    return UpstreamModels(cast(SyncUpstream, upstream), clock=cast(Clock, clock))


@pytest.mark.anyio
@pytest.mark.rule("E3", "All who ask for the list of the upstream share one request, and its answer for some seconds.")
async def test_all_who_ask_share_one_request_to_the_upstream() -> None:
    upstream, clock = _Upstream(), SettableClock()
    models = _upstream_models(upstream, clock)
    reads = [asyncio.ensure_future(models.read()) for _ in range(50)]
    await asyncio.sleep(0)
    upstream.answers.set()
    assert {found[0].id for found in await asyncio.gather(*reads)} == {"m"}
    await models.read()
    assert upstream.asked == 1
    clock.advance(5)
    await models.read()
    assert upstream.asked == 2


@pytest.mark.anyio
async def test_an_upstream_without_a_list_is_not_asked_again_at_once() -> None:
    """E3"""
    upstream, clock = _Upstream(), SettableClock()
    upstream.answers.set()
    upstream.reply = Fault(kind=FaultKind.REFUSED, detail="")
    models = _upstream_models(upstream, clock)
    for _ in range(3):
        with pytest.raises(BadGateway):
            await models.read()
    assert upstream.asked == 1
    upstream.reply = Answer(status=404, body=b"")
    clock.advance(1)
    assert await models.read() == []


@pytest.mark.anyio
async def test_a_list_that_does_not_come_is_waited_for_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    """E3: whatever the timeout of calls is."""
    monkeypatch.setattr(api_models, "_TIMEOUT_SECONDS", 0.01)
    with pytest.raises(GatewayTimeout):
        await _upstream_models(_Upstream(), SettableClock()).read()


def test_without_an_upstream_the_list_is_empty(shared: Callable[..., Api]) -> None:
    """E3"""
    assert shared(mocked=False).call("GET", "/v1/models").json == {"object": "list", "data": []}
