"""When an upstream is gone: pause it, probe it, and let no line pay for the outage.

::

    open ──(the last 16 answers, from 4 lines or more, were all of a gone upstream; or it crashed)──> paused
    paused ──(the first real answer; after a crash a 429 too)──> open
    paused ──(patience ran out)──> impatient: lines run and faults count ──(the first real answer)──> open
"""

import logging
from collections import deque
from collections.abc import Hashable

from batchline.domain.progress import Pause
from batchline.domain.replies import FaultKind
from batchline.ports import Clock, Random
from batchline.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_ANSWERS = 16
_LINES = 4
_FIRST_PROBES = 2.0
_LONGEST_PROBE = 15.0


class Gate:
    def __init__(
        self, upstream: str, *, clock: Clock, random: Random, patience_seconds: float, metrics: Metrics
    ) -> None:
        self._upstream = upstream
        self._clock, self._random, self._metrics = clock, random, metrics
        self._patience = patience_seconds
        self._recent: deque[Hashable] = deque(maxlen=_ANSWERS)
        self.paused = False
        self._paused_at = 0.0
        self._since = 0
        self._reason = ""
        self._crashed = self._impatient = False
        self._next_probe = 0.0
        self._interval = _FIRST_PROBES

    @property
    def pause(self) -> Pause | None:
        return Pause(upstream=self._upstream, detail=self._reason, since=self._since) if self.paused else None

    def real_answer(self) -> None:
        """The upstream is there."""
        self._recent.clear()
        if not self.paused and not self._impatient:
            return
        log.info("the upstream answers again", extra={"upstream": self._upstream})
        self._end_pause()
        self._impatient = False

    def gone_answer(self, line: Hashable, reason: str, *, throttled: bool = False) -> None:
        """One more sign that the upstream is gone. But one that asks for patience has not crashed, or is back."""
        if self._crashed and throttled:
            self._end_pause()
        self._recent.append(line)
        if len(self._recent) == _ANSWERS and len(set(self._recent)) >= _LINES:
            self._pause(reason)
            self._crashed = False

    def crashed(self) -> None:
        """It broke off everything at once, and will most likely be back."""
        if not self.paused and not self._impatient:
            self._pause("crashed")
            self._crashed = True

    def forgives(self, kind: str) -> bool:
        """Whether a fault of a gone upstream spends nothing. After a crash alone that is only a refused connection,
        which nothing was sent over: what breaks or answers now may be what crashed it, or an upstream that is back."""
        return self.paused and (not self._crashed or kind == FaultKind.REFUSED)

    def _pause(self, reason: str) -> None:
        if self.paused or self._impatient:
            return
        self.paused = True
        self._paused_at, self._since = self._clock.steady(), int(self._clock.now())
        self._reason = reason
        self._metrics.upstream_paused.labels(self._upstream, reason).set(1)
        self._interval = _FIRST_PROBES
        self._schedule_probe()
        log.warning("the upstream is gone; its lines wait", extra={"upstream": self._upstream, "reason": reason})

    def admits(self) -> bool:
        """Whether an attempt may start now: always while open, one probe at a time while paused."""
        if not self.paused:
            return True
        now = self._clock.steady()
        if now - self._paused_at >= self._patience:
            self._end_pause()
            self._impatient = True
            log.warning("the upstream stayed away too long; faults count again", extra={"upstream": self._upstream})
            return True
        if now < self._next_probe:
            return False
        self._interval = min(_LONGEST_PROBE, self._interval * 2)
        self._schedule_probe()
        return True

    def wait(self) -> float | None:
        """Seconds until the next probe is due; None while open."""
        return None if not self.paused else max(0.0, self._next_probe - self._clock.steady())

    def _end_pause(self) -> None:
        if self.paused:
            self._metrics.upstream_paused.remove(self._upstream, self._reason)
        self.paused = False
        self._crashed = False

    def _schedule_probe(self) -> None:
        self._next_probe = self._clock.steady() + self._random.uniform(0.5, 1.0) * self._interval
