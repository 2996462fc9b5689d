"""The whole engine with an upstream that crashes, drops connections or is unavailable (D3, D5)."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from batchline.domain.records import Batch
from batchline.domain.states import BatchStatus
from batchline.upstream.mock.script import Plan
from tests.support.engine_harness import Bench

CRASHES = "[[crash delay=0.02]]"
_LINES = 1200


@pytest.mark.rule("D5", "Lines beside the one that crashes the upstream do not fail.")
@pytest.mark.parametrize("guilty", [0, 13, 40, 63])
def test_one_line_that_crashes_the_upstream_is_found_with_few_crashes(tmp_path: Path, guilty: int) -> None:
    """D5: lines in flight beside it are tried again without it.

    So no other line fails, and the upstream need not restart for each of them.
    """
    with closing(Bench(tmp_path, latency=0.2, max_concurrency=64)) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"{CRASHES if n == guilty else 'good'} {n}" for n in range(64))
            failures = await bench.failures(await bench.ended(batch))
            assert list(failures) == [f"line-{guilty}"]
            assert failures[f"line-{guilty}"].startswith("[legacy:retries_exhausted] Line failed after 4 attempts: ")

        bench.play(scene())
        assert bench.machine.crashes() <= 12


def test_poisonous_lines_do_not_keep_others_from_being_tried(tmp_path: Path) -> None:
    """D3, D5: while two lines crash the upstream again and again, it is probed with a line that is no suspect.

    The first answer to that line ends the pause for all.
    """
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            poison = await bench.batch(f"{CRASHES} {n}" for n in range(2))
            await asyncio.sleep(1)
            other = await bench.batch((f"good {n}" for n in range(5)), project="beta")
            await bench.until(other, lambda seen: seen.completed > 0)
            assert bench.time.now < 10
            assert await bench.failures(await bench.ended(other)) == {}
            assert (await bench.seen(poison.id)).status == BatchStatus.IN_PROGRESS
            assert len(await bench.failures(await bench.ended(poison))) == 2

        bench.play(scene())


def test_an_outage_fails_no_line_though_all_have_the_same_custom_id(tmp_path: Path) -> None:
    """D3: lines are identified by batch and number, and not by the custom_id of the client."""
    with closing(Bench(tmp_path)) as bench:
        bench.machine.down_until = 300

        async def scene() -> None:
            batches = [await bench.batch([f"batch {n}"]) for n in range(8)]
            ends = [await bench.ended(batch) for batch in batches]
            assert [(batch.completed, batch.failed) for batch in ends] == [(1, 0)] * 8

        bench.play(scene(), seconds=500)


def _run_to_the_end(bench: Bench, lines: int) -> tuple[Batch, float]:
    async def scene() -> Batch:
        return await bench.ended(await bench.batch(f"line {n}" for n in range(lines)))

    since = bench.time.now
    return bench.play(scene()), bench.time.now - since


def test_dropped_connections_cost_little(tmp_path: Path) -> None:
    """D5: a single broken connection is no crash, and the other lines go on.

    With one connection in a hundred dropped, a batch takes less than twice as long as with none.
    """
    taken = {}
    for percent in (0, 1):
        folder = tmp_path / str(percent)
        folder.mkdir()
        with closing(Bench(folder, plan=Plan(drop=percent), latency=0.2, max_concurrency=64)) as bench:
            batch, taken[percent] = _run_to_the_end(bench, _LINES)
            assert (batch.completed, batch.failed) == (_LINES, 0)
            assert (bench.attempts("line") > _LINES) == bool(percent)
    assert taken[1] < 2 * taken[0]
