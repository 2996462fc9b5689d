"""The engine when its store or its folder fails, or what it needs is gone: SPEC C11, C12, D5, F5."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.errors import ObjectMissing, ObjectsDown, StoreDown
from batchline.domain.lines import decode_lines
from batchline.domain.records import Batch, Segment
from batchline.domain.states import BatchStatus
from engine_bench import Bench

LEASE = 30
MiB = 1024 * 1024


@pytest.mark.parametrize("begin", [0.2, 1.2, 2.5, 9.9])
def test_a_store_outage_longer_than_a_lease_loses_nothing(tmp_path: Path, begin: float) -> None:
    """C12, D5: leases live with their process. What was in flight is recorded when the store is back, nothing is run
    twice, no line is struck, and the worker goes on at once."""
    with closing(Bench(tmp_path, latency=0.5)) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(3000))
            await asyncio.sleep(begin)
            bench.take_store_away(2 * LEASE)
            await asyncio.sleep(2 * LEASE)
            assert await bench.failures(await bench.ended(batch)) == {}

        bench.play(scene(), seconds=120)
        assert bench.attempts("line") == 3000


@pytest.mark.parametrize("begin", [0.2, 1.2, 2.5, 9.9])
def test_a_worker_whose_leases_were_taken_meanwhile_does_not_stand_still(tmp_path: Path, begin: float) -> None:
    """C12, D5: it may have stood still for so long that another took it for dead. What it held under the old leases
    is over, what it gets under new ones counts, once."""
    with closing(Bench(tmp_path, latency=0.5)) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(3000))
            await asyncio.sleep(begin)
            bench.take_store_away(LEASE)
            await asyncio.sleep(LEASE - 1)
            assert await bench.rows.rescue(owner="another") > 0
            assert await bench.failures(await bench.ended(batch)) == {}

        bench.play(scene(), seconds=120)


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
                await bench.engine.cancellation.cancel(lost.project_id, lost.id)
                await asyncio.sleep(2)
            other = await bench.batch((f"good {n}" for n in range(20)), project="beta")
            assert await bench.failures(await bench.ended(other)) == {}

        bench.play(scene(), seconds=30)
        assert bench.attempts("damaged") == 0
