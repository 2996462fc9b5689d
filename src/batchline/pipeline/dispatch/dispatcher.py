"""Sends lines to one upstream, as many at once as its limiter allows, and decides what each answer means.

A job is in one place at a time: ready, in flight, waiting for its next attempt (which holds no slot), in quarantine, or
overdue. It leaves with an outcome for the recorder, or without one if its batch was stopped before it ran.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Set
from itertools import groupby
from typing import cast

from batchline.domain.chat import check_request, with_upstream_name
from batchline.domain.endpoints import CHAT
from batchline.domain.engine_queue import QueueLength
from batchline.domain.estimates import FREE, estimated_cost
from batchline.domain.fleet import MAX_REPORTED_MODELS, UpstreamLoad
from batchline.domain.models import Catalog
from batchline.domain.money import Tariff
from batchline.domain.outcomes import KEY_UNAVAILABLE, Failure, Outcome, Retryable, Success
from batchline.domain.records import Lane
from batchline.domain.replies import FaultKind
from batchline.domain.retry import RetryPolicy
from batchline.domain.states import Stop
from batchline.domain.waiting import WaitReason
from batchline.pipeline.dispatch.attempts import Attempts
from batchline.pipeline.dispatch.circuit_breaker import Breakers, CircuitBreaker
from batchline.pipeline.dispatch.completion import Completer, Failover, JobTarget
from batchline.pipeline.dispatch.demand import Demand
from batchline.pipeline.dispatch.in_flight import InFlight, LaneName
from batchline.pipeline.dispatch.limiter import Limiter
from batchline.pipeline.dispatch.quarantine import WINDOW_SECONDS, Quarantine
from batchline.pipeline.dispatch.queues import PROBES_IN_A_ROW, ReadyQueue, RetryQueue
from batchline.pipeline.dispatch.resets import Resets
from batchline.pipeline.dispatch.waiting import Waiting
from batchline.pipeline.job import HeldBatch, Job
from batchline.pipeline.record import Recorder
from batchline.pipeline.token_limit import TokenLimit
from batchline.ports import Random, StoreClock, Tracer, Upstream
from batchline.telemetry.metrics import Metrics

_SHORTEST_RATE_WAIT_SECONDS = 0.001
"""Event loops count milliseconds, so a shorter wait would be none. The starts that a wait delayed follow at once."""

_DUE_LIFETIME_SECONDS = 0.1
"""The time for which the store time that decides about windows is reused. To read it for every line would cost a
microsecond."""

_SHORTEST_PROBE_WAIT_SECONDS = 0.1
"""A probe may be due while nothing can start. This wait keeps the timers from a busy loop until then."""

_LANE_CHECK_SECONDS = 1.0
"""The time between two checks, during a pause, for another project or model to probe with."""

_OVERDUE_CHECK_SECONDS = 1.0
"""The time between two checks whether overdue lines are still past their window: the clock may have been wrong."""


class Dispatcher:
    """Everything that happens to the lines of one upstream in this process.

    ``count_sync_calls`` returns how many slots synchronous calls take. ``find_alternative`` returns the dispatcher of
    another upstream that serves a job's model and is available.
    """

    def __init__(
        self,
        name: str,
        *,
        upstream: Upstream,
        catalog: Catalog,
        token_limit: TokenLimit,
        tariff: Tariff,
        recorder: Recorder,
        breakers: Breakers,
        policy: RetryPolicy,
        limiter: Limiter,
        clock: StoreClock,
        random: Random,
        metrics: Metrics,
        count_sync_calls: Callable[[], int],
        on_line_dropped: Callable[[], None],
        on_demand: Callable[[], None],
        find_alternative: Callable[[Job], JobTarget | None],
        tracer: Tracer | None = None,
    ) -> None:
        self._name, self._tracer = name, tracer
        self._recorder, self._breakers, self._limiter = recorder, breakers, limiter
        self._catalog, self._policy, self._tariff = catalog, policy, tariff
        self._clock, self._random, self._metrics = clock, random, metrics
        self._quarantine, self._resets = Quarantine(), Resets()
        self._ready = ReadyQueue()
        self._retries = RetryQueue()
        self._paused_models: Mapping[str, CircuitBreaker] = {}
        self._overdue: list[Job] = []
        """Jobs past their batch's window. They do not start, and end when the store says that the batch expired."""
        self._unfunded_projects: set[str] = set()
        """Projects whose next line waits until requests in flight release what they hold of the same budget."""
        self._held_projects: Set[str] = self._unfunded_projects
        """Projects of which nothing may start now: these, and those whose lines have just broken."""
        self._unfunded_jobs: dict[str, deque[Job]] = {}
        """Jobs, by batch, that wait until lines in flight release what they hold of the batch's own limit."""
        self._due, self._due_until = 0.0, -math.inf
        self._rate_timer: asyncio.Handle | None = None
        self._rate_timer_at = 0.0
        self._looked_at = 0.0
        """The time at which it was last decided which jobs may start. The timer for the others is computed for the same
        time. Otherwise a job that may start a microsecond later would get no timer."""
        self._timers_changed = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._attempts = Attempts(upstream, name=name, token_limit=token_limit, clock=clock, group=self._group)
        self._in_flight = InFlight(limiter, clock=clock, count_sync_calls=count_sync_calls)
        self._completer = Completer(recorder=recorder, tariff=tariff, on_line_dropped=on_line_dropped)
        self._failover = Failover(ready=self._ready, completer=self._completer, find_alternative=find_alternative)
        self._demand = Demand(
            ready=self._ready,
            retries=self._retries,
            in_flight=self._in_flight,
            limiter=limiter,
            breakers=breakers,
            completer=self._completer,
            on_demand=on_demand,
        )
        self._waiting = Waiting(
            ready=self._ready,
            retries=self._retries,
            quarantine=self._quarantine,
            in_flight=self._in_flight,
            limiter=limiter,
            breakers=breakers,
            recorder=recorder,
            clock=clock,
        )

    async def run(self) -> None:
        try:
            async with self._group:
                self._group.create_task(self._run_timers())
                self._group.create_task(self._collect_outcomes())
        finally:
            self._attempts.cancel()

    @property
    def wanted_lines(self) -> int:
        """The number of further lines that may be claimed."""
        return self._demand.wanted_lines

    @property
    def satisfied_lanes(self) -> set[Lane]:
        """The projects and models that need no more lines."""
        return self._demand.satisfied_lanes

    @property
    def paused(self) -> bool:
        """Whether the whole upstream is paused."""
        return self._breakers.paused

    def is_paused(self, model: str) -> bool:
        """Return whether a model of the upstream is paused, or all of it."""
        return self._breakers.is_paused(model)

    @property
    def needs_probe_job(self) -> bool:
        """Whether the upstream is paused and no job is here to probe it with."""
        return self.paused and not self._ready and not self._in_flight and not self._quarantine.occupied

    @property
    def load(self) -> float:
        """The number of jobs here for each slot."""
        return (self.in_flight + self.waiting) / max(1, self._limiter.limit)

    @property
    def held_bytes(self) -> int:
        """Bytes of the bodies of jobs that have no outcome yet."""
        return self._completer.bytes_by_project.total()

    @property
    def projects(self) -> set[str]:
        """The projects of the jobs that have no outcome yet."""
        return set(self._completer.bytes_by_project)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def limit(self) -> int:
        """The number of lines that may be in flight now."""
        return self._limiter.limit

    @property
    def cap(self) -> int:
        """The most lines that may be in flight: this worker's share of the configured cap."""
        return self._limiter.cap

    @property
    def rate_limit(self) -> float | None:
        """The number of lines that may start in a second now; None while that is not limited."""
        return self._limiter.rate

    @property
    def upstream_load(self) -> UpstreamLoad:
        queues = self._waiting.queues
        attempts, seconds = self._metrics.upstream_seconds.totals(self._name)
        return UpstreamLoad(
            in_flight=self.in_flight,
            sync_calls=self._in_flight.sync_calls,
            limit=self.limit,
            pauses=self._breakers.pauses[:MAX_REPORTED_MODELS],
            hold=self._waiting.hold,
            queues=queues,
            projects=dict(self._in_flight.by_project) if queues else {},
            rate=self.rate_limit,
            attempts=attempts,
            attempt_seconds=round(seconds, 3),
        )

    @property
    def retrying_by_batch(self) -> Counter[str]:
        """The number of lines of each batch that wait for their next attempt."""
        return self._retries.by_batch + self._quarantine.by_batch if self._quarantine else self._retries.by_batch

    def count_waiting(self, reason: WaitReason) -> int:
        """Return the number of lines here that wait for a reason."""
        return self._waiting.count(reason)

    def on_queue_length(self, length: QueueLength) -> None:
        """Pass the queue length of the engine behind the upstream to the limiter."""
        self._limiter.on_queue_length(length, self._clock.steady())
        self.pump()

    def set_cap(self, cap: int) -> None:
        self._limiter.set_cap(cap)
        self.pump()

    @property
    def waiting(self) -> int:
        """The number of lines that start when a slot is free or their wait ends.

        Lines without money and those of a batch past its window are not among them: they are no load of the upstream.
        """
        return len(self._ready) + len(self._retries)

    @property
    def in_flight_by_batch(self) -> Counter[str]:
        return Counter(job.batch.id for job in self._in_flight)

    def add(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._completer.acquire(job)
            self._admit(job)
        self.pump()
        self._demand.update()

    def stop_batch(self, batch: HeldBatch, stop: Stop) -> None:
        """Start no more attempts of a batch that was cancelled or has expired."""
        batch.stop = batch.stop or stop
        for job in self._withdraw(lambda job: job.batch is batch):
            self._completer.end_without_attempt(job)

    def revoke_key(self, batch: HeldBatch) -> None:
        batch.key_revoked = True
        for job in self._withdraw(lambda job: job.batch is batch):
            self._completer.complete(job, KEY_UNAVAILABLE)

    def drop_lost(self) -> None:
        """Drop the jobs of shards that another worker holds now."""
        for job in self._withdraw(lambda job: job.shard.lost):
            self._completer.drop(job)

    def drop_withheld(self) -> None:
        """Drop the jobs of shards whose batch is held. They run again if it is released."""
        for job in self._withdraw(lambda job: job.shard.withheld):
            self._completer.drop_unrecorded(job)

    def drain(self) -> None:
        """Start no further line. Lines in flight may finish. Other workers will run the rest."""
        self._completer.draining = True
        for job in self._withdraw(lambda _: True):
            self._completer.drop(job)

    def on_funds_changed(self) -> None:
        """Try the lines again that wait because too little money was left."""
        if self._unfunded_projects or self._unfunded_jobs:
            self._unfunded_projects.clear()
            for batch_id in list(self._unfunded_jobs):
                self._retry_unfunded(batch_id)
            self.pump()

    def pump(self) -> None:
        """Start ready jobs, as many as may start now."""
        touched: set[str] = set()
        while jobs := self._take():
            due = self._read_due()
            started = [job for job in jobs if self._start_or_park(job, due)]
            if self._breakers.paused or self._paused_models:
                for job in started:
                    self._note_probe(job)
            self._in_flight.start(started)
            for job in started:
                self._attempts.send(job)
            touched.update([job.batch.project_id for job in jobs])
        self._set_rate_timer()
        self._demand.on_lines_taken(touched)

    @property
    def _some_could_start(self) -> bool:
        return not self._completer.draining and (bool(self._ready) or self._quarantine.occupied)

    def _take(self) -> list[Job]:
        """Take jobs that may start now. Suspects start first, and may have to be tried with nothing else in flight."""
        self._looked_at = self._clock.steady()
        if not self._some_could_start or self._recorder.full or self._quarantine.crash_seen:
            return []
        broken = self._quarantine.held_projects
        self._held_projects = self._unfunded_projects | broken if broken else self._unfunded_projects
        if self._breakers.paused or self._paused_models:
            self._end_overdue_pauses()
        if self._breakers.paused and self._ready:
            return self._take_probe(self._breakers.upstream)
        if self._quarantine.occupied and ((jobs := self._take_suspect()) or self._quarantine.holds_all):
            return jobs
        if jobs := self._take_model_probe() or self._take_despite_block():
            return jobs
        room = self._in_flight.room
        if room > 0 and (jobs := self._take_ready(room)):
            return jobs
        return self._take_beyond_limit()

    def _end_overdue_pauses(self) -> None:
        pauses = len(self._breakers.pauses)
        self._breakers.end_overdue_pauses()
        if len(self._breakers.pauses) < pauses:
            self._paused_models = self._breakers.paused_models
            self._limiter.on_outage_over(self._looked_at)

    def _take_ready(self, limit: int) -> list[Job]:
        limit_of = self._in_flight.limit_of

        def limit_unless_held(project_id: str) -> int:
            return 0 if project_id in self._held_projects else limit_of(project_id)

        return self._ready.take(
            limit,
            in_flight=self._in_flight.by_project,
            in_flight_of_lane=self._in_flight.by_lane,
            limit_of=limit_unless_held if self._held_projects else limit_of,
            allowance_of=lambda model: min(self._allowance_of(model), self._in_flight.room_of(model)),
        )

    def _take_beyond_limit(self) -> list[Job]:
        """Take a job of a project or a model that does not wait for the slots of others."""
        for project_id, model in self._in_flight.may_exceed(self._ready.lanes()):
            if project_id not in self._held_projects and self._allowance_of(model) > 0:
                return self._ready.take_lane(project_id, model)
        return []

    def _allowance_of(self, model: str) -> int:
        return 0 if model in self._paused_models else self._limiter.allowance(model, self._looked_at)

    def _take_probe(self, breaker: CircuitBreaker, model: str | None = None) -> list[Job]:
        """Take a job to probe a paused upstream or model with, from the project and model whose turn it is."""
        lane = breaker.next_lane(
            lane for lane in self._ready.lanes() if model in (None, lane[1]) and self._in_flight.may_start_one_of(lane)
        )
        return [] if lane is None else self._ready.take_probe(*lane)

    def _take_model_probe(self) -> list[Job]:
        """Take a job to probe one of the paused models with."""
        for model, breaker in self._paused_models.items():
            if jobs := self._take_probe(breaker, model):
                return jobs
        return []

    def _take_despite_block(self) -> list[Job]:
        """Take a job of a model that others must wait for, because of Retry-After, if its project was not refused."""
        now = self._looked_at
        for project_id, model in self._ready.lanes() if self._limiter.is_any_blocked(now) else ():
            if (
                model not in self._paused_models
                and project_id not in self._held_projects
                and self._limiter.may_try(model, project_id, now)
                and self._in_flight.may_start_one_of((project_id, model))
            ):
                return self._ready.take_lane(project_id, model)
        return []

    def _take_suspect(self) -> list[Job]:
        """Take a suspect that may start now. While the upstream is paused, it is a probe."""
        if self._in_flight.room <= 0 or (self._breakers.paused and self._breakers.upstream.seconds_to_probe):
            return []
        suspect = self._quarantine.start_next(in_flight=self.in_flight)
        return [] if suspect is None else [suspect]

    def _note_probe(self, job: Job) -> None:
        """Schedule the next probe, if this job is one."""
        lane = job.batch.project_id, job.model.id
        if self._breakers.paused:
            self._breakers.upstream.begin_probe(lane, job.line_key)
        elif job.model.id in self._paused_models:
            self._paused_models[job.model.id].begin_probe(lane, job.line_key)

    def _set_rate_timer(self) -> None:
        """Set a timer for the time at which the rate lets the next job start, if ready jobs wait for that."""
        if not self._some_could_start or self._breakers.paused:
            return
        waits = [wait for model in self._ready.by_model if (wait := self._limiter.wait(model, self._looked_at)) > 0]
        if not waits:
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + max(min(waits), _SHORTEST_RATE_WAIT_SECONDS)
        if self._rate_timer is None or due < self._rate_timer_at:
            if self._rate_timer is not None:
                self._rate_timer.cancel()
            self._rate_timer, self._rate_timer_at = loop.call_at(due, self._on_rate_timer), due

    def _on_rate_timer(self) -> None:
        self._rate_timer = None
        self.pump()

    def _read_due(self) -> float:
        """Return the store time that decides about windows, at most 0.1 s old."""
        now = self._clock.steady()
        if now >= self._due_until:
            self._due, self._due_until = self._clock.due(), now + _DUE_LIFETIME_SECONDS
        return self._due

    def _start_or_park(self, job: Job, due: float) -> bool:
        """Return whether a job may start. One that may not is ended, or waits for its batch to expire or for money."""
        if due >= job.batch.expires_at:
            self._overdue.append(job)
            self._timers_changed.set()
        elif not self._completer.end_if_stopped(job) and (job.estimate is FREE or self._hold(job)):
            return True
        self._quarantine.finish(job)
        return False

    def _hold(self, job: Job) -> bool:
        """Hold the estimated cost of a job against its budget, and return whether the job may start.

        If too little is left, the job waits for the requests that hold the rest, and fails if there are none. A probe
        or a suspect starts in any case: it is one line, and others wait for it.
        """
        held = job.batch.budget.hold(job.estimate)
        if isinstance(held, int) or job.suspect or self._breakers.is_paused(job.model.id):
            job.held = held if isinstance(held, int) else 0
            return True
        if not held.held:
            self._completer.complete(job, held.failure)
        elif held.of_batch:
            self._unfunded_jobs.setdefault(job.batch.id, deque()).append(job)
        else:
            self._unfunded_projects.add(job.batch.project_id)
            self._ready.add(job, first=True)
        return False

    def _release(self, job: Job) -> None:
        job.batch.budget.release(job.held)
        job.held = 0
        self._unfunded_projects.clear()
        if job.batch.id in self._unfunded_jobs:
            self._retry_unfunded(job.batch.id)

    def _retry_unfunded(self, batch_id: str) -> None:
        """Make lines ready that wait for money of their batch: two of them, or all if no line of it is in flight."""
        waiting = self._unfunded_jobs.pop(batch_id)
        number = 2 if any(job.batch.id == batch_id for job in self._in_flight) else len(waiting)
        for _ in range(min(number, len(waiting))):
            self._make_ready(waiting.popleft())
        if waiting:
            self._unfunded_jobs[batch_id] = waiting

    async def _collect_outcomes(self) -> None:
        while True:
            outcomes = await self._attempts.outcomes()
            now = self._clock.steady()
            for lane, ended in groupby(outcomes, key=_answered_lane):
                if lane is None:
                    for job, outcome in ended:
                        self._finish_failed(job, cast(Retryable | Failure, outcome), now)
                else:
                    self._finish_answered(cast(list[tuple[Job, Success]], list(ended)), lane, now)
            self.pump()

    def _finish_answered(self, answers: list[tuple[Job, Success]], lane: LaneName, now: float) -> None:
        """Finish attempts of one lane that were answered. What is the same for all of them is done once."""
        model = lane[1]
        label = self._metrics.model_labels.on_answer(model)
        latencies = self._in_flight.finish_answered(answers, lane, now)
        self._metrics.upstream_seconds.observe(latencies, self._name, label)
        self._count_attempts(label, "success", len(answers))
        paused = self._breakers.is_paused(model)
        for (job, outcome), seconds in zip(answers, latencies, strict=True):
            self._end_attempt(job, outcome, seconds=seconds, paused=paused)
        self._on_upstream_answers([job for job, _ in answers])
        for job, outcome in answers:
            self._completer.complete(job, outcome)

    def _finish_failed(self, job: Job, outcome: Retryable | Failure, now: float) -> None:
        evidence = outcome if self._is_evidence(job) else None
        model = job.model.id
        label = self._metrics.model_labels.of(model)
        seconds = self._in_flight.finish(job, evidence, now)
        self._metrics.upstream_seconds.observe((seconds,), self._name, label)
        self._end_attempt(job, outcome, seconds=seconds, paused=self._breakers.is_paused(model))
        if isinstance(outcome, Retryable):
            (self._on_break if outcome.kind == FaultKind.BROKEN else self._on_fault)(job, outcome)
        elif outcome.unavailable:
            self._on_fault(job, Retryable.from_failure(outcome))
        elif job.within_limit:
            self._count_attempts(label, "refused")
            self._on_upstream_answers([job])
            self._completer.complete(job, outcome)
        else:
            # The input was too long, so nothing was sent.
            self._completer.complete(job, outcome)

    def _end_attempt(self, job: Job, outcome: Outcome, *, seconds: float, paused: bool) -> None:
        """End what an attempt held or was: its trace, its money, a trial of a suspect, a probe of a pause."""
        if job.trace is not None and job.within_limit:
            job.trace.on_attempt(outcome, upstream=self._name, model=job.model, body=job.body, seconds=seconds)
        if job.held:
            self._release(job)
        if self._quarantine.is_trying:
            self._quarantine.finish(job)
        if paused:
            self._breakers.end_probe(job.model.id, job.line_key)

    def _count_attempts(self, label: str, result: str, count: int = 1) -> None:
        self._metrics.attempts.counts[self._name, label, result] += count

    def _is_evidence(self, job: Job) -> bool:
        """Return whether a fault of a job says how much the upstream can take.

        It does not if the upstream is unavailable, or if it is known that the line fails alone.
        """
        return self._breakers.is_flowing(job.model.id) and not self._is_lone_failure(job)

    def _is_lone_failure(self, job: Job) -> bool:
        """Return whether it is known that a job fails by itself."""
        return job.fails_alone and self._breakers.ignores_lone(job.model.id)

    def _on_break(self, job: Job, fault: Retryable) -> None:
        job.last_fault = fault
        job.note_fault(answers=self._breakers.answers_of(job.model.id))
        window_was_open = self._quarantine.window_open
        is_own = job.refusal_cost is not None or self._is_lone_failure(job)
        job.suspect = job.suspect and not is_own
        if not is_own and self._quarantine.note_break(job, self._clock.steady(), beside=self._in_flight):
            self._resets.on_break(job, beside=self._in_flight, is_first=not window_was_open)
            if not window_was_open:
                self._group.create_task(self._decide_breaks())
            return
        if not (is_own or job.breaks_alone or self._in_flight or self._quarantine.alive):
            # If the upstream crashed, this line is the cause, since no other was in flight.
            job.suspect = True
            self._breakers.upstream.on_crash()
        self._on_fault(job, fault)

    async def _decide_breaks(self) -> None:
        """Wait until the window of breaks closes, then treat them as one crash or as a fault of each line."""
        await self._clock.sleep(WINDOW_SECONDS)
        verdict = self._quarantine.close_window(self._clock.steady(), in_flight=self._in_flight)
        self._resets.on_breaks_over(survived=verdict.survived)
        self._in_flight.breaks_are_refusals = self._resets.known
        if verdict.crashed:
            self._breakers.upstream.on_crash()
        self._quarantine.suspect([job for job in verdict.suspects if not self._completer.end_if_stopped(job)])
        for job in verdict.own:
            self._on_fault(job, _last_fault(job))
        self._timers_changed.set()
        self.pump()

    def _end_quarantine(self) -> None:
        """Let the suspects run as usual, because none of them is the cause of the breaks."""
        for job in self._quarantine.withdraw(lambda _: True):
            job.suspect = False
            self._make_ready(job)

    def _on_fault(self, job: Job, fault: Retryable) -> None:
        result = "throttled" if job.is_refused_by(fault) else "fault"
        self._count_attempts(self._metrics.model_labels.of(job.model.id), result)
        if fault.kind == FaultKind.REFUSED:
            self._quarantine.on_refused(self._clock.steady())
        if not fault.unavailable:
            self._on_upstream_answers([job])
        elif not (job.is_refused_by(fault) and self._limiter.is_blocked(job.model.id, self._clock.steady())):
            # An upstream that said when it accepts lines again is not unavailable.
            self._on_unavailable(job, fault)
        self._retry_or_fail(job, fault)
        if self._breakers.is_paused(job.model.id):
            self._timers_changed.set()

    def _on_unavailable(self, job: Job, fault: Retryable) -> None:
        model, was_paused = job.model.id, self._breakers.is_paused(job.model.id)
        self._breakers.on_unavailable(job, fault, last_attempt=self._is_last_attempt(job, fault))
        if self._breakers.is_paused(model) and not was_paused:
            self._paused_models = self._breakers.paused_models
            self._failover.move_all(is_paused=self._breakers.is_paused)

    def _on_upstream_answers(self, jobs: list[Job]) -> None:
        """Note that the upstream answered lines of one model."""
        if self._quarantine.awaits_answers or self._resets.awaits_answers:
            for job in jobs:
                self._note_survival(job)
        for job in jobs:
            job.suspect = False
        self.on_real_answers(jobs[0].model.id, len(jobs))

    def _note_survival(self, job: Job) -> None:
        """Note that the upstream answered a line after connections broke."""
        if self._quarantine.awaits_answers:
            self._quarantine.on_answer(job, self._clock.steady())
        if self._resets.on_answer(job):
            self._in_flight.breaks_are_refusals = True
            self._end_quarantine()

    def on_real_answers(self, model: str, count: int = 1) -> None:
        """Note that the upstream answered lines or synchronous calls of a model: it is available."""
        if self._breakers.on_real_answers(model, count):
            self._paused_models = self._breakers.paused_models
            self._limiter.on_outage_over(self._clock.steady())
            self._timers_changed.set()
            self._demand.update()
        else:
            self._demand.on_upstream_answer()

    def _retry_or_fail(self, job: Job, fault: Retryable) -> None:
        job.last_fault = fault
        forgiven = fault.unavailable and self._breakers.forgives(job.model.id, fault.kind)
        if not forgiven:
            attempts, refusals = job.cost_of(fault)
            job.tries += 1
            job.attempts += attempts
            job.throttles += refusals
        if self._completer.end_if_stopped(job):
            return
        if forgiven:
            job.probes += 1
            self._make_ready(job, first=job.probes % PROBES_IN_A_ROW != 0)
        elif fault.final or job.throttles > self._policy.max_throttles or job.attempts >= self._policy.max_attempts:
            self._completer.complete(job, fault.as_failure(job.tries))
        else:
            self._wait_for_retry(job, fault)

    def _is_last_attempt(self, job: Job, fault: Retryable) -> bool:
        attempts, refusals = job.cost_of(fault)
        if attempts:
            return job.attempts + attempts >= self._policy.max_attempts
        return refusals > 0 and job.throttles + refusals > self._policy.max_throttles

    def _wait_for_retry(self, job: Job, fault: Retryable) -> None:
        refused, now = job.is_refused_by(fault), self._clock.steady()
        limited = refused and self._limiter.model(job.model.id).is_refused
        self._metrics.retries.labels("throttled" if refused else "fault").inc()
        wait = self._policy.wait(
            tries=max(1, int(job.throttles) if refused else job.attempts),
            retry_after=fault.retry_after,
            jitter=self._random.uniform(0, 1),
            limited=limited,
        )
        job.yields_until = now + self._policy.yield_seconds(job.throttles) if limited else now
        self._retries.add(job, until=now + wait)
        self._timers_changed.set()

    def _admit(self, job: Job) -> None:
        """Check a job against the rules of its model. One that breaks them ends here and takes no slot."""
        checked = check_request(
            job.body, endpoint=job.batch.endpoint, project_id=job.batch.project_id, catalog=self._catalog
        )
        if isinstance(checked, Failure):
            if not self._completer.end_if_stopped(job):
                self._completer.complete(job, checked)
            return
        job.model, job.body = checked, with_upstream_name(job.body, checked)
        if self._tariff.metered:
            job.estimate = estimated_cost(job.body, checked, self._tariff, synchronous=False)
        job.within_limit = checked.max_tokens is None or job.batch.endpoint != CHAT
        if self._tracer is not None:
            job.trace = self._tracer.sample(job.batch.id, job.line.index, endpoint=job.batch.endpoint)
        self._make_ready(job)

    def _make_ready(self, job: Job, *, first: bool = False) -> None:
        if self._completer.end_if_stopped(job):
            return
        paused = self._breakers.is_paused(job.model.id)
        if paused and self._failover.move(job):
            return
        if job.suspect:
            self._quarantine.suspect([job])
        else:
            self._ready.add(job, first=first)
        if paused:
            self._timers_changed.set()

    def accept(self, job: Job) -> None:
        """Run a job that another upstream of its model had."""
        self._completer.acquire(job)
        job.within_limit = job.model.max_tokens is None or job.batch.endpoint != CHAT
        self._make_ready(job)
        self.pump()

    def lend_job(self, upstream: str) -> Job | None:
        """Give away one ready job that another upstream could run, to be its probe."""
        return self._failover.lend_job(upstream)

    def _withdraw(self, condition: Callable[[Job], bool]) -> list[Job]:
        """Take the jobs that meet a condition out of every queue."""
        withdrawn = [job for job in self._overdue if condition(job)]
        if withdrawn:
            self._overdue = [job for job in self._overdue if not condition(job)]
        for batch_id, jobs in list(self._unfunded_jobs.items()):
            withdrawn += [job for job in jobs if condition(job)]
            if not (left := deque(job for job in jobs if not condition(job))):
                del self._unfunded_jobs[batch_id]
            else:
                self._unfunded_jobs[batch_id] = left
        queues = (self._retries, self._ready, self._quarantine)
        return withdrawn + [job for queue in queues for job in queue.withdraw(condition)]

    async def _run_timers(self) -> None:
        """Make jobs ready when their wait is over, and start a probe when it is due."""
        while True:
            self._timers_changed.clear()
            now = self._clock.steady()
            for job in self._retries.take_due(now, has_ready=self._ready.by_model.__contains__):
                self._make_ready(job)
            self._retry_overdue()
            self.pump()
            self._demand.update()
            waits = [] if self._retries.next_due is None else [self._retries.next_due - now]
            if self._some_could_start:
                waits += self._waits_for_probes()
            if self._overdue:
                waits.append(_OVERDUE_CHECK_SECONDS)
            try:
                async with asyncio.timeout(min(waits, default=None)):
                    await self._timers_changed.wait()
            except TimeoutError:
                continue

    def _retry_overdue(self) -> None:
        """Make overdue lines ready again if the clock was set back and they are within their window now."""
        due = self._read_due()
        in_time = [job for job in self._overdue if job.batch.expires_at > due]
        if in_time:
            self._overdue = [job for job in self._overdue if job.batch.expires_at <= due]
            for job in in_time:
                self._make_ready(job)

    def _waits_for_probes(self) -> list[float]:
        """Return, for each paused part of the upstream, the seconds until it is probed next or checked again."""
        if self._breakers.paused:
            breakers = [self._breakers.upstream]
        else:
            breakers = [breaker for model, breaker in self._paused_models.items() if self._ready.by_model[model]]
        waits = [
            min(breaker.seconds_to_probe, breaker.seconds_to_new_lane or _LANE_CHECK_SECONDS) for breaker in breakers
        ]
        return [max(wait, _SHORTEST_PROBE_WAIT_SECONDS) for wait in waits]


def _answered_lane(ended: tuple[Job, Outcome]) -> LaneName | None:
    """Return the lane of a line that was answered, or None if its attempt failed."""
    job, outcome = ended
    return (job.batch.project_id, job.model.id) if isinstance(outcome, Success) else None


def _last_fault(job: Job) -> Retryable:
    return job.last_fault or Retryable(FaultKind.BROKEN, "the connection broke", unavailable=True)
