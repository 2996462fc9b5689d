"""The sweep of objects that no row needs (B8, D5: what a crash left goes, and nothing else)."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.records import Batch
from batchline.loops.sweep import Sweep, find_unneeded
from batchline.telemetry.metrics import Metrics
from tests.simulation.virtual import VirtualClock
from tests.support.engine_harness import Bench, Port
from tests.support.identities import identity_of

_HOUR = 3600.0
_LONG = 1e6
_FOLDERS = ("uploads", "segments", "work", "results")


@pytest.mark.rule("B8", "What a running batch has written and not published yet is not swept.")
def test_only_what_nobody_can_ever_need_is_swept(tmp_path: Path) -> None:
    """B8: uploads and results without a row, and the work of batches that are over; not what a running batch has."""
    with closing(_bench(tmp_path, latency=1e6, request_timeout_seconds=1e6)) as bench:

        async def scene() -> None:
            running = await bench.batch(["slow"])
            await asyncio.sleep(1)
            before = await _everything(bench)
            await _put_late(bench, running.id, "batch_of_nobody")
            await bench.objects.put("uploads/file-of-nobody", b"")
            await _sweep(bench)
            bench.skip(_HOUR)
            await _sweep(bench)
            mine = {f"{folder}/{running.id}/late" for folder in ("segments", "work", "results")}
            assert await _everything(bench) == before | mine

        bench.play(scene(), seconds=_LONG)


@pytest.mark.rule("B8", "An object whose row says that it is not needed is swept at once.")
def test_what_a_row_says_is_over_goes_at_once(tmp_path: Path) -> None:
    """B8: late writes of an ended batch, and the object of a deleted file that could not be deleted at once."""
    with closing(_bench(tmp_path, work_retention_seconds=0)) as bench:

        async def scene() -> None:
            ended = await _pruned(bench)
            before = await _everything(bench)
            await bench.rows.delete_file(ended.project_id, ended.input_file_id, at=0)
            await _put_late(bench, ended.id)
            await _sweep(bench)
            assert await _everything(bench) == before - {f"uploads/{ended.input_file_id}"}

        bench.play(scene())


def test_the_work_of_an_ended_batch_is_not_swept_while_it_is_kept(tmp_path: Path) -> None:
    with closing(_bench(tmp_path)) as bench:

        async def scene() -> None:
            ended = await bench.ended(await bench.batch(["good"]))
            await _put_late(bench, ended.id)
            before = await _everything(bench)
            await _sweep(bench)
            assert before - await _everything(bench) == {f"results/{ended.id}/late"}

        bench.play(scene())


@pytest.mark.rule("B8", "An object without a row is swept only after two sightings, an hour apart.")
def test_an_object_without_a_row_is_seen_twice_before_it_goes(tmp_path: Path) -> None:
    """A restart in between changes nothing: the sightings are in the database."""
    with closing(_bench(tmp_path)) as bench:

        async def begin() -> None:
            await asyncio.sleep(1)
            await bench.objects.put("uploads/file-of-nobody", b"")

        bench.play(begin())

        async def sweep_after(seconds: float) -> set[str]:
            bench.skip(seconds)
            await _sweep(bench)
            return await _everything(bench)

        for seconds in (0.0, 10.0, _HOUR / 2):
            assert bench.play(sweep_after(seconds), seconds=_LONG) == {"uploads/file-of-nobody"}
        bench.kill()
        bench.start()
        assert bench.play(sweep_after(_HOUR / 2), seconds=_LONG) == set()


@pytest.mark.rule("B8", "If many objects have no row, none of them is swept.")
def test_many_objects_without_a_row_are_held_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is more likely that the database is an old copy. A flag of the operator lets them go."""
    caplog.set_level(logging.INFO, "batchline.loops.sweep")
    with closing(_bench(tmp_path)) as bench:
        metrics = Metrics()

        async def scene() -> None:
            await asyncio.sleep(1)
            for n in range(11):
                await bench.objects.put(f"uploads/file-of-nobody-{n}", b"")
            await _sweep(bench)
            bench.skip(_HOUR)
            await _sweep(bench, metrics=metrics)
            assert len(await _everything(bench)) == 11
            assert metrics.registry.get_sample_value("batchline_sweep_held_back") == 11
            last = caplog.records[-1]
            assert "BATCHLINE_SWEEP_MAX_PERCENT=100" in last.getMessage()
            assert (last.__dict__["seen"], last.__dict__["held_back"], last.__dict__["deleted"]) == (11, 11, 0)
            await _sweep(bench, max_percent=100, metrics=metrics)
            assert await _everything(bench) == set()
            assert metrics.registry.get_sample_value("batchline_sweep_held_back") == 0
            assert metrics.registry.get_sample_value("batchline_sweep_deleted_total") == 11

        bench.play(scene(), seconds=_LONG)


def test_a_small_share_of_many_objects_goes(tmp_path: Path) -> None:
    """Eleven objects without a row are few among hundreds, and one is too many if none is allowed."""
    with closing(_bench(tmp_path, latency=1e6, request_timeout_seconds=1e6)) as bench:

        async def scene() -> None:
            running = await bench.batch(["slow"])
            await asyncio.sleep(1)
            for n in range(230):
                await bench.objects.put(f"results/{running.id}/{n}", b"")
            for n in range(11):
                await bench.objects.put(f"uploads/file-of-nobody-{n}", b"")
            before = await _everything(bench)
            await _sweep(bench)
            bench.skip(_HOUR)
            await _sweep(bench, max_percent=0)
            assert await _everything(bench) == before
            await _sweep(bench)
            assert len(before - await _everything(bench)) == 11

        bench.play(scene(), seconds=_LONG)


@pytest.mark.rule("B8", "A sweep deletes nothing while the objects are those of another database.")
def test_objects_of_another_database_are_not_swept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The folder is exchanged under a running service, also between two looks of one sweep."""
    with closing(_bench(tmp_path)) as bench:

        async def scene() -> None:
            await asyncio.sleep(1)
            for n in range(3):
                await bench.objects.put(f"uploads/file-of-nobody-{n}", b"")
            await _sweep(bench)
            bench.skip(_HOUR)
            sweeping = asyncio.ensure_future(_sweep(bench))
            await asyncio.sleep(0.5)
            await bench.objects.delete_all("identity")
            await sweeping
            assert len(await _everything(bench)) == 3

        bench.play(scene(), seconds=_LONG)
    assert "sweep stopped" in caplog.text


@pytest.mark.rule("B8", "Results that are published while the sweep looks at them are not swept.")
def test_results_that_are_published_between_two_looks_are_kept(tmp_path: Path) -> None:
    """B8: the sweep asks first which batches run and then which objects belong to files. In the other order, a batch
    that is published in between neither runs nor has files."""
    with closing(_bench(tmp_path)) as bench:
        may_publish = asyncio.Event()
        looks: list[str] = []
        batches: list[Batch] = []

        async def wait(*_: Any, **__: Any) -> None:
            await may_publish.wait()

        async def publish_at_second_look(keys: Sequence[str]) -> None:
            looks.extend(keys)
            if len(looks) > 1 and not may_publish.is_set():
                may_publish.set()
                await bench.ended(batches[0])

        bench.store.trouble["publish"] = wait

        async def scene() -> None:
            batches.append(await bench.batch(["good"]))
            await asyncio.sleep(10)
            looking = Port(bench.rows)
            looking.trouble |= dict.fromkeys(("known_batches", "referenced_keys"), publish_at_second_look)
            (key,) = [key for key in await _everything(bench) if key.startswith("results/")]
            unneeded = await find_unneeded(looking, [key])
            assert (len(looks), unneeded.removed, unneeded.unknown) == (2, [], [])

        bench.play(scene())


def test_a_sweep_keeps_what_was_published_and_rests_between_looks(tmp_path: Path) -> None:
    """However many results there are: each look takes a moment, and leaves one to others."""
    with closing(_bench(tmp_path, work_retention_seconds=0)) as bench:

        async def scene() -> float:
            last = [await _pruned(bench) for _ in range(3)][-1]
            before, since = await _everything(bench), bench.time.now
            for n in range(500):
                await bench.objects.put(f"results/{last.id}/{n}", b"")
            await _sweep(bench)
            assert await _everything(bench) == before
            return bench.time.now - since

        assert bench.play(scene()) >= 3 * 1.0


def _bench(folder: Path, **settings: Any) -> Bench:
    """Start an engine whose own sweep removes no object without a row."""
    return Bench(folder, **{"sweep_max_percent": 0} | settings)


async def _pruned(bench: Bench) -> Batch:
    """Run a batch and wait until its work was deleted."""
    batch = await bench.ended(await bench.batch(["good"]))
    await asyncio.sleep(30)
    return batch


async def _put_late(bench: Bench, *batch_ids: str) -> None:
    for batch_id in batch_ids:
        for folder in ("segments", "work", "results"):
            await bench.objects.put(f"{folder}/{batch_id}/late", b"")


async def _sweep(bench: Bench, *, max_percent: int = 5, metrics: Metrics | None = None) -> None:
    sweep = Sweep(
        store=bench.rows,
        objects=bench.objects,
        identity=identity_of(bench.rows, bench.objects),
        clock=VirtualClock(bench.time),
        metrics=metrics or Metrics(),
        max_percent=max_percent,
    )
    await sweep.step()


async def _everything(bench: Bench) -> set[str]:
    pages = [page for folder in _FOLDERS async for page in bench.objects.keys(folder)]
    return {key for page in pages for key in page}
