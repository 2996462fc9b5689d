"""Names the reasons why lines of a dispatcher do not start, for the progress of batches and for the metrics (D11)."""

from collections import Counter
from math import ceil

from batchline.domain.fleet import MAX_REPORTED_MODELS, ModelQueue
from batchline.domain.waiting import WaitReason
from batchline.pipeline.dispatch.circuit_breaker import Breakers
from batchline.pipeline.dispatch.in_flight import InFlight
from batchline.pipeline.dispatch.limiter import Limiter
from batchline.pipeline.dispatch.quarantine import Quarantine
from batchline.pipeline.dispatch.queues import ReadyQueue, RetryQueue
from batchline.pipeline.record import Recorder
from batchline.ports import Clock

_LONGEST_RATE_WAIT_SECONDS = 2.0
"""A shorter wait for what the headers announce is shown as a limited rate. A longer one is shown with its end."""

DISPATCH_REASONS = tuple(reason for reason in WaitReason if reason is not WaitReason.QUEUED)
"""The reasons for which lines wait in a dispatcher. Queued lines are not in a dispatcher yet."""


class Waiting:
    """The lines of one dispatcher that wait, and their reasons."""

    def __init__(
        self,
        *,
        ready: ReadyQueue,
        retries: RetryQueue,
        quarantine: Quarantine,
        in_flight: InFlight,
        limiter: Limiter,
        breakers: Breakers,
        recorder: Recorder,
        clock: Clock,
    ) -> None:
        self._ready, self._retries, self._quarantine = ready, retries, quarantine
        self._in_flight, self._limiter, self._breakers = in_flight, limiter, breakers
        self._recorder, self._clock = recorder, clock

    @property
    def hold(self) -> WaitReason | None:
        """The reason for which no line starts at all, if there is one beside a pause."""
        if self._recorder.full:
            return WaitReason.STORAGE
        return WaitReason.QUARANTINE if self._quarantine.holds_all else None

    @property
    def queues(self) -> dict[str, ModelQueue]:
        """The lines that wait, by model, without paused models.

        If there are too many models, those whose lines wait for slots are left out first.
        """
        models = dict.fromkeys([*self._ready.by_model, *self._retries.by_model])
        found = {model: queue for model in models if (queue := self._queue_of(model)) is not None}
        if len(found) <= MAX_REPORTED_MODELS:
            return found
        ordered = sorted(found.items(), key=lambda item: item[1].reason == WaitReason.SLOTS)
        return dict(ordered[:MAX_REPORTED_MODELS])

    def count(self, reason: WaitReason) -> int:
        """Return the number of lines that wait for a reason."""
        return self._counts[reason]

    @property
    def _counts(self) -> Counter[WaitReason]:
        counts = Counter({WaitReason.RETRYING: len(self._retries), WaitReason.QUARANTINE: len(self._quarantine)})
        for model, lines in self._ready.by_model.items():
            counts[self._reason_of(model)] += lines
        return counts

    def _reason_of(self, model: str) -> WaitReason:
        """Return why the ready lines of a model wait."""
        if self._breakers.is_paused(model):
            return WaitReason.UPSTREAM_PAUSED
        queue = self._queue_of(model)
        return self.hold or (WaitReason.SLOTS if queue is None else WaitReason(queue.reason))

    def _queue_of(self, model: str) -> ModelQueue | None:
        """Return the ready lines of a model with the limit that they wait for.

        A time at which the upstream accepts the model again is reported even if no line of it is ready.
        """
        if self._breakers.is_paused(model):
            return None
        lines, now = self._ready.by_model[model], self._clock.steady()
        limit = self._limiter.model(model)
        blocked_seconds = self._blocked_seconds(model, now)
        if blocked_seconds > 0:
            until = ceil(self._clock.now() + blocked_seconds)
            return ModelQueue(reason=WaitReason.RETRY_AFTER, lines=lines, until=until)
        if not lines:
            return None
        if limit.is_refused or self._limiter.wait(model, now) > 0:
            rate = 0.0 if limit.accepts_none else limit.rate
            return ModelQueue(reason=WaitReason.RATE_LIMIT, lines=lines, rate=rate)
        return ModelQueue(reason=WaitReason.SLOTS, lines=lines)

    def _blocked_seconds(self, model: str, now: float) -> float:
        """Return how long no line of a model may start because its upstream said so."""
        limit = self._limiter.model(model)
        announced = limit.announced_wait(now)
        return max(limit.blocked_seconds(now), announced if announced > _LONGEST_RATE_WAIT_SECONDS else 0.0)
