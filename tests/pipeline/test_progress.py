"""The progress of a batch while it runs (C8, C10, D2, D3)."""

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.errors import BatchNotFound
from batchline.domain.progress import Progress
from batchline.domain.records import Batch
from batchline.domain.states import BatchStatus
from tests.support.engine_harness import Bench

MODELS: dict[str, Any] = {
    "upstreams": {"gpu": {"url": "http://gpu/v1"}},
    "models": {"m": {}, "far": {"upstream": "gpu"}},
}


async def _progress(bench: Bench, batch: Batch) -> Progress:
    return await bench.engine.api_role.services.progress_reader.progress(batch.project_id, batch.id)


def _counted(progress: Progress) -> dict[str, int]:
    return {each.code: each.count for each in progress.errors}


def test_a_batch_of_nobody_is_not_found(tmp_path: Path) -> None:
    """A8, C8: nor is one of another project."""
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            batch = await bench.batch(["one"])
            other = await bench.owner("beta")
            for project_id, batch_id in ((other.project_id, batch.id), (batch.project_id, "batch_none")):
                with pytest.raises(BatchNotFound):
                    await bench.engine.api_role.services.progress_reader.progress(project_id, batch_id)

        bench.play(scene())


def test_lines_in_flight_are_those_of_the_batch(tmp_path: Path) -> None:
    """And none of them once it has ended."""
    with closing(Bench(tmp_path, latency=5, max_concurrency=16)) as bench:

        async def scene() -> None:
            batch, other = await bench.batch(["a", "b", "c"]), await bench.batch(["d"], project="beta")
            await asyncio.sleep(2)
            assert [(await _progress(bench, each)).activity.in_flight for each in (batch, other)] == [3, 1]
            await bench.ended(batch)
            assert (await _progress(bench, batch)).activity.in_flight == 0

        bench.play(scene())


def test_the_end_is_foretold_from_what_was_recorded(tmp_path: Path) -> None:
    """With four of a thousand lines done per second, the end is known to a few seconds after a minute.

    A batch that has ended has no rate, whether or not its work file was removed yet.
    """
    with closing(Bench(tmp_path, latency=1, max_concurrency=4)) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(1000))
            fresh = await _progress(bench, batch)
            assert (fresh.rate, fresh.eta) == (0.0, None)
            await asyncio.sleep(100)
            progress, now = await _progress(bench, batch), bench.time.now
            assert progress.eta is not None
            assert progress.rate == pytest.approx(4, rel=0.1)
            bench.store.trouble["delete_work"] = _never
            await bench.ended(batch)
            assert progress.eta.low - 5 <= bench.time.now - now <= progress.eta.high + 5
            ended = await _progress(bench, batch)
            assert (ended.rate, ended.eta, ended.batch.completed) == (0.0, None, 1000)

        bench.play(scene())


def test_errors_are_counted_by_code_with_the_first_of_each(tmp_path: Path) -> None:
    """C12, D2: those that the upstream refused, those that ran out of attempts, those that never ran."""
    prompts = ["[[status=400]] a", "good", "[[status=404]] b", "[[status=400]] c", "[[hang]] d"]
    with closing(Bench(tmp_path, max_concurrency=1, request_timeout_seconds=60)) as bench:

        async def scene() -> None:
            batch = await bench.batch([*prompts, "e", "f"])
            await bench.until(batch, lambda seen: seen.failed == 3)
            running = await _progress(bench, batch)
            assert _counted(running) == {"invalid_request_error": 2, "not_found_error": 1}
            assert json.loads(running.errors[0].sample)["custom_id"] == "line-0"
            await bench.engine.api_role.services.cancellation.cancel(batch.project_id, batch.id)
            ended = await bench.ended(batch)
            progress, records = await _progress(bench, batch), await bench.records(ended)
            assert _counted(progress)["batch_cancelled"] == 2
            assert sum(_counted(progress).values()) == ended.failed
            for each in progress.errors:
                sample = json.loads(each.sample)
                written = records[sample["custom_id"]]["error"]
                assert (each.code, sample["message"]) == (written["code"], written["message"])

        bench.play(scene())


def test_a_batch_waits_for_the_upstream_of_its_models_alone(tmp_path: Path) -> None:
    """D3: the progress has the reason of a pause and its beginning, until the upstream is available again."""
    with closing(Bench(tmp_path, **MODELS)) as bench:
        bench.machines["gpu"].down_until = 60

        async def scene() -> None:
            far = await bench.batch((f"far {n}" for n in range(40)), model="far")
            near = await bench.batch([f"near {n} [[delay=40]]" for n in range(4)], project="beta")
            await asyncio.sleep(30)
            waits, runs = await _progress(bench, far), await _progress(bench, near)
            assert waits.activity.pause is not None
            assert (waits.activity.pause.upstream, waits.activity.pause.detail) == ("gpu", "refused")
            assert far.created_at <= waits.activity.pause.since < far.created_at + 25
            assert runs.activity.pause is None
            await asyncio.sleep(10)
            assert (await _progress(bench, far)).activity.pause == waits.activity.pause
            assert (await bench.ended(far)).completed == 40
            assert (await _progress(bench, far)).activity.pause is None

        bench.play(scene())


def test_a_batch_that_was_stopped_waits_for_nothing(tmp_path: Path) -> None:
    """C10: what is left of it never runs."""
    with closing(Bench(tmp_path, latency=10)) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(40))
            await asyncio.sleep(1)
            bench.machine.crash(600)
            await asyncio.sleep(20)
            assert (await _progress(bench, batch)).activity.pause is not None
            bench.store.trouble["record"] = _never
            await bench.engine.api_role.services.cancellation.cancel(batch.project_id, batch.id)
            progress = await _progress(bench, batch)
            assert progress.batch.status is BatchStatus.CANCELLING
            assert (progress.activity.pause, progress.eta) == (None, None)

        bench.play(scene())


async def _never(*_: Any, **__: Any) -> None:
    await asyncio.Event().wait()
