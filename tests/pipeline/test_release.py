"""Held batches in a running engine (G6): how many lines run before a batch is held, and what a release does."""

from contextlib import closing
from pathlib import Path

import pytest

from batchline.domain.errors import BatchNotFound, Conflict
from batchline.domain.states import BatchStatus
from batchline.domain.waiting import HeldWait
from tests.support.engine_harness import Bench

LINES = 3000


def wrong(lines: int = LINES) -> list[str]:
    """Return prompts that the upstream refuses twice at most: once before the release, and once after it."""
    return [f"[[status=400 times=1]] {n}" for n in range(lines)]


@pytest.mark.rule("G6", "A batch whose lines all fail stops after less than 200 lines, and says why it waits.")
def test_few_lines_run_before_a_batch_is_held(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, latency=0.01)) as bench:

        async def scene() -> None:
            batch = await bench.until(await bench.batch(wrong(), hold=True), lambda seen: seen.is_held)
            services = bench.engine.api_role.services
            progress = await services.progress_reader.progress(batch.project_id, batch.id)
            wait = progress.activity.waiting_for
            assert isinstance(wait, HeldWait)
            assert (wait.code, wait.since, progress.eta) == ("invalid_request_error", batch.held_at, None)
            assert wait.message.startswith("[legacy:http_400]")
            other = await bench.ended(await bench.batch(["good"]))
            assert other.completed == 1
            assert 20 <= bench.attempts("times=1") < 200
            assert await services.hold_release.release(batch.project_id, batch.id)
            ended = await bench.ended(batch)
            assert (ended.status, ended.completed + ended.failed) == (BatchStatus.COMPLETED, LINES)
            assert bench.attempts("times=1") == LINES
            await bench.records(ended)

        bench.play(scene())


def test_of_fifty_thousand_mistaken_lines_few_run(tmp_path: Path) -> None:
    """G6: the largest batch there is, at an upstream that refuses each line at once."""
    with closing(Bench(tmp_path, latency=0.002)) as bench:

        async def scene() -> None:
            batch = await bench.until(await bench.batch(wrong(50_000), hold=True), lambda seen: seen.is_held)
            settled = bench.attempts("times=1")
            await bench.until(batch, lambda _: not bench.engine.worker_role.worker.report().batches)
            assert settled <= bench.attempts("times=1") == (await bench.seen(batch.id)).failed <= 64

        bench.play(scene())


@pytest.mark.rule("G6", "A batch is not held by lines that are fine, and all of its lines run.")
def test_a_good_batch_is_not_held(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, latency=0.01)) as bench:

        async def scene() -> None:
            ended = await bench.ended(await bench.batch([f"good {n}" for n in range(500)], hold=True))
            assert (ended.completed, ended.held_at) == (500, None)

        bench.play(scene())


def test_lines_that_wait_for_a_retry_run_again_after_a_release(tmp_path: Path) -> None:
    """G6: a worker drops what it holds of a held batch, and every line still has one result."""
    prompts = [f"[[status=503 times=1]] slow {n}" if n % 20 == 3 else prompt for n, prompt in enumerate(wrong())]
    with closing(Bench(tmp_path, latency=0.01, retry_base_seconds=50)) as bench:

        async def scene() -> None:
            batch = await bench.until(await bench.batch(prompts, hold=True), lambda seen: seen.is_held)
            await bench.until(batch, lambda _: not bench.engine.worker_role.worker.report().retrying)
            assert await bench.engine.api_role.services.hold_release.release(batch.project_id, batch.id)
            ended = await bench.ended(batch)
            await bench.records(ended)
            assert ended.completed == len([prompt for prompt in prompts if "slow" in prompt])

        bench.play(scene())


@pytest.mark.rule("G6", "The release of a batch that is not held is a conflict.")
def test_only_a_held_batch_can_be_released(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            batch = await bench.ended(await bench.batch(["good"], hold=True))
            release, other = bench.engine.api_role.services.hold_release, await bench.owner("beta")
            with pytest.raises(Conflict) as conflict:
                await release.release(batch.project_id, batch.id)
            assert conflict.value.code == "batch_not_held"
            for project_id, batch_id in ((other.project_id, batch.id), (batch.project_id, "batch_none")):
                with pytest.raises(BatchNotFound):
                    await release.release(project_id, batch_id)

        bench.play(scene())


def test_a_held_batch_stays_held_over_a_crash(tmp_path: Path) -> None:
    """G6: the hold is in the store, so that another process knows it."""
    with closing(Bench(tmp_path, latency=0.01)) as bench:
        batch = bench.play(_hold(bench))
        before = bench.attempts("times=1")
        bench.kill()
        bench.start()

        async def scene() -> None:
            assert (await bench.ended(await bench.batch(["good"]))).completed == 1
            assert (await bench.seen(batch)).is_held
            assert bench.attempts("times=1") == before

        bench.play(scene())


async def _hold(bench: Bench) -> str:
    batch = await bench.until(await bench.batch(wrong(), hold=True), lambda seen: seen.is_held)
    return batch.id
