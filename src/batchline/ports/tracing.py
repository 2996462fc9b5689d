"""Defines what the pipeline needs to trace batches: a span for each batch, and one for each of some of its lines."""

from typing import Protocol

from batchline.domain.models import Model
from batchline.domain.outcomes import Failure, Outcome, Success
from batchline.domain.records import Batch
from batchline.domain.states import BatchStatus


class LineTrace(Protocol):
    """Collects what happens to one line, from its first attempt to its outcome."""

    def on_attempt(self, outcome: Outcome, *, upstream: str, model: Model, body: bytes, seconds: float) -> None:
        """Note an attempt that just ended after so many seconds."""

    def on_outcome(self, outcome: Success | Failure) -> None:
        """Make the span of the line, if there was an attempt."""


class Tracer(Protocol):
    """Makes traces."""

    def sample(self, batch_id: str, index: int, *, endpoint: str) -> LineTrace | None:
        """Return what collects the trace of a line, or None if the line is not one of those that are traced."""

    def on_batch_ended(self, batch: Batch, status: BatchStatus, *, completed: int, failed: int) -> None:
        """Make the span of a batch, from its creation to now."""
