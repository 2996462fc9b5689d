"""Claims that meet a damaged work file, an unavailable disk, or a cancellation (C5, C11, D5)."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.errors import ObjectsDown, StoreDown
from batchline.domain.lines import decode_lines
from batchline.domain.records import Batch
from batchline.domain.states import BatchStatus
from tests.support.damage import batch_with_damaged_work_file, work_file
from tests.support.engine_harness import Bench


def test_a_damaged_batch_and_two_deaths_do_not_stop_the_service(tmp_path: Path) -> None:
    """D5: lines that no worker can run do not keep others from running."""
    with closing(Bench(tmp_path)) as bench:

        async def before() -> None:
            await batch_with_damaged_work_file(bench, Path.unlink, lines=20)
            await asyncio.sleep(1)

        bench.play(before())
        for _ in range(2):
            bench.kill()
            bench.start()
            bench.play(asyncio.sleep(2))

        async def scene() -> None:
            await bench.ended(await bench.batch(["good"], project="beta"))

        bench.play(scene(), seconds=300)


def _fails_once(error: Exception, *, at_call: int = 1) -> Callable[..., Awaitable[None]]:
    calls = 0

    async def trouble(*_: Any, **__: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at_call:
            raise error

    return trouble


def test_shards_that_follow_each_other_are_read_at_once(tmp_path: Path) -> None:
    """D8: each read waits for the event loop, and is a request to a bucket."""
    with closing(Bench(tmp_path)) as bench:
        reads: list[str] = []

        async def note(key: str, *_: Any, **__: Any) -> None:
            reads.append(key)

        bench.objects.trouble["read"] = note

        async def scene() -> int:
            batch = await bench.batch(f"line {n}" for n in range(4000))
            assert (await bench.ended(batch)).completed == 4000
            return len(await bench.rows.batch_shards(batch.id))

        shards = bench.play(scene())
        assert 0 < sum(key.startswith("work/") for key in reads) <= shards / 2


@pytest.mark.parametrize("at_call", [1, 2])
def test_lines_that_cannot_be_read_nor_handed_back_hold_up_no_others(
    tmp_path: Path, at_call: int, caplog: pytest.LogCaptureFixture
) -> None:
    """D5: what the same claim has already read runs, and the stray lease is found without the death of a process."""
    with closing(Bench(tmp_path)) as bench:
        bench.objects.trouble["read"] = _fails_once(ObjectsDown("EIO"), at_call=at_call)
        bench.store.trouble["release"] = _fails_once(StoreDown("EIO"))

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(400))
            assert await bench.failures(await bench.ended(batch)) == {}

        bench.play(scene(), seconds=60)
        assert bench.attempts("line") == 400
        assert "failed to read the lines of a shard, releasing it" in caplog.messages


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_batch_whose_work_file_is_gone_does_not_hold_up_another(tmp_path: Path, cancelled: bool) -> None:
    """D5: its lines come first and cannot be run, nor its end be written; the next batch is claimed and finished."""
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            lost = await batch_with_damaged_work_file(bench, Path.unlink, lines=1000)
            await asyncio.sleep(2)
            if cancelled:
                await bench.engine.api_role.services.cancellation.cancel(lost.project_id, lost.id)
                await asyncio.sleep(2)
            other = await bench.batch((f"good {n}" for n in range(20)), project="beta")
            assert await bench.failures(await bench.ended(other)) == {}

        bench.play(scene(), seconds=30)


def test_a_lost_line_that_would_run_alone_does_not_hold_up_another(tmp_path: Path) -> None:
    """D5: two workers died on it and its work file is missing, so there is nothing that must run alone."""
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
        work_file(bench, struck.id).unlink()

        async def scene() -> None:
            other = await bench.batch(["good"], project="beta")
            assert await bench.failures(await bench.ended(other)) == {}

        bench.play(scene(), seconds=30)
        assert bench.attempts("struck") == 2


@pytest.mark.parametrize("left", [0, 5, 14, 60])
def test_a_work_file_that_is_cut_off_sends_no_half_line(tmp_path: Path, left: int) -> None:
    """C5, D5: wherever it is cut off, in a body, in a custom_id or in the numbers before them.

    The process lives, the batch of another project ends first, and the work file is made again from the input file.
    """

    def cut_off(work: Path) -> None:
        data = work.read_bytes()
        *_, last = decode_lines(data)
        size = 12 + len(last.custom_id) + len(last.body)
        work.write_bytes(data[: len(data) - size + left])

    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            damaged = await batch_with_damaged_work_file(bench, cut_off, lines=20)
            other = await bench.batch((f"good {n}" for n in range(20)), project="beta")
            assert await bench.failures(await bench.ended(other)) == {}
            ended = await bench.ended(damaged)
            assert (ended.status, ended.completed, bench.attempts("damaged")) == (BatchStatus.COMPLETED, 20, 20)
            assert await bench.failures(ended) == {}

        bench.play(scene(), seconds=60)
        assert all(json.loads(body) for body in bench.machine.starts)


@pytest.mark.rule("C11", "No attempt starts after a cancel that met a claim under way.")
@pytest.mark.parametrize("which", [0, 1])
def test_a_cancel_that_meets_a_claim_starts_nothing(tmp_path: Path, which: int) -> None:
    """C11: no attempt starts if the lines of a batch are leased and just being read, or about to be."""
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
