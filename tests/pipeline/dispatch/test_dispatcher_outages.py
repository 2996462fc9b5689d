"""The engine when its store or its folder fails, or what it needs is gone: SPEC C11, C12, D5, F5."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.errors import ObjectsDown, StoreDown
from batchline.domain.lines import decode_lines
from batchline.domain.records import Batch, Segment
from batchline.domain.states import BatchStatus
from tests.support.engine_harness import Bench

LEASE = 30
MiB = 1024 * 1024


async def _come_back(bench: Bench, *, first: str) -> None:
    """After more than a lease, one kind of call comes through well before the others."""
    await asyncio.sleep(LEASE + 5)
    del bench.store.trouble[first]


@pytest.mark.parametrize("first", ["rescue", "claim", "renew_shards", "record"])
@pytest.mark.parametrize("lines", [64, 640])
def test_a_store_outage_longer_than_a_lease_loses_nothing(tmp_path: Path, lines: int, first: str) -> None:
    """C12, D5: leases live with their process. What was in flight is recorded when the store is back, nothing is run
    twice, no line is struck, and the worker goes on, whatever comes through first."""
    with closing(Bench(tmp_path, latency=0.5)) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(lines))
            await asyncio.sleep(0.2)
            bench.take_store_away(2 * LEASE)
            await _come_back(bench, first=first)
            assert await bench.failures(await bench.ended(batch)) == {}

        bench.play(scene(), seconds=100)
        assert bench.attempts("line") == lines


@pytest.mark.parametrize("first", ["rescue", "claim", "renew_shards", "record"])
@pytest.mark.parametrize("lines", [64, 640])
def test_a_worker_whose_leases_were_taken_does_not_stand_still(tmp_path: Path, lines: int, first: str) -> None:
    """C12, D5: it may have been away for so long that another took it for dead. What it held under the old leases is
    over, what it gets under new ones counts, once, and it finds that out however it hears of it."""
    with closing(Bench(tmp_path, latency=0.5)) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(lines))
            await asyncio.sleep(0.2)
            bench.take_store_away(2 * LEASE)
            assert await bench.rows.rescue(live_owners=lambda: ["another"]) > 0
            await _come_back(bench, first=first)
            assert await bench.failures(await bench.ended(batch)) == {}

        bench.play(scene(), seconds=100)


def _fails_once(error: Exception, *, at_call: int = 1) -> Callable[..., Awaitable[None]]:
    calls = 0

    async def trouble(*_: Any, **__: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at_call:
            raise error

    return trouble


@pytest.mark.parametrize("at_call", [1, 2, 8])
def test_lines_that_cannot_be_read_nor_handed_back_hold_up_no_others(tmp_path: Path, at_call: int) -> None:
    """D5: what the same claim has already read runs, and the stray lease is found; nobody waits for a death."""
    with closing(Bench(tmp_path)) as bench:
        bench.objects.trouble["read"] = _fails_once(ObjectsDown("EIO"), at_call=at_call)
        bench.store.trouble["release"] = _fails_once(StoreDown("EIO"))

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(64))
            assert await bench.failures(await bench.ended(batch)) == {}

        bench.play(scene(), seconds=60)
        assert bench.attempts("line") == 64


def _work_file(bench: Bench, batch_id: str) -> Path:
    return bench.folder / "objects" / "work" / batch_id / "1"


async def _batch_with_damage(bench: Bench, damage: Callable[[Path], object], *, lines: int) -> Batch:
    """A batch whose work file is damaged between its creation and its first claim."""

    async def strike(batch_id: str, **_: Any) -> None:
        damage(_work_file(bench, batch_id))

    bench.store.trouble["start_batch"] = strike
    try:
        return await bench.batch(f"damaged {n}" for n in range(lines))
    finally:
        del bench.store.trouble["start_batch"]


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_batch_whose_work_file_is_gone_does_not_hold_up_another(tmp_path: Path, cancelled: bool) -> None:
    """D5: its lines come first and cannot be run, nor its end be written; the next batch is claimed and finished."""
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            lost = await _batch_with_damage(bench, Path.unlink, lines=1000)
            await asyncio.sleep(2)
            if cancelled:
                await bench.engine.api_role.services.cancellation.cancel(lost.project_id, lost.id)
                await asyncio.sleep(2)
            other = await bench.batch((f"good {n}" for n in range(20)), project="beta")
            assert await bench.failures(await bench.ended(other)) == {}

        bench.play(scene(), seconds=30)
        assert bench.attempts("damaged") == 0


def test_a_lost_line_that_would_run_alone_does_not_hold_up_another(tmp_path: Path) -> None:
    """D5: two workers died on it and its work file is gone; whoever holds it has nothing to keep others away from."""
    with closing(Bench(tmp_path, latency=5)) as bench:

        async def until_in_flight() -> Batch:
            batch = await bench.batch(["struck"])
            await asyncio.sleep(1)
            return batch

        struck = bench.play(until_in_flight())
        for _ in range(2):
            bench.play(asyncio.sleep(2))
            bench.kill()
            bench.start()
        _work_file(bench, struck.id).unlink()

        async def scene() -> None:
            other = await bench.batch(["good"], project="beta")
            assert await bench.failures(await bench.ended(other)) == {}

        bench.play(scene(), seconds=30)
        assert bench.attempts("struck") == 2


@pytest.mark.parametrize("left", [0, 5, 14, 60])
def test_a_work_file_that_is_cut_off_sends_no_half_line(tmp_path: Path, left: int) -> None:
    """C5, D5: neither where a body ends too early, nor a name, nor the numbers before them. The lines that are whole
    run, the process lives, and so does another's batch."""

    def cut_off(work: Path) -> None:
        data = work.read_bytes()
        *_, last = decode_lines(data)
        size = 12 + len(last.custom_id) + len(last.body)
        work.write_bytes(data[: len(data) - size + left])

    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            damaged = await _batch_with_damage(bench, cut_off, lines=20)
            other = await bench.batch((f"good {n}" for n in range(20)), project="beta")
            assert await bench.failures(await bench.ended(other)) == {}
            await asyncio.sleep(3)
            seen = await bench.seen(damaged.id)
            assert (seen.status, seen.failed) == (BatchStatus.IN_PROGRESS, 0)
            assert 0 < seen.completed == bench.attempts("damaged") < 20

        bench.play(scene(), seconds=60)
        assert all(json.loads(body) for body in bench.machine.starts)


def test_a_long_outage_of_the_disk_makes_no_giant_segment(tmp_path: Path) -> None:
    """C12: what was answered meanwhile is recorded in pieces of 8 MiB and a line, all of it, once."""
    answer, sizes = 300_000, []

    async def measure(_: str, *, segment: Segment, **__: Any) -> None:
        sizes.append(segment.output_bytes + segment.error_bytes)

    with closing(Bench(tmp_path, latency=0.5, max_concurrency=64)) as bench:
        bench.store.trouble["record"] = measure

        async def scene() -> None:
            batch = await bench.batch(f"line {n} [[huge={answer}]]" for n in range(100))
            bench.take_disk_away(40)
            assert await bench.failures(await bench.ended(batch)) == {}

        bench.play(scene(), seconds=120)
    assert max(sizes) < 8 * MiB + 2 * answer
    assert max(sizes) > 8 * MiB, "the outage made none that had to be cut"


@pytest.mark.parametrize("line", ["quick", "slow [[delay=20]]", "slower [[delay=100]]"])
def test_a_stop_while_the_store_is_away_ends(tmp_path: Path, line: str) -> None:
    """D5, F5: also with answers that cannot be recorded; they are asked for again by the next life, without a strike
    too many."""
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


@pytest.mark.rule("C11", "No attempt starts after a cancel that met a claim under way.")
@pytest.mark.parametrize("which", [0, 1])
def test_a_cancel_that_meets_a_claim_starts_nothing(tmp_path: Path, which: int) -> None:
    """C11: where the lines of a batch are leased and just being read, or about to be, no attempt starts any more."""
    with closing(Bench(tmp_path)) as bench:
        batches: list[Batch] = []
        both = asyncio.Event()

        async def wait_for_both(**_: Any) -> None:
            await both.wait()

        async def cancel_first(*_: Any) -> None:
            bench.objects.trouble.clear()
            await bench.engine.api_role.services.cancellation.cancel(batches[which].project_id, batches[which].id)

        async def scene() -> None:
            bench.store.trouble["claim"] = wait_for_both
            batches.extend([await bench.batch(f"batch-{b} {n}" for n in range(20)) for b in range(2)])
            bench.objects.trouble["read"] = cancel_first
            both.set()
            cancelled, other = await bench.ended(batches[which]), await bench.ended(batches[1 - which])
            assert (cancelled.status, cancelled.failed) == (BatchStatus.CANCELLED, 20)
            assert (other.status, other.completed) == (BatchStatus.COMPLETED, 20)

        bench.play(scene(), seconds=60)
        assert bench.attempts(f"batch-{which}") == 0


def test_a_shard_that_ends_while_leases_are_renewed_is_not_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """D5: whoever reads that leases lost looks for a process that took them."""
    with closing(Bench(tmp_path, latency=0.01, lease_seconds=1, max_concurrency=8)) as bench:

        async def slowly(*_: object, **__: object) -> None:
            await asyncio.sleep(0.2)

        bench.store.trouble["renew_shards"] = slowly

        async def scene() -> None:
            await bench.ended(await bench.batch(f"line {n}" for n in range(3000)))

        bench.play(scene())
    assert "leases lost" not in caplog.text
