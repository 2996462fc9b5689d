"""The sweep of objects that no row stands for (B8, D5: what a crash left goes, and nothing else)."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from batchline.loops.prune import Prune
from tests.simulation.virtual import VirtualClock
from tests.support.engine_harness import Bench


@pytest.mark.rule("B8", "What a running batch has written and not published yet is not swept.")
def test_only_what_nobody_can_ever_need_is_swept(tmp_path: Path) -> None:
    """B8: uploads and results without a row, and the work of batches that are over; not what a running batch has."""
    with closing(Bench(tmp_path, latency=1000.0)) as bench:

        async def scene() -> None:
            running = await bench.batch(["slow"])
            await asyncio.sleep(1)
            before = await _everything(bench)
            for batch_id in (running.id, "batch_of_nobody"):
                for folder in ("segments", "work", "results"):
                    await bench.objects.put(f"{folder}/{batch_id}/late", b"")
            await bench.objects.put("uploads/file-of-nobody", b"")
            await _sweep(bench)
            mine = {f"{folder}/{running.id}/late" for folder in ("segments", "work", "results")}
            assert await _everything(bench) == before | mine

        bench.play(scene())


def test_a_sweep_keeps_what_was_published_and_rests_between_looks(tmp_path: Path) -> None:
    """However many results there are: each look takes a moment, and leaves one to others."""
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> float:
            for _ in range(3):
                await bench.ended(await bench.batch(["good"]))
            await asyncio.sleep(100)
            before, since = await _everything(bench), bench.time.now
            for n in range(500):
                await bench.objects.put(f"results/batch_of_nobody/{n}", b"")
            await _sweep(bench)
            assert await _everything(bench) == before
            return bench.time.now - since

        assert bench.play(scene()) >= 3 * 1.0


async def _sweep(bench: Bench) -> None:
    await Prune(store=bench.rows, objects=bench.objects, clock=VirtualClock(bench.time), owner="o").sweep()


async def _everything(bench: Bench) -> set[str]:
    folders = ("uploads", "segments", "work", "results")
    pages = [page for folder in folders async for page in bench.objects.keys(folder)]
    return {key for page in pages for key in page}
