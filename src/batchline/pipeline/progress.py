"""Tell how far a batch is: from what is recorded, and from what this process is doing for it."""

from collections.abc import Iterable
from typing import Protocol

from batchline.domain.errors import BatchNotFound
from batchline.domain.progress import Eta, Pause, Progress, eta_of, rate_of
from batchline.domain.records import Batch
from batchline.domain.states import TERMINAL, BatchStatus
from batchline.ports import Batches, Clock, Standing


class Running(Protocol):
    """What runs in this process."""

    def in_flight_of(self, batch_id: str) -> int: ...

    def limit_of(self, models: Iterable[str]) -> int: ...

    def pause_of(self, models: Iterable[str]) -> Pause | None: ...


class Inspection:
    def __init__(self, *, batches: Batches, running: Running, clock: Clock) -> None:
        self._batches, self._running, self._clock = batches, running, clock

    async def progress(self, project_id: str, batch_id: str) -> Progress:
        """Raises BatchNotFound."""
        standing = await self._batches.standing(project_id, batch_id)
        if standing is None:
            raise BatchNotFound(batch_id)
        batch = standing.batch
        return Progress(
            batch=batch,
            rate=self._rate(standing),
            eta=self._eta(standing),
            waiting_for=self._running.pause_of(standing.models) if _starts_lines(batch) else None,
            in_flight=self._running.in_flight_of(batch_id),
            concurrency=self._running.limit_of(standing.models) if _starts_lines(batch) else 0,
            errors=standing.errors,
        )

    def _rate(self, standing: Standing) -> float:
        batch = standing.batch
        if batch.in_progress_at is None or batch.status in TERMINAL:
            return 0.0
        return rate_of(standing.samples, began=batch.in_progress_at, now=self._clock.now())

    def _eta(self, standing: Standing) -> Eta | None:
        batch = standing.batch
        if batch.in_progress_at is None or not _starts_lines(batch):
            return None
        remaining = batch.total - batch.completed - batch.failed
        return eta_of(standing.samples, remaining=remaining, began=batch.in_progress_at, now=self._clock.now())


def _starts_lines(batch: Batch) -> bool:
    """What is left of a batch that was stopped never runs, and waits for nothing."""
    return batch.status is BatchStatus.IN_PROGRESS and batch.stop is None
