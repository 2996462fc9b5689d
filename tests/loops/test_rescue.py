"""What a dead process held is run by the next one: nothing is lost, and nothing waits behind it (C12, D5)."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from batchline.domain.records import Batch
from batchline.loops.rescue import Rescue
from batchline.pipeline.batch_ends import BatchEnds
from tests.simulation.virtual import VirtualClock
from tests.support.engine_harness import Bench


def test_only_shards_of_dead_processes_are_taken_over(tmp_path: Path) -> None:
    """D5: a claim is tried at once if there were any, and not for nothing."""
    with closing(Bench(tmp_path, latency=1000)) as bench:

        async def scene() -> None:
            await bench.batch(["slow"])
            await asyncio.sleep(1)
            live_owners = [bench.engine.worker_role.worker.report().owner]
            calls: list[None] = []
            rescue = Rescue(
                store=bench.rows,
                clock=VirtualClock(bench.time),
                owner="another",
                live_owners=lambda: live_owners,
                batch_ends=BatchEnds(metrics=bench.metrics, tracer=None),
                on_work_available=lambda: calls.append(None),
            )
            await rescue.step()
            assert calls == []
            live_owners.clear()
            await rescue.step()
            assert len(calls) == 1

        bench.play(scene())


def test_after_a_death_fresh_lines_are_not_held_up_by_struck_ones(tmp_path: Path) -> None:
    """D5: one death may have any cause, so what the dead worker held is run again in parallel.

    Its slow lines do not run one after the other before those of other projects.
    """
    with closing(Bench(tmp_path, latency=20, max_concurrency=16)) as bench:

        async def before() -> list[Batch]:
            batches = [await bench.batch([f"slow {n}"]) for n in range(24)]
            await asyncio.sleep(1)
            return batches

        struck = bench.play(before())
        assert bench.attempts("slow") == 15, "one slot is left for other projects"
        bench.kill()
        bench.start()

        async def after() -> None:
            fresh = await bench.ended(await bench.batch(["fresh [[delay=0.1]]"], project="beta"))
            assert fresh.completed == 1
            assert bench.time.now < 60
            assert [(await bench.ended(batch)).completed for batch in struck] == [1] * 24

        bench.play(after(), seconds=200)


@pytest.mark.parametrize("lines", [1, 9])
def test_a_worker_that_dies_twice_loses_nothing(tmp_path: Path, lines: int) -> None:
    """C12, D5: the third process runs the lines one by one, and each counts once."""
    with closing(Bench(tmp_path, latency=5)) as bench:

        async def until_in_flight() -> Batch:
            batch = await bench.batch(f"line {n}" for n in range(lines))
            await asyncio.sleep(1)
            return batch

        batch = bench.play(until_in_flight())
        for _ in range(2):
            bench.kill()
            bench.start()
            bench.play(asyncio.sleep(2))

        async def to_the_end() -> None:
            assert await bench.failures(await bench.ended(batch)) == {}

        bench.play(to_the_end())
        assert bench.attempts("line") == 3 * lines
