"""The results of a batch as pages and as events: G2."""

import json
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Send

from batchline.api import results
from batchline.api.request_context import client_state_of
from batchline.domain.records import Batch
from batchline.upstream.mock.script import Plan
from tests.support.asgi import Call, Client
from tests.support.engine_harness import Bench

_MIXED = Plan(status={400: 30})
_EVENTS = {"accept": "text/event-stream"}


def _prompts(lines: int = 64) -> list[str]:
    return [f"good {n}" for n in range(lines)]


async def _page_through(client: Client, batch: Batch, *, query: str = "") -> list[Any]:
    """Return all items, page by page, and check the envelopes."""
    items: list[Any] = []
    after, more = "", True
    while more:
        page = (await client.get(f"/v1/batches/{batch.id}/results?{query}{after}")).json
        assert list(page) == ["object", "data", "last_id", "has_more"]
        assert page["object"] == "list"
        assert (page["last_id"] is None) is (page["data"] == [])
        items += page["data"]
        more = page["has_more"]
        if page["last_id"]:
            after = f"&after={page['last_id']}"
    return items


async def _files(bench: Bench, batch: Batch) -> list[Any]:
    files = [await bench.content(batch.project_id, id_) for id_ in (batch.output_file_id, batch.error_file_id)]
    return [json.loads(line) for line in b"".join(files).splitlines()]


def _sorted(items: list[Any]) -> list[Any]:
    return sorted(items, key=lambda item: str(item["custom_id"]))


@pytest.mark.rule("G2", "The envelope has object, data, last_id and has_more; each item is the line of its file.")
def test_pages_have_every_line_as_it_is_in_the_files(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, plan=_MIXED)) as bench:

        async def scene() -> None:
            client = Client(bench)
            ended = await bench.ended(await bench.batch(_prompts()))
            whole = (await client.get(f"/v1/batches/{ended.id}/results")).json
            assert len(whole["data"]) == 64
            assert whole["has_more"] is False
            for limit in (1, 10, 63, 64, 65, 99_999):
                assert await _page_through(client, ended, query=f"limit={limit}") == whole["data"]
            assert _sorted(whole["data"]) == _sorted(await _files(bench, ended))
            failed = await _page_through(client, ended, query="limit=3&status=failed")
            succeeded = await _page_through(client, ended, query="limit=3&status=succeeded")
            assert [len(succeeded), len(failed)] == [ended.completed, ended.failed]
            assert _sorted(failed + succeeded) == _sorted(whole["data"])

        bench.play(scene())


@pytest.mark.rule("G2", "has_more is true while the batch is not terminal, also if the page is empty.")
def test_a_running_batch_has_more(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, latency=5)) as bench:

        async def scene() -> None:
            client = Client(bench)
            batch = await bench.batch(_prompts(3))
            page = (await client.get(f"/v1/batches/{batch.id}/results")).json
            assert page == {"object": "list", "data": [], "last_id": None, "has_more": True}
            ended = await bench.ended(batch)
            page = (await client.get(f"/v1/batches/{batch.id}/results?limit=3")).json
            assert (len(page["data"]), page["has_more"]) == (ended.completed, False)
            after = (await client.get(f"/v1/batches/{batch.id}/results?after={page['last_id']}")).json
            assert after == {"object": "list", "data": [], "last_id": None, "has_more": False}

        bench.play(scene())


@pytest.mark.rule("G2", "A page is bounded in bytes; has_more tells that lines are left.")
def test_a_page_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchline.api.results._MAX_PAGE_BYTES", 1000)
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            client = Client(bench)
            ended = await bench.ended(await bench.batch(_prompts()))
            first = await client.get(f"/v1/batches/{ended.id}/results")
            assert 1 <= len(first.json["data"]) < 64
            assert first.json["has_more"] is True
            assert len(first.body) < 3000
            items = await _page_through(client, ended)
            assert _sorted(items) == _sorted(await _files(bench, ended))

        bench.play(scene())


@pytest.mark.rule("G2", "A limit that is no positive integer, a wrong status or a wrong cursor is 400.")
@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ("limit=0", "invalid_limit", "limit"),
        ("limit=x", "invalid_limit", "limit"),
        ("status=done", "invalid_request_error", "status"),
        ("after=", "invalid_request_error", "after"),
        ("after=batch_1", "invalid_request_error", "after"),
        ("after=r1-1", "invalid_request_error", "after"),
        ("after=r1-fffffffff", "invalid_request_error", "after"),
        (f"after=r{'f' * 99}-0", "invalid_request_error", "after"),
    ],
)
def test_what_is_wrong_with_a_page_is_named(tmp_path: Path, query: str, code: str, param: str) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            ended = await bench.ended(await bench.batch(_prompts(4)))
            reply = await Client(bench).get(f"/v1/batches/{ended.id}/results?{query}")
            assert (reply.status, reply.code, reply.json["error"]["param"]) == (400, code, param)

        bench.play(scene())


@pytest.mark.rule("G2", "Reading needs the scope read.")
def test_results_need_the_scope_read(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            ended = await bench.ended(await bench.batch(_prompts(4)))
            for scopes, status in (("read", 200), ("batch", 403)):
                client = Client(bench, key=f"bl-{scopes}", scopes=scopes)
                for route in ("results", "merged"):
                    assert (await client.get(f"/v1/batches/{ended.id}/{route}")).status == status

        bench.play(scene())


@pytest.mark.rule("G2", "Once a file that holds the lines was deleted or expired, the answer is 410.")
def test_results_of_a_deleted_file_are_gone(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            client = Client(bench)
            ended = await bench.ended(await bench.batch(_prompts(4)))
            await bench.rows.delete_file(ended.project_id, ended.output_file_id or "", at=0)
            for headers in ({}, _EVENTS):
                reply = await client.get(f"/v1/batches/{ended.id}/results", **headers)
                assert (reply.status, reply.code) == (410, "results_unavailable")

        bench.play(scene())


def _parsed(call: Call) -> list[dict[str, str]]:
    """Return the events that were sent so far; a comment is an event with nothing but a comment."""
    events = []
    for block in call.body.decode().split("\n\n")[:-1]:
        assert not block.startswith("\n")
        fields = [line.partition(":")[::2] for line in block.split("\n")]
        events.append({name or "comment": value.removeprefix(" ") for name, value in fields})
    return events


def _lines(events: list[dict[str, str]]) -> list[Any]:
    return [json.loads(event["data"]) for event in events if event.get("event") == "line"]


@pytest.mark.rule(
    "G2", "As events: every line with its cursor, the batch as it changes, and one end after the last line."
)
def test_a_stream_has_every_line_and_ends(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, plan=_MIXED, latency=0.7, max_concurrency=4)) as bench:

        async def scene() -> None:
            client = Client(bench)
            batch = await bench.batch(_prompts())
            started = bench.time.now
            call = await client.call("GET", f"/v1/batches/{batch.id}/results", headers=_EVENTS)
            await bench.until(batch, lambda seen: seen.completed + seen.failed >= 16)
            await bench.engine.api_role.services.clock.sleep(1)
            assert len(_lines(_parsed(call))) >= 16
            await call.end()
            assert call.complete
            assert call.headers["content-type"].startswith("text/event-stream")
            events = _parsed(call)
            ended = await bench.seen(batch.id)
            assert _sorted(_lines(events)) == _sorted(await _files(bench, ended))
            assert _lines(events) == await _page_through(client, batch)
            assert [event["event"] for event in events].count("end") == 1
            assert events[-1] == {"event": "end", "data": "{}"}
            batches = [json.loads(event["data"]) for event in events if event["event"] == "batch"]
            assert 3 <= len(batches) <= 2 + 2 * (bench.time.now - started)
            assert batches[-1] == (await client.get(f"/v1/batches/{batch.id}")).json

        bench.play(scene())


@pytest.mark.rule("G2", "The batch is sent at most twice a second, also when it ends.")
@pytest.mark.parametrize("latency", [0.1, 0.4, 0.7])
def test_a_stream_sends_the_batch_at_most_twice_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, latency: float
) -> None:
    with closing(Bench(tmp_path, plan=_MIXED, latency=latency, max_concurrency=16)) as bench:
        sent_at: list[float] = []

        async def read_slowly(*_: Any, **__: Any) -> None:
            await bench.engine.api_role.services.clock.sleep(0.2)

        async def note(send: Send, data: bytes) -> None:
            sent_at.extend([bench.time.now] * data.count(b"event: batch"))
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async def scene() -> None:
            monkeypatch.setattr(results, "_send_part", note)
            bench.store.trouble["results"] = read_slowly
            batch = await bench.batch(_prompts())
            call = await Client(bench).call("GET", f"/v1/batches/{batch.id}/results", headers=_EVENTS)
            await call.end()
            assert len(_lines(_parsed(call))) == 64
            assert len(sent_at) >= 2
            assert min(later - earlier for earlier, later in pairwise(sent_at)) >= 0.5 - 1e-6

        bench.play(scene())


@pytest.mark.rule("G2", "Last-Event-ID resumes a stream after that line, at any line, without one missing or twice.")
def test_a_stream_resumes_after_any_line(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, plan=_MIXED)) as bench:

        async def scene() -> None:
            client = Client(bench)
            ended = await bench.ended(await bench.batch(_prompts(20)))
            target = f"/v1/batches/{ended.id}/results"
            events = [event for event in _parsed(await client.get(target, **_EVENTS)) if event["event"] == "line"]
            assert len({event["id"] for event in events}) == 20
            for n, event in enumerate(events, 1):
                rest = await client.get(target, **_EVENTS, **{"last-event-id": event["id"]})
                assert _lines(_parsed(rest)) == _lines(events[n:])

        bench.play(scene())


@pytest.mark.rule("G2", "A stream sends a comment line every 15 s while there is nothing else to send.")
def test_a_quiet_stream_shows_that_it_lives(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, latency=100)) as bench:

        async def scene() -> None:
            batch = await bench.batch(_prompts(2))
            began = bench.time.now
            call = await Client(bench).call("GET", f"/v1/batches/{batch.id}/results", headers=_EVENTS)
            await call.end()
            comments = [event for event in _parsed(call) if "comment" in event]
            assert len(comments) == pytest.approx((bench.time.now - began) / 15, abs=1)

        bench.play(scene())


@pytest.mark.rule("G2", "A stream that waits costs two light reads a second.")
def test_a_quiet_stream_reads_twice_a_second(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, latency=100)) as bench:
        reads: list[float] = []

        async def count(*_: Any, **__: Any) -> None:
            reads.append(bench.time.now)

        async def scene() -> None:
            batch = await bench.batch(_prompts(2))
            bench.store.trouble["results"] = count
            call = await Client(bench).call("GET", f"/v1/batches/{batch.id}/results", headers=_EVENTS)
            await bench.engine.api_role.services.clock.sleep(50)
            assert len(reads) <= 102
            await call.leave()
            left_at = len(reads)
            await bench.engine.api_role.services.clock.sleep(10)
            assert len(reads) <= left_at + 1

        bench.play(scene())


@pytest.mark.rule("G2", "A stream ends within 5 s of the end of its key.")
def test_a_stream_ends_with_its_key(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, latency=100)) as bench:

        async def scene() -> None:
            client = Client(bench)
            batch = await bench.batch(_prompts(2))
            call = await client.call("GET", f"/v1/batches/{batch.id}/results", headers=_EVENTS)
            await bench.engine.api_role.services.clock.sleep(7)
            assert call.status == 200
            assert not call.complete
            await bench.rows.revoke_key(client.key_id, at=1)
            revoked_at = bench.time.now
            await call.end()
            assert bench.time.now - revoked_at <= 5
            assert call.complete
            assert b"Invalid credentials" in call.body
            assert b"event: end" not in call.body

        bench.play(scene())


@pytest.mark.rule("G2", "A stream of a service that shuts down ends at once, without end, so that its client resumes.")
def test_a_stream_ends_when_the_service_shuts_down(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, latency=100)) as bench:

        async def scene() -> None:
            batch = await bench.batch(_prompts(2))
            call = await Client(bench).call("GET", f"/v1/batches/{batch.id}/results", headers=_EVENTS)
            await bench.engine.api_role.services.clock.sleep(2)
            client_state_of(call.scope).closing = True
            stopped_at = bench.time.now
            await call.end()
            assert bench.time.now - stopped_at <= 1
            assert b"event: end" not in call.body

        bench.play(scene())


def test_a_stream_outlives_an_outage_of_the_store(tmp_path: Path) -> None:
    """G2: lines that are recorded before and after an outage come once."""
    with closing(Bench(tmp_path, latency=1.1, max_concurrency=4)) as bench:

        async def scene() -> None:
            client = Client(bench)
            batch = await bench.batch(_prompts(24))
            call = await client.call("GET", f"/v1/batches/{batch.id}/results", headers=_EVENTS)
            await bench.until(batch, lambda seen: seen.completed >= 8)
            bench.take_store_away(10)
            bench.store.trouble["results"] = bench.store.trouble["claim"]
            await call.end()
            lines = _lines(_parsed(call))
            assert sorted(line["custom_id"] for line in lines) == sorted(f"line-{n}" for n in range(24))
            assert _parsed(call)[-1]["event"] == "end"

        bench.play(scene())


@pytest.mark.rule("A4", "A project that reads too many results at once is throttled; other projects are not.")
def test_reads_of_results_are_throttled_by_project(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, latency=100, max_project_requests=2)) as bench:

        async def scene() -> None:
            client = Client(bench)
            batch = await bench.batch(_prompts(2))
            target = f"/v1/batches/{batch.id}/results"
            streams = [await client.call("GET", target, headers=_EVENTS) for _ in range(2)]
            await bench.engine.api_role.services.clock.sleep(1)
            for path in (target, f"/v1/batches/{batch.id}/merged"):
                refused = await client.get(path)
                assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
            other = await bench.batch(_prompts(2), project="beta")
            beta = Client(bench, project="beta", key="bl-beta")
            assert (await beta.get(f"/v1/batches/{other.id}/results")).status == 200
            await streams[0].leave()
            assert (await client.get(target)).status == 200
            await streams[1].leave()

        bench.play(scene())
