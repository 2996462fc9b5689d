"""Finish batches that have nothing left to run."""

from collections.abc import Callable

from batchline.pipeline.finalize import Finalizer
from batchline.telemetry.metrics import Metrics


class Finish:
    def __init__(self, *, finalizer: Finalizer, metrics: Metrics, finished: Callable[[], None]) -> None:
        self._finalizer, self._metrics, self._finished = finalizer, metrics, finished

    async def step(self) -> bool:
        status = await self._finalizer.finish_next()
        if status is None:
            return False
        self._metrics.batches.labels(status).inc()
        self._finished()
        return True
