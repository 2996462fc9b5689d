"""The worker claims what its upstreams want and keeps what it holds, through outages (C12, D4, D5, F5)."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.records import Batch
from batchline.domain.replies import Answer, Reply
from batchline.ports import Upstream
from batchline.upstream.mock.script import Plan
from tests.support.engine_harness import CHAT, Bench

LEASE = 30

METERED: dict[str, Any] = {"metering": True, "models": {"m": {"input_price": "2", "output_price": "2"}}}
"""A line costs as many nano-units as its tokens, times a thousand: half of 2 units for a million."""

TWO_UPSTREAMS: dict[str, Any] = {
    "upstreams": {"second": {"url": "http://second/v1"}},
    "models": {"m": {}, "n": {"upstream": "second", "name": "org/n-7b"}},
}


async def _come_back(bench: Bench, *, first: str) -> None:
    """Let one kind of call succeed well before the others, after more than a lease."""
    await asyncio.sleep(LEASE + 5)
    del bench.store.trouble[first]


FIRST_CALLS = [
    *((64, first) for first in ("rescue", "claim", "renew_shards", "record")),
    (640, "record"),
    *(pytest.param(640, first, marks=pytest.mark.proof) for first in ("rescue", "claim", "renew_shards")),
]
"""The number of lines, and the call that succeeds first after an outage."""


@pytest.mark.parametrize(("lines", "first"), FIRST_CALLS)
def test_a_store_outage_longer_than_a_lease_loses_nothing(tmp_path: Path, lines: int, first: str) -> None:
    """C12, D5: a lease lasts as long as its process lives.

    What was in flight is recorded when the store is available again, nothing runs twice, no line gets a strike, and the
    worker goes on, whichever call succeeds first.
    """
    with closing(Bench(tmp_path, latency=0.5)) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(lines))
            await asyncio.sleep(0.2)
            bench.take_store_away(2 * LEASE)
            await _come_back(bench, first=first)
            assert await bench.failures(await bench.ended(batch)) == {}

        bench.play(scene(), seconds=100)
        assert bench.attempts("line") == lines


@pytest.mark.parametrize(("lines", "first"), FIRST_CALLS)
def test_a_worker_whose_leases_were_taken_does_not_stand_still(tmp_path: Path, lines: int, first: str) -> None:
    """C12, D5: another process may have taken over its shards.

    What it held under the old leases no longer counts, what it gets under new ones counts once, and it finds that out
    whichever call succeeds first.
    """
    with closing(Bench(tmp_path, latency=0.5)) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(lines))
            await asyncio.sleep(0.2)
            bench.take_store_away(2 * LEASE)
            assert await bench.rows.rescue(live_owners=lambda: ["another"]) > 0
            await _come_back(bench, first=first)
            assert await bench.failures(await bench.ended(batch)) == {}

        bench.play(scene(), seconds=100)


@pytest.mark.parametrize("line", ["quick", "slow [[delay=20]]", "slower [[delay=100]]"])
def test_a_stop_while_the_store_is_away_ends(tmp_path: Path, line: str) -> None:
    """D5, F5: even with answers that cannot be recorded. The next process runs their lines again."""
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> Batch:
            batch = await bench.batch(f"{line} {n}" for n in range(64))
            bench.take_store_away(10_000)
            await asyncio.sleep(5)
            since = bench.time.now
            await bench.stopped()
            assert bench.time.now - since < 70, "the grace for lines in flight, and as much for the recorder"
            return batch

        batch = bench.play(scene())
        bench.kill()
        bench.start()

        async def next_life() -> None:
            assert await bench.failures(await bench.ended(batch)) == {}

        bench.play(next_life())


def test_a_shard_that_ends_while_leases_are_renewed_is_not_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """D5: the log says that leases were lost only if another worker took them."""
    with closing(Bench(tmp_path, latency=0.01, lease_seconds=1, max_concurrency=8)) as bench:

        async def slowly(*_: object, **__: object) -> None:
            await asyncio.sleep(0.2)

        bench.store.trouble["renew_shards"] = slowly

        async def scene() -> None:
            await bench.ended(await bench.batch(f"line {n}" for n in range(1500)))

        bench.play(scene())
    assert "leases lost" not in caplog.text


@pytest.mark.rule("D4", "A balance is read again at least every 2 s.")
def test_what_another_process_spends_is_noticed_while_the_batch_runs(tmp_path: Path) -> None:
    """D4: a line is checked against a balance at most 2 s old, though nothing of its own was recorded since."""
    with closing(Bench(tmp_path, plan=Plan(delay=10), max_concurrency=1, **METERED)) as bench:

        async def scene() -> None:
            await bench.fund(10**9)
            batch = await bench.batch(f"good {n}" for n in range(30))
            await asyncio.sleep(5)
            await bench.fund(0)
            ended = await bench.ended(batch)
            assert (ended.completed, ended.failed) == (1, 29)

        bench.play(scene())


def test_money_that_comes_in_is_noticed_while_the_batch_runs(tmp_path: Path) -> None:
    """F3: a balance set on a running system takes effect."""
    with closing(Bench(tmp_path, plan=Plan(delay=1), max_concurrency=1, **METERED)) as bench:

        async def scene() -> None:
            await bench.fund(40_000)
            batch = await bench.batch(f"good {n}" for n in range(30))
            await bench.until(batch, lambda seen: seen.completed > 0)
            await bench.fund(10**9)
            assert (await bench.ended(batch)).completed == 30

        bench.play(scene())


@pytest.mark.rule("D3", "An upstream that is gone keeps only its own models' lines waiting.")
def test_an_upstream_that_is_away_keeps_no_other_models_lines_waiting(tmp_path: Path) -> None:
    """Each upstream has its own slots, pause and quarantine, and lines are claimed for those that want them."""
    with closing(Bench(tmp_path, max_concurrency=8, **TWO_UPSTREAMS)) as bench:
        bench.machine.down_until = 200

        async def scene() -> None:
            stuck = await bench.batch((f"stuck {n}" for n in range(600)), model="m")
            await asyncio.sleep(30)
            free = await bench.batch((f"free {n}" for n in range(200)), model="n")
            assert (await bench.ended(free)).completed == 200
            assert bench.time.now < 60
            assert (await bench.ended(stuck)).completed == 600

        bench.play(scene())


@pytest.mark.parametrize("settings", [{}, TWO_UPSTREAMS], ids=["any model", "named models"])
def test_each_line_of_a_file_of_many_models_is_run_by_its_own_model(tmp_path: Path, settings: dict[str, Any]) -> None:
    """D6: models beyond the first 64 share shards, which decides neither the upstream of a line nor its outcome."""
    with closing(Bench(tmp_path, max_concurrency=8, **settings)) as bench:

        async def scene() -> None:
            names = [*(f"model {n}" for n in range(200)), "n"]
            batch = await bench.batch_of(
                {"model": name, "messages": [{"role": "user", "content": f"hi {name}"}]} for name in names
            )
            ended = await bench.ended(batch)
            assert ended.completed == (1 if settings else len(names))
            failures = await bench.failures(ended)
            assert len(failures) == ended.total - ended.completed
            assert all("does not exist" in text for text in failures.values())

        bench.play(scene())


class _OneModelGone:
    """Answers everything but the model "gone", with a status that says so."""

    def __init__(self, inner: Upstream, *, status: int) -> None:
        self._inner, self._status = inner, status

    async def post(self, path: str, body: bytes) -> Reply:
        if b'"gone"' not in body:
            return await self._inner.post(path, body)
        await asyncio.sleep(0.01)
        return Answer(status=self._status, body=b'{"error":{"message":"not now"}}')


@pytest.mark.rule("D9", "Lines of a model that is refused are held in the store, and those of others are claimed.")
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("settings", [{}, {"models": {"gone": {}, "there": {}}}], ids=["any model", "named models"])
def test_a_model_that_is_unavailable_keeps_no_other_model_of_its_upstream_waiting(
    tmp_path: Path, status: int, settings: dict[str, Any]
) -> None:
    """D3, D9: also of the same project, and whether models are configured or not."""

    def upstream(inner: Upstream, _: object) -> _OneModelGone:
        return _OneModelGone(inner, status=status)

    with closing(Bench(tmp_path, upstream=upstream, max_concurrency=8, **settings)) as bench:

        async def scene() -> None:
            gone = await bench.batch((f"gone {n}" for n in range(600)), model="gone")
            await asyncio.sleep(30)
            began = bench.time.now
            there = await bench.batch((f"there {n}" for n in range(200)), model="there")
            assert (await bench.ended(there)).completed == 200
            assert bench.time.now - began < 10
            assert (await bench.seen(gone.id)).failed == 0

        bench.play(scene())


@pytest.mark.rule("D3", "An answer to a synchronous call ends a pause too.")
def test_an_answer_to_a_synchronous_call_lets_the_lines_of_a_paused_upstream_start(tmp_path: Path) -> None:
    """D3: the next probe may be 15 seconds away."""
    with closing(Bench(tmp_path, max_concurrency=8)) as bench:
        bench.machine.script.follow(Plan(status={503: 100}))

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(20))
            await asyncio.sleep(120)
            bench.machine.script.follow(Plan())
            before = bench.attempts("line")
            inference = bench.engine.api_role.services.inference
            body = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
            await inference.answer(inference.prepare(await bench.owner("alpha"), CHAT, body))
            await asyncio.sleep(0.01)
            assert bench.attempts("line") > before
            assert await bench.failures(await bench.ended(batch)) == {}

        bench.play(scene())


@pytest.mark.rule("A8", "A busy upstream does not tell strangers of its models.")
def test_a_busy_upstream_does_not_tell_strangers_of_its_models(tmp_path: Path) -> None:
    """D6, A8: a line for a model of other projects fails as soon as one for a model that does not exist."""
    private = {"upstream": "second", "projects": ["22222222-2222-4222-8222-222222222222"]}
    settings = TWO_UPSTREAMS | {"models": {"m": {}, "n": private}}
    with closing(Bench(tmp_path, max_concurrency=2, latency=100, **settings)) as bench:

        async def scene() -> None:
            await bench.batch((f"theirs {n}" for n in range(50)), project="beta", model="n")
            await asyncio.sleep(10)
            refused = await bench.ended(await bench.batch(["mine"], project="alpha", model="n"))
            assert (refused.failed, bench.time.now < 20) == (1, True)

        bench.play(scene())


@pytest.mark.rule(
    "F2", "A worker that has lost its share of a cap leaves the lines that it has not started to the others."
)
def test_a_worker_without_a_share_keeps_no_lines_from_the_others(tmp_path: Path) -> None:
    """A cap may be smaller than the number of workers, and a worker that joins may get the share of one that has lines.
    What is in flight is recorded first."""
    with closing(Bench(tmp_path, latency=0.5, max_concurrency=2)) as bench:
        worker = bench.engine.worker_role.worker

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(20))
            await asyncio.sleep(0.2)
            worker.set_cap("default", 0)
            await asyncio.sleep(5)
            claimed = await bench.rows.claim(owner="another", lease=LEASE, lines=20, bytes=1 << 20, alone=True, at=0)
            assert sum(shard.lines for shard in claimed.shards) == 20
            assert (await bench.seen(batch.id)).completed == 2
            await bench.rows.release(
                batch.id, owner="another", shards=[(each.n, each.epoch) for each in claimed.shards]
            )
            worker.set_cap("default", 2)
            assert await bench.failures(await bench.ended(batch)) == {}

        bench.play(scene(), seconds=100)
        assert bench.attempts("line") == 20


def test_lines_of_one_project_that_fill_the_space_keep_no_other_project_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D8: one claim may take lines for all of the space, and these may hang."""
    monkeypatch.setattr("batchline.loops.worker._MAX_HELD_BYTES", 64 * 1024)
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            await bench.batch(f"good {n} [[delay=500]] {'x' * 2048}" for n in range(80))
            await asyncio.sleep(5)
            began = bench.time.now
            assert (await bench.ended(await bench.batch(["good"], project="beta"))).completed == 1
            assert bench.time.now - began < 5

        bench.play(scene())
