"""Reports the progress of a batch, from its recorded lines and from the reports of the workers."""

from collections.abc import Sequence
from typing import Protocol

from batchline.domain.activity import activity_of
from batchline.domain.errors import BatchNotFound
from batchline.domain.fleet import Report
from batchline.domain.models import Catalog
from batchline.domain.progress import Eta, Progress, eta_of, rate_of
from batchline.domain.records import Batch
from batchline.domain.states import TERMINAL, BatchStatus
from batchline.domain.waiting import stops_all_lines
from batchline.ports import Batches, BatchSnapshot, Clock


class Workers(Protocol):
    """The worker processes of the service."""

    async def reports(self) -> Sequence[Report]:
        """Return the report of each worker process."""


class ProgressReader:
    def __init__(self, *, batches: Batches, workers: Workers, catalog: Catalog, clock: Clock) -> None:
        self._batches, self._workers, self._catalog, self._clock = batches, workers, catalog, clock

    async def progress(self, project_id: str, batch_id: str) -> Progress:
        """Return the progress of a batch of this project. Raises BatchNotFound."""
        snapshot = await self._batches.snapshot(project_id, batch_id)
        if snapshot is None:
            raise BatchNotFound(batch_id)
        batch = snapshot.batch
        models = snapshot.models if _starts_lines(batch) else []
        activity = activity_of(
            batch, models, errors=snapshot.errors, catalog=self._catalog, reports=await self._workers.reports()
        )
        return Progress(
            batch=batch,
            rate=self._rate(snapshot),
            eta=None if stops_all_lines(activity.waiting_for) else self._eta(snapshot),
            activity=activity,
            errors=snapshot.errors,
            child_batch_ids=snapshot.child_batch_ids,
            bill=snapshot.bill,
            samples=snapshot.samples,
        )

    def _rate(self, snapshot: BatchSnapshot) -> float:
        batch = snapshot.batch
        if batch.in_progress_at is None or batch.status in TERMINAL:
            return 0.0
        return rate_of(snapshot.samples, began=batch.in_progress_at, now=self._clock.now())

    def _eta(self, snapshot: BatchSnapshot) -> Eta | None:
        batch = snapshot.batch
        if batch.in_progress_at is None or not _starts_lines(batch):
            return None
        remaining = batch.total - batch.completed - batch.failed
        return eta_of(snapshot.samples, remaining=remaining, began=batch.in_progress_at, now=self._clock.now())


def _starts_lines(batch: Batch) -> bool:
    """Return whether lines of a batch may still start. The rest of a stopped batch never runs and waits for nothing."""
    return batch.status is BatchStatus.IN_PROGRESS and batch.stop is None
