"""One suite for the Upstream port: the HTTP client with the mock server, and the same script in this process."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.ports import Upstream
from batchline.system import SystemClock
from batchline.upstream.http import HttpUpstream
from batchline.upstream.mock.script import Plan, Script, ScriptedUpstream
from batchline.upstream.mock.server import serve_mock

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
LIMIT = 100_000


@asynccontextmanager
async def over_http(script: Script, *, timeout: float, crashes: list[str]) -> AsyncIterator[Upstream]:
    server = await serve_mock(host="127.0.0.1", port=0, script=script, on_crash=lambda: crashes.append("crash"))
    upstream = HttpUpstream(
        server.base_url,
        api_key="secret",
        connect_timeout=10,
        request_timeout=timeout,
        max_answer_bytes=LIMIT,
        clock=SystemClock(),
    )
    try:
        yield upstream
    finally:
        await upstream.close()
        await server.close()


@asynccontextmanager
async def in_process(script: Script, *, timeout: float, crashes: list[str]) -> AsyncIterator[Upstream]:
    yield ScriptedUpstream(
        script,
        clock=SystemClock(),
        request_timeout=timeout,
        max_answer_bytes=LIMIT,
        on_crash=lambda: crashes.append("crash"),
    )


Player = Callable[..., AbstractAsyncContextManager[Upstream]]
each_player = pytest.mark.parametrize("player", [over_http, in_process])


def chat(prompt: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}]}).encode()


async def play(
    player: Player,
    *bodies: bytes,
    path: str = CHAT,
    plan: Plan | None = None,
    timeout: float = 30,
) -> list[Reply]:
    """Post the bodies one after the other."""
    async with player(Script(plan, seed=7), timeout=timeout, crashes=[]) as upstream:
        return [await upstream.post(path, body) for body in bodies]


async def play_one(player: Player, prompt: str, *, timeout: float = 30) -> Reply:
    (reply,) = await play(player, chat(prompt), timeout=timeout)
    return reply


def answered(reply: Reply) -> Answer:
    assert isinstance(reply, Answer), reply
    return reply


def kind_of(reply: Reply) -> FaultKind | None:
    return reply.kind if isinstance(reply, Fault) else None


@each_player
async def test_a_plain_request_is_answered_whole(player: Player) -> None:
    """D1: status, body and the upstream's request id come back."""
    reply = answered(await play_one(player, "hello"))
    assert reply.status == 200
    assert json.loads(reply.body)["choices"][0]["message"]["content"] == "scripted answer to: hello"
    assert reply.request_id is not None
    assert reply.request_id.startswith("req_")
    assert reply.retry_after is None


@each_player
@pytest.mark.parametrize("status", [201, 204, 302, 400, 404, 408, 409, 413, 420, 422, 429, 500, 503])
async def test_any_status_is_an_answer(player: Player, status: int) -> None:
    """D2: the outcome of a status is decided by the domain; to the upstream every status is an answer."""
    assert answered(await play_one(player, f"[[status={status}]]")).status == status


@each_player
async def test_faults_end_after_the_tries_they_are_meant_for(player: Player) -> None:
    """D3: a test can have a line that fails twice and then succeeds."""
    replies = await play(player, *[chat("[[status=503 times=2]]")] * 3)
    assert [answered(reply).status for reply in replies] == [503, 503, 200]


@each_player
async def test_retry_after_is_read(player: Player) -> None:
    """D3: Retry-After arrives as seconds."""
    reply = answered(await play_one(player, "[[status=429]] [[retry-after=1.5]]"))
    assert (reply.status, reply.retry_after) == (429, 1.5)


@each_player
@pytest.mark.parametrize("directive", ["cut", "drop"])
async def test_a_connection_that_ends_early_is_broken(player: Player, directive: str) -> None:
    """D2: a broken connection is a fault and not an answer."""
    assert kind_of(await play_one(player, f"[[{directive}]]")) is FaultKind.BROKEN


@each_player
@pytest.mark.parametrize("directive", ["hang", "delay=60"])
async def test_an_answer_that_does_not_come_is_a_timeout(player: Player, directive: str) -> None:
    """D2: a request ends after the request timeout."""
    assert kind_of(await play_one(player, f"[[{directive}]]", timeout=0.05)) is FaultKind.TIMEOUT


@each_player
async def test_a_late_answer_is_still_an_answer(player: Player) -> None:
    assert answered(await play_one(player, "[[delay=0.01]]")).status == 200


@each_player
async def test_a_page_is_an_answer_as_it_came(player: Player) -> None:
    """D1: whether a 2xx has JSON is checked when it is recorded."""
    reply = answered(await play_one(player, "[[html]]"))
    assert reply.status == 200
    assert reply.body.startswith(b"<!DOCTYPE html>")


@each_player
async def test_redirects_are_not_followed(player: Player) -> None:
    """D1: a redirect is the answer itself."""
    assert answered(await play_one(player, "[[redirect]]")).status == 307


@each_player
async def test_an_answer_over_the_limit_is_garbled(player: Player) -> None:
    """D1: an answer over the configured size is an upstream fault; one of exactly that size is not."""
    largest, over = await play(player, chat(f"[[huge={LIMIT}]]"), chat(f"[[huge={LIMIT + 1}]]"))
    assert len(answered(largest).body) == LIMIT
    assert over == Fault(kind=FaultKind.GARBLED, detail=f"answer over {LIMIT} bytes", answer_bytes=LIMIT)


@each_player
async def test_a_crash_breaks_the_connection(player: Player) -> None:
    """D5: the upstream dies while it handles a line."""
    crashes: list[str] = []
    async with player(Script(), timeout=30, crashes=crashes) as upstream:
        reply = await upstream.post(CHAT, chat("[[crash]]"))
    assert kind_of(reply) is FaultKind.BROKEN
    assert crashes == ["crash"]


@each_player
async def test_posts_at_once_get_their_own_answers(player: Player) -> None:
    """C12: a line never gets another line's answer, in any order of the answers."""
    async with player(Script(), timeout=30, crashes=[]) as upstream:
        posts = (upstream.post(CHAT, chat(f"line {n} [[delay={(n % 5) / 1000}]]")) for n in range(100))
        replies = await asyncio.gather(*posts)
    for n, reply in enumerate(replies):
        assert f"line {n} " in json.loads(answered(reply).body)["choices"][0]["message"]["content"]


@each_player
async def test_a_cancelled_post_leaves_the_others_alone(player: Player) -> None:
    """C12: after a post was cancelled, the next one gets its own answer."""
    async with player(Script(), timeout=30, crashes=[]) as upstream:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await upstream.post(CHAT, chat("first [[delay=60]]"))
        reply = await upstream.post(CHAT, chat("second"))
    assert b"scripted answer to: second" in answered(reply).body


async def test_both_give_the_same_answers() -> None:
    """Over HTTP and in this process, a script with the same seed gives the same answers, byte for byte."""
    plan = Plan(status={429: 10, 503: 10}, cut=10, html=10, redirect=10, huge=10, huge_bytes=LIMIT + 1, retry_after=2)
    bodies = [chat(f"line {n}") for n in range(150)] * 2
    over_the_wire = await play(over_http, *bodies, plan=plan)
    assert over_the_wire == await play(in_process, *bodies, plan=plan)
    assert {kind_of(reply) for reply in over_the_wire} == {None, FaultKind.BROKEN, FaultKind.GARBLED}


@each_player
async def test_embeddings_are_answered(player: Player) -> None:
    """C14: an operator may allow other endpoints."""
    body = json.dumps({"model": "e", "input": ["a", "b"]}).encode()
    (reply,) = await play(player, body, path="/v1/embeddings")
    assert [item["index"] for item in json.loads(answered(reply).body)["data"]] == [0, 1]
