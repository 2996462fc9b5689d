"""Keeps the jobs in flight to one upstream, and tells how many more may start, in all and of one project."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from batchline.domain.outcomes import Outcome, Retryable, Success
from batchline.domain.replies import FaultKind
from batchline.pipeline.dispatch.limiter import Limiter, Sign, Start
from batchline.pipeline.job import Job
from batchline.ports import Clock

_QUICK_SECONDS = 0.5
"""If answers are quicker than this, a slot is free again soon enough for any project."""
_MIN_LATENCY_SECONDS = 0.001
_FEW_SLOTS = 8
"""If there are fewer slots than this, none is kept free for other projects."""
_LATENCY_SMOOTHING = 0.1
"""The weight of the newest latency in the typical one."""
_STALLED_SECONDS = 1.0
"""If none of a project's requests ended for this time, the project is stalled and frees no slot for others."""
_UNAVAILABLE = frozenset({"http_503", "http_529"})
_OVERLOADS = frozenset({"http_502", "http_504", FaultKind.TIMEOUT})
_REFUSALS = frozenset({Sign.THROTTLED, Sign.UNAVAILABLE, Sign.FAULT})


class InFlight:
    """The jobs in flight. ``count_sync_calls`` returns how many slots are taken by synchronous calls."""

    def __init__(self, limiter: Limiter, *, clock: Clock, count_sync_calls: Callable[[], int]) -> None:
        self._limiter, self._clock = limiter, clock
        self._count_sync_calls = count_sync_calls
        self._starts: dict[Job, Start] = {}
        self._typical_seconds = math.inf
        self.by_project: Counter[str] = Counter()
        self._last_end: dict[str, float] = {}
        """The time at which a request of each project in flight ended last, or at which its first one started."""
        self._beyond: dict[str, int] = {}
        """The number of a project's requests that may be in flight beyond the limit; 1 for projects not named here."""

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
        """The number of lines that may still start, apart from the rate. Synchronous calls leave at least one slot."""
        return self._limiter.room - self._slots_of_sync_calls

    def limit_of(self, project_id: str) -> int:
        """Return the number of lines, of all projects together, after which no further one of this project may start.

        The last slot below the cap is kept for projects that have nothing in flight or that free it again soon.
        """
        room = self.room
        below_cap = self._limiter.room_below_cap - self._slots_of_sync_calls
        if below_cap > room or self._limiter.cap < _FEW_SLOTS or not self._is_slow(project_id):
            return room
        return min(room, below_cap - 1)

    def may_exceed(self, project_ids: Iterable[str]) -> set[str]:
        """Return the projects of which one line may start although the limit is reached.

        A project that has nothing in flight does not wait for the requests of others, which may take very long. The
        cap is never exceeded.
        """
        if self._limiter.room_below_cap - self._slots_of_sync_calls <= 0:
            return set()
        return {name for name in project_ids if self.by_project[name] < self._beyond.get(name, 1)}

    def may_start_one_of(self, project_id: str) -> bool:
        """Return whether a line of a project may start, below the limit or beyond it."""
        return self.limit_of(project_id) > 0 or bool(self.may_exceed([project_id]))

    def lines_for(self, seconds: float) -> int:
        """Return the number of ready lines that keep every slot busy for that time, by the latency of lines lately."""
        limit = self._limiter.limit
        return max(limit, int(limit * seconds / max(self._typical_seconds, _MIN_LATENCY_SECONDS)))

    def start(self, jobs: list[Job]) -> None:
        now = self._clock.steady()
        for model, group in groupby(jobs, key=lambda job: job.model.id):
            started = list(group)
            self._starts.update(zip(started, self._limiter.start(model, len(started), now), strict=True))
        for job in jobs:
            project_id = job.batch.project_id
            if not self.by_project[project_id]:
                self._last_end[project_id] = now
            self.by_project[project_id] += 1

    def finish(self, job: Job, outcome: Outcome | None, now: float) -> float:
        """Remove a job whose attempt ended, and return its latency. An outcome of None does not affect the limiter."""
        start, project_id = self._starts.pop(job), job.batch.project_id
        again = job.last_fault is not None and _sign_of(job.last_fault) in _REFUSALS
        if isinstance(outcome, Retryable):
            job.refusal_cost = self._limiter.end(
                start,
                _sign_of(outcome),
                now,
                project_id=project_id,
                line=job,
                again=again,
                retry_after=outcome.retry_after,
                rate_limits=outcome.rate_limits,
            )
        elif isinstance(outcome, Success):
            self._limiter.end(
                start, Sign.ANSWERED, now, project_id=project_id, again=again, rate_limits=outcome.rate_limits
            )
        else:
            job.refusal_cost = None
            sign = Sign.OTHER if outcome is None else Sign.ANSWERED
            self._limiter.end(start, sign, now, project_id=project_id, again=again)
        self._count_end(project_id, now)
        seconds = now - start.at
        before = seconds if self._typical_seconds == math.inf else self._typical_seconds
        self._typical_seconds = before + _LATENCY_SMOOTHING * (seconds - before)
        return seconds

    @property
    def _slots_of_sync_calls(self) -> int:
        calls = self._count_sync_calls()
        return max(0, min(calls, self._limiter.limit - 1)) if calls else 0

    def _is_slow(self, project_id: str) -> bool:
        now = self._clock.steady()
        return self._typical_seconds > _QUICK_SECONDS or now - self._last_end.get(project_id, now) > _QUICK_SECONDS

    def _count_end(self, project_id: str, now: float) -> None:
        share = max(1, self._limiter.limit // len(self._last_end))
        if self._limiter.room <= 0 and self._another_stalls(project_id, share, now):
            # The project was answered beyond the limit while others hang, so it may have more, up to its share.
            self._beyond[project_id] = min(share, 2 * self._beyond.get(project_id, 1))
        self.by_project[project_id] -= 1
        if self.by_project[project_id]:
            self._last_end[project_id] = now
        else:
            del self._last_end[project_id], self.by_project[project_id]
            if self._limiter.room > 0:
                self._beyond.pop(project_id, None)

    def _another_stalls(self, project_id: str, share: int, now: float) -> bool:
        """Return whether another project has more than its share, and none of its requests ends."""
        return any(
            now - last_end > _STALLED_SECONDS and self.by_project[name] > share
            for name, last_end in self._last_end.items()
            if name != project_id
        )


def _sign_of(outcome: Retryable) -> Sign:
    if outcome.throttled:
        return Sign.THROTTLED
    if outcome.kind in _UNAVAILABLE:
        return Sign.UNAVAILABLE
    if outcome.kind in _OVERLOADS:
        return Sign.OVERLOADED
    return Sign.FAULT if outcome.unavailable else Sign.OTHER
