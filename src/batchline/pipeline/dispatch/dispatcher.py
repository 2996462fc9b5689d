"""Sends lines to one upstream, as many at once as its limiter allows, and decides what each answer means.

A job is in one place at a time: ready, in flight, waiting for its next attempt (which holds no slot), in quarantine, or
overdue. It leaves with an outcome for the recorder, or without one if its batch was stopped before it ran.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import attrgetter
from typing import cast

from batchline.domain.chat import check_request, with_upstream_name
from batchline.domain.endpoints import CHAT
from batchline.domain.engine_queue import QueueLength
from batchline.domain.estimates import FREE, estimated_cost
from batchline.domain.fleet import MAX_REPORTED_MODELS, UpstreamLoad
from batchline.domain.models import Catalog, Model
from batchline.domain.money import Tariff
from batchline.domain.outcomes import KEY_UNAVAILABLE, Failure, Outcome, Retryable, Success
from batchline.domain.records import Lane
from batchline.domain.replies import FaultKind
from batchline.domain.retry import RetryPolicy
from batchline.domain.states import Stop
from batchline.domain.waiting import WaitReason
from batchline.pipeline.dispatch.attempts import Attempts
from batchline.pipeline.dispatch.circuit_breaker import Breakers
from batchline.pipeline.dispatch.completion import Completer, Failover, JobTarget
from batchline.pipeline.dispatch.demand import Demand
from batchline.pipeline.dispatch.funding import Funding
from batchline.pipeline.dispatch.in_flight import InFlight, LaneName
from batchline.pipeline.dispatch.limiter import Limiter
from batchline.pipeline.dispatch.quarantine import WINDOW_SECONDS, Quarantine
from batchline.pipeline.dispatch.queues import PROBES_IN_A_ROW, ReadyQueue, RetryQueue
from batchline.pipeline.dispatch.resets import Resets
from batchline.pipeline.dispatch.selection import Selection
from batchline.pipeline.dispatch.waiting import Waiting
from batchline.pipeline.job import HeldBatch, Job
from batchline.pipeline.record import Recorder
from batchline.pipeline.routing import SyncCalls
from batchline.pipeline.token_limit import TokenLimit
from batchline.ports import Random, StoreClock, Tracer, Upstream
from batchline.telemetry.metrics import Metrics

_SHORTEST_RATE_WAIT_SECONDS = 0.001
"""Event loops count milliseconds, so a shorter wait would be none. The starts that a wait delayed follow at once."""

_DUE_LIFETIME_SECONDS = 0.1
"""The time for which the store time that decides about windows is reused. To read it for every line would cost a
microsecond."""

_shard_and_model = attrgetter("shard", "model.id")

_OVERDUE_CHECK_SECONDS = 1.0
"""The time between two checks whether overdue lines are still past their window: the clock may have been wrong."""


class Dispatcher:
    """Everything that happens to the lines of one upstream in this process.

    ``sync_calls`` take slots too. ``find_alternative`` returns the dispatcher of another upstream that serves a job's
    model and is available.
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
        sync_calls: SyncCalls,
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
        self._overdue: list[Job] = []
        """Jobs past their batch's window. They do not start, and end when the store says that the batch expired."""
        self._due, self._due_until = 0.0, -math.inf
        self._rate_timer: asyncio.Handle | None = None
        self._rate_timer_at = 0.0
        self._looked_at = 0.0
        """The time at which it was last decided which jobs may start. The timer for the others is computed for the same
        time. Otherwise a job that may start a microsecond later would get no timer."""
        self._timers_changed = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._attempts = Attempts(upstream, name=name, token_limit=token_limit, clock=clock, group=self._group)
        self._in_flight = InFlight(limiter, clock=clock, sync_calls=sync_calls)
        self._completer = Completer(recorder=recorder, tariff=tariff, on_line_dropped=on_line_dropped)
        self._funding = Funding(
            ready=self._ready, in_flight=self._in_flight, completer=self._completer, make_ready=self._make_ready
        )
        self._selection = Selection(
            ready=self._ready,
            in_flight=self._in_flight,
            limiter=limiter,
            breakers=breakers,
            quarantine=self._quarantine,
            unfunded_projects=self._funding.waiting_projects,
        )
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
            sync_calls=self._in_flight.sync_calls.total,
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
        """Add jobs that were never tried. Those of one shard and model that follow each other are handled together."""
        admitted = list[Job]()
        for job in jobs:
            self._completer.acquire(job)
            if self._admit(job):
                admitted.append(job)
        for (_, model), group in groupby(admitted, key=_shard_and_model):
            if self._breakers.is_paused(model):
                for job in group:
                    self._make_ready(job)
            elif ready := [job for job in group if not self._completer.end_if_stopped(job)]:
                self._ready.add_all(ready)
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
        if self._funding.on_funds_changed():
            self.pump()

    def pump(self) -> None:
        """Start ready jobs, as many as may start now."""
        touched: set[str] = set()
        while jobs := self._take():
            due = self._read_due()
            started = [job for job in jobs if self._start_or_park(job, due)]
            if self._breakers.any_paused:
                for job in started:
                    self._breakers.begin_probe(job)
            self._in_flight.start(started)
            for job in started:
                self._attempts.send(job)
            touched.update([job.batch.project_id for job in jobs])
        self._set_rate_timer()
        self._demand.on_lines_taken(touched)

    def _take(self) -> list[Job]:
        self._looked_at = self._clock.steady()
        if self._completer.draining or self._recorder.full:
            return []
        return self._selection.take(self._looked_at)

    def _set_rate_timer(self) -> None:
        """Set a timer for the time at which the rate lets the next job start, if ready jobs wait for that."""
        wait = self._selection.seconds_to_next_start(self._looked_at)
        if wait is None:
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + max(wait, _SHORTEST_RATE_WAIT_SECONDS)
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
        """Hold the cost of a job. A probe or a suspect starts in any case: it is one line, and others wait for it."""
        return self._funding.hold(job, must_start=job.suspect or self._breakers.is_paused(job.model.id))

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
            self._funding.release(job)
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

    def _admit(self, job: Job) -> bool:
        """Check a job against the rules of its model. One that breaks them ends here and takes no slot."""
        checked = check_request(
            job.body, endpoint=job.batch.endpoint, project_id=job.batch.project_id, catalog=self._catalog
        )
        if not isinstance(checked, Model):
            if not self._completer.end_if_stopped(job):
                self._completer.complete(job, checked)
            return False
        job.model, job.body = checked, with_upstream_name(job.body, checked)
        if self._tariff.metered:
            job.estimate = estimated_cost(job.body, checked, self._tariff, synchronous=False)
        job.within_limit = checked.max_tokens is None or job.batch.endpoint != CHAT
        if self._tracer is not None:
            job.trace = self._tracer.sample(job.batch.id, job.line.index, endpoint=job.batch.endpoint)
        return True

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
        queues = (self._funding, self._retries, self._ready, self._quarantine)
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
            waits += self._selection.seconds_to_probes
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


def _answered_lane(ended: tuple[Job, Outcome]) -> LaneName | None:
    """Return the lane of a line that was answered, or None if its attempt failed."""
    job, outcome = ended
    return (job.batch.project_id, job.model.id) if isinstance(outcome, Success) else None


def _last_fault(job: Job) -> Retryable:
    return job.last_fault or Retryable(FaultKind.BROKEN, "the connection broke", unavailable=True)
