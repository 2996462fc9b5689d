"""Cancelling a batch: which ones can be, and that no attempt starts after the response (C10, C11)."""

from contextlib import closing
from pathlib import Path

import pytest

from batchline.domain.errors import BatchNotFound, Conflict
from batchline.domain.states import BatchStatus, Stop
from batchline.pipeline.batch_ends import BatchEnds
from batchline.pipeline.cancel import Cancellation
from tests.simulation.virtual import VirtualClock
from tests.support.engine_harness import Bench


def test_the_worker_is_notified_before_the_response(tmp_path: Path) -> None:
    """C11: the batch is stopped in the store and in this process when the client gets its response."""
    with closing(Bench(tmp_path, latency=1000)) as bench:

        async def scene() -> None:
            batch = await bench.batch(["slow"])
            stops: list[tuple[str, Stop]] = []
            cancellation = Cancellation(
                batches=bench.rows,
                clock=VirtualClock(bench.time),
                batch_ends=BatchEnds(metrics=bench.metrics, tracer=None),
                on_batch_stopped=lambda batch_id, stop: stops.append((batch_id, stop)),
            )
            cancelled = await cancellation.cancel(batch.project_id, batch.id)
            assert cancelled.status is BatchStatus.CANCELLING
            again = await cancellation.cancel(batch.project_id, batch.id)
            assert again.status is BatchStatus.CANCELLING
            assert stops == [(batch.id, Stop.CANCELLED)] * 2

        bench.play(scene())


def test_a_batch_that_has_ended_and_one_of_another_project_cannot_be_cancelled(tmp_path: Path) -> None:
    """A8, C10."""
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            batch = await bench.ended(await bench.batch(["good"]))
            cancellation, other = bench.engine.api_role.services.cancellation, await bench.owner("beta")
            with pytest.raises(Conflict, match="Cannot cancel a batch with status 'completed'"):
                await cancellation.cancel(batch.project_id, batch.id)
            for project_id, batch_id in ((other.project_id, batch.id), (batch.project_id, "batch_none")):
                with pytest.raises(BatchNotFound):
                    await cancellation.cancel(project_id, batch_id)

        bench.play(scene())
