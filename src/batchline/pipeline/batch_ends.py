"""Counts the batches that end, however they end, and makes their spans."""

from batchline.domain.records import Batch
from batchline.domain.states import BatchStatus
from batchline.ports import Tracer
from batchline.telemetry.metrics import Metrics


class BatchEnds:
    """Counts ended batches by status. ``tracer`` is None unless batches are traced."""

    def __init__(self, *, metrics: Metrics, tracer: Tracer | None) -> None:
        self._metrics, self._tracer = metrics, tracer

    def on_batch_ended(self, batch: Batch, status: BatchStatus, *, completed: int = 0, failed: int = 0) -> None:
        """Count a batch that was just stored with a terminal status, and make its span."""
        self._metrics.batches.labels(status).inc()
        if self._tracer is not None:
            self._tracer.on_batch_ended(batch, status, completed=completed, failed=failed)
