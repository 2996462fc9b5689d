"""The result files of a batch are assembled and published once, or not at all (C12, D5)."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.errors import LeaseLost
from batchline.domain.lines import decode_lines
from batchline.domain.states import BatchStatus
from tests.support.damage import batch_with_damaged_work_file
from tests.support.engine_harness import Bench


async def _results(bench: Bench) -> set[str]:
    return {key async for page in bench.objects.keys("results") for key in page}


def test_a_batch_has_only_the_files_that_have_lines(tmp_path: Path) -> None:
    """C12: output without errors, errors without output, or both."""
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> list[tuple[bool, bool]]:
            prompts = (["good"], ["[[status=400]]"], ["good", "[[status=400]]"])
            ends = [await bench.ended(await bench.batch(each)) for each in prompts]
            for batch in ends:
                await bench.records(batch)
            return [(batch.output_file_id is not None, batch.error_file_id is not None) for batch in ends]

        assert bench.play(scene()) == [(True, False), (False, True), (True, True)]


def test_results_that_another_process_publishes_are_removed_here(tmp_path: Path) -> None:
    """C12, D5: a finalizer that lost its lease leaves no object, and the next try publishes under a new epoch."""
    with closing(Bench(tmp_path)) as bench:
        before_publish: list[set[str]] = []

        async def lose_the_lease(*_: Any, **__: Any) -> None:
            before_publish.append(await _results(bench))
            if len(before_publish) == 1:
                raise LeaseLost("taken over")
            assert not before_publish[0] & before_publish[1], "the objects of the first try are removed"

        bench.store.trouble["publish"] = lose_the_lease

        async def scene() -> None:
            batch = await bench.batch(["good", "[[status=400]]"])
            ended = await bench.until(batch, lambda seen: seen.completed == 1 and len(before_publish) > 0)
            await asyncio.sleep(100)
            ended = await bench.ended(ended)
            assert len(await bench.records(ended)) == 2
            assert len(await _results(bench)) == 2

        bench.play(scene())
        assert [len(keys) for keys in before_publish] == [2, 2]


def test_lines_that_never_ran_get_the_reason_of_the_stop(tmp_path: Path) -> None:
    """C11, D2."""
    with closing(Bench(tmp_path, latency=10, max_concurrency=1)) as bench:

        async def scene() -> None:
            batch = await bench.batch(["a", "b", "c"])
            await asyncio.sleep(1)
            await bench.engine.api_role.services.cancellation.cancel(batch.project_id, batch.id)
            ended = await bench.ended(batch)
            records = (await bench.records(ended)).values()
            codes = sorted(record["error"]["code"] if record["error"] else "" for record in records)
            assert codes == ["", "batch_cancelled", "batch_cancelled"]

        bench.play(scene())


@pytest.mark.parametrize("left", [0, 5, 14])
def test_a_batch_whose_lines_are_lost_never_ends_as_if_they_were_not(tmp_path: Path, left: int) -> None:
    """C12: with its work file cut off, lines would be missing from both files; it stays open, and the log says why."""

    def cut_off(work: Path) -> None:
        data = work.read_bytes()
        *_, last = decode_lines(data)
        work.write_bytes(data[: len(data) - 12 - len(last.custom_id) - len(last.body) + left])

    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            damaged = await batch_with_damaged_work_file(bench, cut_off, lines=20)
            await asyncio.sleep(3)
            await bench.engine.api_role.services.cancellation.cancel(damaged.project_id, damaged.id)
            await asyncio.sleep(60)
            assert (await bench.seen(damaged.id)).status is BatchStatus.CANCELLING

        bench.play(scene(), seconds=300)
