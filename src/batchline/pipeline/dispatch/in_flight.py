"""The jobs in flight to one upstream: how many more may start, and how many of one project."""

import math
from collections import Counter
from collections.abc import Callable, Iterator

from batchline.domain.outcomes import Outcome, Retryable
from batchline.domain.replies import FaultKind
from batchline.pipeline.dispatch.limiter import Limiter, Sign, Start
from batchline.pipeline.job import Job
from batchline.ports import Clock

_QUICK_SECONDS = 0.5
"""A slot with answers quicker than this is free again soon enough for any project."""
_MIN_LATENCY_SECONDS = 0.001
_FEW_SLOTS = 8
"""With fewer slots than this none is left free for other projects."""
_LATENCY_SMOOTHING = 0.1
"""The weight of the newest latency in the typical one."""
_OVERLOADS = frozenset({"http_502", "http_503", "http_504", FaultKind.TIMEOUT})


class InFlight:
    """The jobs in flight. ``count_sync_calls`` returns how many slots are taken by synchronous calls."""

    def __init__(self, limiter: Limiter, *, clock: Clock, count_sync_calls: Callable[[], int]) -> None:
        self._limiter, self._clock = limiter, clock
        self._count_sync_calls = count_sync_calls
        self._starts: dict[Job, Start] = {}
        self._typical_seconds = math.inf
        self.by_project: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._starts)

    def __contains__(self, job: object) -> bool:
        return job in self._starts

    def __iter__(self) -> Iterator[Job]:
        return iter(self._starts)

    @property
    def sync_calls(self) -> int:
        return self._count_sync_calls()

    @property
    def room(self) -> int:
        """How many more may start, whatever the rate. Synchronous calls go first, but leave one slot to batches."""
        calls = self._count_sync_calls()
        return self._limiter.room(beside=max(0, min(calls, self._limiter.limit - 1)) if calls else 0)

    def lines_for(self, seconds: float) -> int:
        """Return how many ready lines keep every slot busy for that time, by how long lines took lately."""
        limit = self._limiter.limit
        return max(limit, int(limit * seconds / max(self._typical_seconds, _MIN_LATENCY_SECONDS)))

    @property
    def project_limit(self) -> int:
        """How many slots one project may take.

        While answers are slow one slot stays free, so that lines that hang do not keep another project's from starting.
        """
        slow = self._typical_seconds > _QUICK_SECONDS and self._limiter.limit >= _FEW_SLOTS
        return self._limiter.most - slow

    def start(self, jobs: list[Job]) -> None:
        self._starts.update(zip(jobs, self._limiter.started(self._clock.steady(), len(jobs)), strict=True))
        for job in jobs:
            self.by_project[job.batch.project_id] += 1

    def finish(self, job: Job, outcome: Outcome | None, now: float) -> float:
        """Remove a job whose attempt ended, and return its latency. An outcome of None does not affect the limiter."""
        start = self._starts.pop(job)
        self._limiter.ended(start, _sign_of(outcome), now)
        self.by_project[job.batch.project_id] -= 1
        seconds = now - start.at
        before = seconds if self._typical_seconds == math.inf else self._typical_seconds
        self._typical_seconds = before + _LATENCY_SMOOTHING * (seconds - before)
        return seconds


def _sign_of(outcome: Outcome | None) -> Sign:
    if outcome is None:
        return Sign.OTHER
    if not isinstance(outcome, Retryable):
        return Sign.ANSWERED
    if outcome.throttled:
        return Sign.THROTTLED
    return Sign.OVERLOADED if outcome.kind in _OVERLOADS else Sign.OTHER
