"""The engine with a damaged work file, and at the moment between a line's turn and its attempt."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from batchline.domain.lines import decode_lines
from batchline.domain.states import BatchStatus
from tests.pipeline.dispatch.test_dispatcher_outages import _batch_with_damage
from tests.support.engine_harness import Bench


def test_a_damaged_batch_and_two_deaths_do_not_stop_the_service(tmp_path: Path) -> None:
    """D5: what cannot be run by anybody is no reason to run nothing else."""
    with closing(Bench(tmp_path)) as bench:

        async def before() -> None:
            await _batch_with_damage(bench, Path.unlink, lines=20)
            await asyncio.sleep(1)

        bench.play(before())
        for _ in range(2):
            bench.kill()
            bench.start()
            bench.play(asyncio.sleep(2))

        async def scene() -> None:
            await bench.ended(await bench.batch(["good"], project="beta"))

        bench.play(scene(), seconds=300)


@pytest.mark.parametrize("left", [0, 5, 14])
def test_a_batch_whose_lines_are_lost_never_ends_as_if_they_were_not(tmp_path: Path, left: int) -> None:
    """C12: with its work file cut off, lines would be missing from both files; it stays open, and the log says why."""

    def cut_off(work: Path) -> None:
        data = work.read_bytes()
        *_, last = decode_lines(data)
        work.write_bytes(data[: len(data) - 12 - len(last.custom_id) - len(last.body) + left])

    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            damaged = await _batch_with_damage(bench, cut_off, lines=20)
            await asyncio.sleep(3)
            await bench.engine.api_role.services.cancellation.cancel(damaged.project_id, damaged.id)
            await asyncio.sleep(60)
            assert (await bench.seen(damaged.id)).status is BatchStatus.CANCELLING

        bench.play(scene(), seconds=300)
