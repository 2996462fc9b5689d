"""Keeps the jobs in flight to one upstream, and tells how many more may start, in all and of one project and model."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter

from batchline.domain.outcomes import Failure, Retryable, Success
from batchline.domain.replies import FaultKind
from batchline.pipeline.dispatch.limiter import Limiter, Sign, Start
from batchline.pipeline.job import Job
from batchline.pipeline.routing import SyncCalls
from batchline.ports import Clock

_QUICK_SECONDS = 0.5
"""If answers are quicker than this, a slot is free again soon enough for any project."""
_MIN_LATENCY_SECONDS = 0.001
_FEW_SLOTS = 8
"""If there are fewer slots than this, none is kept free for other projects."""
_LATENCY_SMOOTHING = 0.1
"""The weight of the newest latency in the typical one."""
_STALLED_SECONDS, _SLOWER = 1.0, 2.0
"""If none of a lane's requests ended for this time, or if they take so many times as long as those of another lane, the
lane frees no slot soon enough for the other one."""
_UNAVAILABLE = frozenset({"http_503", "http_529"})
_OVERLOADS = frozenset({"http_408", "http_502", "http_504", FaultKind.TIMEOUT})
_REFUSALS = frozenset({Sign.THROTTLED, Sign.UNAVAILABLE, Sign.OVERLOADED, Sign.FAULT})

LaneName = tuple[str, str]
"""The project and the model of a lane."""

_lane_of = attrgetter("batch.project_id", "model.id")


class _Lane:
    """Tells how soon the requests in flight of one project and model end."""

    __slots__ = ("last_end", "typical_seconds")

    def __init__(self, now: float) -> None:
        self.last_end = now
        """The time at which one of its requests ended last, or at which its first one started."""
        self.typical_seconds = 0.0


class InFlight:
    """The jobs in flight. ``sync_calls`` take slots too."""

    def __init__(self, limiter: Limiter, *, clock: Clock, sync_calls: SyncCalls) -> None:
        self._limiter, self._clock = limiter, clock
        self.sync_calls = sync_calls
        self.breaks_are_refusals = False
        """Whether the upstream resets connections beyond a number in flight, so that a quick break may be a refusal."""
        self._starts: dict[Job, Start] = {}
        self._typical_seconds = math.inf
        self.by_project: Counter[str] = Counter()
        self.by_lane: Counter[LaneName] = Counter()
        self._lanes: dict[LaneName, _Lane] = {}
        """The lanes that have requests in flight."""
        self._lanes_of: Counter[str] = Counter()
        """The number of these lanes of each project."""
        self._last_end: dict[str, float] = {}
        """The time at which a request of each project in flight ended last, or at which its first one started."""
        self._beyond: dict[LaneName, int] = {}
        """The number of a lane's requests that may be in flight beyond the limit; 1 for lanes not named here."""

    def __len__(self) -> int:
        return len(self._starts)

    def __contains__(self, job: object) -> bool:
        return job in self._starts

    def __iter__(self) -> Iterator[Job]:
        return iter(self._starts)

    @property
    def room(self) -> int:
        """The number of lines that may still start, apart from the rate. Synchronous calls leave at least one slot."""
        room = self._limiter.room
        return room - self._slots_of_sync_calls(self._limiter.limit) if self.sync_calls.total else room

    def room_of(self, model: str) -> int:
        """Return the number of lines that may still start by the limit of their model. Synchronous calls leave one."""
        room = self._limiter.room_of(model)
        return room - self._slots_of_sync_calls(self._limiter.model(model).limit) if self.sync_calls.total else room

    def limit_of(self, project_id: str) -> int:
        """Return the number of lines, of all projects together, after which no further one of this project may start.

        The last slot below the cap is kept for projects that have nothing in flight or that free it again soon.
        """
        room = self.room
        below_cap = self._room_below_cap
        if below_cap > room or self._limiter.cap < _FEW_SLOTS or not self._is_slow(project_id):
            return room
        return min(room, below_cap - 1)

    def may_exceed(self, lanes: Iterable[LaneName]) -> list[LaneName]:
        """Return the lanes of which one line may start although the limit is reached, the next one first.

        A project or a model that has nothing in flight does not wait for the requests of others, which may take very
        long. Models may be names of one engine, so a project has no more of them in flight beyond the limit than its
        share is. No lane alone exceeds the limit of its model, and nothing exceeds the cap.
        """
        if self._room_below_cap <= 0:
            return []
        by_lane, beyond = self.by_lane, self._beyond
        exceeding = [lane for lane in lanes if by_lane[lane] < beyond.get(lane, 1)]
        if not exceeding:
            return exceeding
        most = self._share
        exceeding = [lane for lane in exceeding if self._may_have_another(lane, most)]
        return sorted(exceeding, key=lambda lane: (self.by_project[lane[0]], by_lane[lane]))

    def _may_have_another(self, lane: LaneName, most_lanes: int) -> bool:
        if lane in self._lanes:
            return self.by_lane[lane] < self._limiter.model(lane[1]).limit
        return self._lanes_of[lane[0]] < most_lanes

    def may_start_one_of(self, lane: LaneName) -> bool:
        """Return whether a line of a lane may start, below the limit or beyond it."""
        return self.limit_of(lane[0]) > 0 or bool(self.may_exceed([lane]))

    def lines_for(self, seconds: float) -> int:
        """Return the number of ready lines that keep every slot busy for that time, by the latency of lines lately."""
        limit = self._limiter.limit
        return max(limit, int(limit * seconds / max(self._typical_seconds, _MIN_LATENCY_SECONDS)))

    def start(self, jobs: list[Job]) -> None:
        now = self._clock.steady()
        for lane, group in groupby(jobs, key=_lane_of):
            (project_id, model), started = lane, list(group)
            self._starts.update(zip(started, self._limiter.start(model, len(started), now), strict=True))
            if not self.by_project[project_id]:
                self._last_end[project_id] = now
            if lane not in self._lanes:
                self._lanes[lane] = _Lane(now)
                self._lanes_of[project_id] += 1
            self.by_project[project_id] += len(started)
            self.by_lane[lane] += len(started)

    def finish_answered(self, answers: Sequence[tuple[Job, Success]], lane: LaneName, now: float) -> list[float]:
        """Remove the jobs of a lane that were answered, and return their latencies."""
        first, again, latencies = list[Start](), list[Start](), list[float]()
        for job, outcome in answers:
            start = self._starts.pop(job)
            latencies.append(now - start.at)
            if outcome.rate_limits is not None:
                self._limiter.on_announcement(start, outcome.rate_limits, now)
            (again if job.last_fault is not None and self._is_refusal(job.last_fault) else first).append(start)
        for starts, were_refused in ((first, False), (again, True)):
            if starts:
                self._limiter.end_answered(starts, now, project_id=lane[0], again=were_refused)
        for seconds in latencies:
            self._note_answer(lane, seconds, now)
        self._count_ends(lane, latencies, now)
        return latencies

    def finish(self, job: Job, outcome: Retryable | Failure | None, now: float) -> float:
        """Remove a job whose attempt failed, and return its latency. An outcome of None does not affect the limiter."""
        start, project_id = self._starts.pop(job), job.batch.project_id
        again = job.last_fault is not None and self._is_refusal(job.last_fault)
        if isinstance(outcome, Retryable):
            job.refusal_cost = self._limiter.end(
                start,
                self._sign_of(outcome),
                now,
                project_id=project_id,
                line=job.line_key,
                again=again,
                retry_after=outcome.retry_after,
                rate_limits=outcome.rate_limits,
            )
        else:
            job.refusal_cost = None
            sign = Sign.OTHER if outcome is None else Sign.ANSWERED
            self._limiter.end(start, sign, now, project_id=project_id, again=again)
        seconds = now - start.at
        lane = project_id, start.model
        if not isinstance(outcome, Retryable):
            self._note_answer(lane, seconds, now)
        self._count_ends(lane, [seconds], now)
        return seconds

    @property
    def _room_below_cap(self) -> int:
        room = self._limiter.room_below_cap
        return room - self._slots_of_sync_calls(self._limiter.limit) if self.sync_calls.total else room

    def _slots_of_sync_calls(self, limit: int) -> int:
        """Return how many of the slots of a limit synchronous calls take from lines.

        While another project has lines in flight, the calls of a project take no more than its even share: a client
        that reads its streams slowly must not slow down others. Calls are not held back, so more may be in flight.
        To know the limit takes time, so this is asked only while there are calls.
        """
        calls, projects = self.sync_calls, self.by_project
        taken = calls.total
        if projects:
            share = max(1, limit // (len(projects) + sum(name not in projects for name in calls.by_project)))
            if taken > share:
                taken = sum(
                    min(count, share) if len(projects) > (project_id in projects) else count
                    for project_id, count in calls.by_project.items()
                )
        return max(0, min(taken, limit - 1))

    def _is_slow(self, project_id: str) -> bool:
        now = self._clock.steady()
        return self._typical_seconds > _QUICK_SECONDS or now - self._last_end.get(project_id, now) > _QUICK_SECONDS

    @property
    def _share(self) -> int:
        """The even share of a project in the limit."""
        return max(1, self._limiter.limit // max(1, len(self.by_project)))

    def _share_of(self, lane: LaneName) -> int:
        """Return the even share of a lane in that of its project."""
        return max(1, self._share // self._lanes_of[lane[0]])

    def _note_answer(self, name: LaneName, seconds: float, now: float) -> None:
        if len(self._lanes) > 1 and self._another_keeps_its_slots(name, seconds, now):
            # It was answered beyond the limit while others keep their slots, so it may have more, up to its share.
            self._beyond[name] = min(self._share_of(name), 2 * self._beyond.get(name, 1))
        lane = self._lanes[name]
        before = lane.typical_seconds or seconds
        lane.typical_seconds = before + _LATENCY_SMOOTHING * (seconds - before)

    def _another_keeps_its_slots(self, name: LaneName, seconds: float, now: float) -> bool:
        """Return whether a lane waits for slots of another one that has more than its share and frees them too slowly.

        If only the limit of its model is reached, it waits for other lanes of this model alone.
        """
        any_model = self._limiter.room <= 0
        if not any_model and self._limiter.room_of(name[1]) > 0:
            return False
        return any(
            (now - lane.last_end > _STALLED_SECONDS or lane.typical_seconds > _SLOWER * seconds)
            and self.by_lane[other] > self._share_of(other)
            for other, lane in self._lanes.items()
            if other != name and (any_model or other[1] == name[1])
        )

    def _count_ends(self, lane: LaneName, latencies: Sequence[float], now: float) -> None:
        typical = latencies[0] if self._typical_seconds == math.inf else self._typical_seconds
        for seconds in latencies:
            typical += _LATENCY_SMOOTHING * (seconds - typical)
        self._typical_seconds = typical
        project_id = lane[0]
        self._last_end[project_id] = self._lanes[lane].last_end = now
        self.by_lane[lane] -= len(latencies)
        self.by_project[project_id] -= len(latencies)
        if self.by_lane[lane]:
            return
        del self._lanes[lane], self.by_lane[lane]
        self._lanes_of[project_id] -= 1
        if self._limiter.room > 0:
            self._beyond = {
                name: lines
                for name, lines in self._beyond.items()
                if name in self._lanes or self._limiter.room_of(name[1]) <= 0
            }
        if not self.by_project[project_id]:
            del self._last_end[project_id], self.by_project[project_id], self._lanes_of[project_id]

    def _is_refusal(self, fault: Retryable) -> bool:
        return self._sign_of(fault) in _REFUSALS

    def _sign_of(self, outcome: Retryable) -> Sign:
        if outcome.throttled:
            return Sign.THROTTLED
        if outcome.kind in _UNAVAILABLE:
            return Sign.UNAVAILABLE
        if outcome.kind in _OVERLOADS:
            return Sign.OVERLOADED
        if outcome.kind == FaultKind.BROKEN and not self.breaks_are_refusals:
            return Sign.OTHER
        return Sign.FAULT if outcome.unavailable else Sign.OTHER
