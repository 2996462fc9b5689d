"""Reads the queue length of an inference engine every few seconds while lines are in flight."""

import logging
from collections.abc import Callable

from batchline.domain.engine_queue import QueueLength
from batchline.domain.replies import Fault, Reply
from batchline.ports import Clock, EngineQueue

log = logging.getLogger(__name__)

READ_INTERVAL_SECONDS = 5.0
_SEARCH_INTERVAL_SECONDS = 600.0
"""The time after which an engine that reports no queue is asked again: another engine may have replaced it."""
_IDLE_POLL_SECONDS = 1.0
_READS_UNTIL_SEARCH = 2
"""The reads without a queue before the search interval begins: some engines report one only after a first request."""
_FAILURES_UNTIL_LOST = 3


class EngineQueueWatch:
    """Reads the queue of the engine behind one upstream, once at the start and then only while ``is_busy``.

    ``on_queue_length`` is called with the name of the upstream and each length that was read. It is not called when a
    read fails, so its receiver has to decide how long a length is valid.
    """

    def __init__(
        self,
        upstream: str,
        *,
        queue: EngineQueue,
        clock: Clock,
        is_busy: Callable[[], bool],
        on_queue_length: Callable[[str, QueueLength], None],
    ) -> None:
        self._upstream, self._queue, self._clock = upstream, queue, clock
        self._is_busy, self._on_queue_length = is_busy, on_queue_length
        self._found = False
        self._misses = 0
        """The reads in a row that returned no length."""

    async def run(self) -> None:
        """Run until cancelled. An error is logged and never raised."""
        while True:
            try:
                wait_seconds = await self._read()
            except Exception:
                wait_seconds = _SEARCH_INTERVAL_SECONDS
                log.exception(
                    "failed to read the engine's queue length, retrying",
                    extra={"upstream": self._upstream, "retry_in": wait_seconds},
                )
            await self._clock.sleep(wait_seconds)
            while not self._is_busy():
                await self._clock.sleep(_IDLE_POLL_SECONDS)

    async def _read(self) -> float:
        """Read once, and return the number of seconds until the next read."""
        reading = await self._queue.read()
        if isinstance(reading, QueueLength):
            self._misses = 0
            self._note_found()
            self._on_queue_length(self._upstream, reading)
            return READ_INTERVAL_SECONDS
        self._misses += 1
        if reading is None:
            return self._after_none()
        return self._after_failure(reading)

    def _after_none(self) -> float:
        if self._misses < _READS_UNTIL_SEARCH:
            return READ_INTERVAL_SECONDS
        self._note_lost("the engine reports no queue at /metrics", retry_in=_SEARCH_INTERVAL_SECONDS)
        return _SEARCH_INTERVAL_SECONDS

    def _after_failure(self, reply: Reply) -> float:
        # An engine that is starting or overloaded is asked again soon. The longer it fails, the less often it is asked.
        doublings = min(self._misses - 1, 10)
        wait_seconds = min(_SEARCH_INTERVAL_SECONDS, READ_INTERVAL_SECONDS * 2.0**doublings)
        if self._misses >= _FAILURES_UNTIL_LOST:
            reason = reply.detail if isinstance(reply, Fault) else f"HTTP status {reply.status}"
            self._note_lost(reason, retry_in=wait_seconds)
        return wait_seconds

    def _note_found(self) -> None:
        if not self._found:
            self._found = True
            log.info(
                "engine reports its queue length, reading it while lines are in flight",
                extra={"upstream": self._upstream, "every": READ_INTERVAL_SECONDS},
            )

    def _note_lost(self, reason: str, *, retry_in: float) -> None:
        if self._found:
            self._found = False
            log.info(
                "engine no longer reports its queue length, continuing without it",
                extra={"upstream": self._upstream, "reason": reason, "retry_in": retry_in},
            )
