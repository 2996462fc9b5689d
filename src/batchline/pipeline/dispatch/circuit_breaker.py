"""Pauses an upstream that is unavailable, probes it, and lets no line pay for the outage.

In the words of the circuit breaker pattern, *flowing* is closed, *paused* is open, and a probe is its half-open try::

    flowing ──(the last 16 answers, from 4 lines or more, all say unavailable; or it crashed)──> paused
    paused  ──(the first real answer; after a crash a 429 too)──> flowing
    paused  ──(patience ran out)──> impatient: lines run and faults count ──(the first real answer)──> flowing
"""

import logging
from collections import deque
from collections.abc import Hashable

from batchline.domain.progress import Pause
from batchline.domain.replies import FaultKind
from batchline.ports import Clock, Random
from batchline.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_ANSWERS_TO_PAUSE = 16
_LINES_TO_PAUSE = 4
_FIRST_PROBE_SECONDS = 2.0
_LONGEST_PROBE_SECONDS = 15.0


class CircuitBreaker:
    """The availability of one upstream, and when to probe it. Longer than ``patience_seconds`` no pause lasts."""

    def __init__(
        self, upstream: str, *, clock: Clock, random: Random, patience_seconds: float, metrics: Metrics
    ) -> None:
        self._upstream = upstream
        self._clock, self._random, self._metrics = clock, random, metrics
        self._patience_seconds = patience_seconds
        self._recent: deque[Hashable] = deque(maxlen=_ANSWERS_TO_PAUSE)
        self.paused = False
        self._paused_at = 0.0
        self._since = 0
        self._reason = ""
        self._crashed = self._impatient = False
        self._next_probe = 0.0
        self._interval = _FIRST_PROBE_SECONDS

    @property
    def pause(self) -> Pause | None:
        return Pause(upstream=self._upstream, detail=self._reason, since=self._since) if self.paused else None

    def on_real_answer(self) -> None:
        """End a pause: the upstream is available."""
        self._recent.clear()
        if not self.paused and not self._impatient:
            return
        log.info("upstream available again, resuming dispatch", extra={"upstream": self._upstream})
        self._end_pause()
        self._impatient = False

    def on_unavailable(self, line: Hashable, reason: str, *, throttled: bool = False) -> None:
        """Count an answer of an unavailable upstream. A 429 after a crash shows that it has restarted."""
        if self._crashed and throttled:
            self._end_pause()
        self._recent.append(line)
        if len(self._recent) == _ANSWERS_TO_PAUSE and len(set(self._recent)) >= _LINES_TO_PAUSE:
            self._pause(reason)
            self._crashed = False

    def on_crash(self) -> None:
        """Pause at once: the upstream broke every connection together, and is probably restarting."""
        if not self.paused and not self._impatient:
            self._pause("crashed")
            self._crashed = True

    def forgives(self, kind: str) -> bool:
        """Return whether a fault of this kind spends no attempt.

        After a crash only a refused connection is forgiven, since nothing was sent over it. A connection that breaks
        may be the line that caused the crash, and an answer may come from an upstream that has restarted.
        """
        return self.paused and (not self._crashed or kind == FaultKind.REFUSED)

    def _pause(self, reason: str) -> None:
        if self.paused or self._impatient:
            return
        self.paused = True
        self._paused_at, self._since = self._clock.steady(), int(self._clock.now())
        self._reason = reason
        self._metrics.upstream_paused.labels(self._upstream, reason).set(1)
        self._interval = _FIRST_PROBE_SECONDS
        self._schedule_probe()
        log.warning(
            "upstream unavailable, pausing dispatch",
            extra={"upstream": self._upstream, "reason": reason, "retry_in": round(self.seconds_to_probe, 1)},
        )

    def end_pause_if_overdue(self) -> None:
        """Resume attempts after an outage longer than the patience, so that lines end by their faults."""
        if not self.paused or self._clock.steady() - self._paused_at < self._patience_seconds:
            return
        self._end_pause()
        self._impatient = True
        log.warning(
            "upstream still unavailable, resuming attempts",
            extra={"upstream": self._upstream, "paused_seconds": int(self._patience_seconds)},
        )

    @property
    def seconds_to_probe(self) -> float:
        """The time until the next probe is due, while paused."""
        return max(0.0, self._next_probe - self._clock.steady())

    def begin_probe(self) -> None:
        """Schedule the next probe, later than the last time, because one has started."""
        self._interval = min(_LONGEST_PROBE_SECONDS, self._interval * 2)
        self._schedule_probe()

    def _end_pause(self) -> None:
        if self.paused:
            self._metrics.upstream_paused.remove(self._upstream, self._reason)
        self.paused = False
        self._crashed = False

    def _schedule_probe(self) -> None:
        self._next_probe = self._clock.steady() + self._random.uniform(0.5, 1.0) * self._interval
