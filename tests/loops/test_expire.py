"""A batch whose window has ended is stopped: what ran counts, and the rest ends as expired (C11)."""

import asyncio
from contextlib import closing
from pathlib import Path

from batchline.domain.states import BatchStatus, Stop
from batchline.loops.expire import Expire
from tests.support.engine_harness import Bench


def test_a_batch_expires_at_the_end_of_its_window_and_not_before(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, latency=20, max_concurrency=1, completion_window_seconds=50)) as bench:

        async def scene() -> None:
            batch = await bench.batch(["a", "b", "c", "d"])
            await asyncio.sleep(45)
            assert (await bench.seen(batch.id)).status is BatchStatus.IN_PROGRESS
            ended = await bench.ended(batch)
            assert (ended.status, ended.completed, ended.failed) == (BatchStatus.EXPIRED, 3, 1)
            (message,) = (await bench.failures(ended)).values()
            assert "expired" in message

        bench.play(scene(), seconds=100)


def test_each_expired_batch_is_reported_once(tmp_path: Path) -> None:
    """The worker stops its lines, and the finalizer looks for it."""
    with closing(Bench(tmp_path, latency=1000, completion_window_seconds=50)) as bench:

        async def scene() -> None:
            batch = await bench.batch(["slow"])
            bench.store.trouble["expire"] = _never
            stops: list[tuple[str, Stop]] = []
            expire = Expire(
                store=bench.rows,
                on_batch_stopped=lambda batch_id, stop: stops.append((batch_id, stop)),
            )
            await expire.step()
            assert stops == []
            await asyncio.sleep(51)
            assert not await expire.step()
            await expire.step()
            assert stops == [(batch.id, Stop.EXPIRED)]

        bench.play(scene())


async def _never(**_: object) -> None:
    await asyncio.Event().wait()
