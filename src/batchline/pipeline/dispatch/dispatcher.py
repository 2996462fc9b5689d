"""Sends lines to one upstream, as many at once as its limiter allows, and decides what each answer means.

A job is in one place at a time: ready, in flight, waiting for its next attempt (which holds no slot), in quarantine, or
overdue. It leaves with an outcome for the recorder, or without one if its batch was stopped before it ran.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable

from batchline.domain.chat import check_request, with_upstream_name
from batchline.domain.endpoints import CHAT
from batchline.domain.fleet import UpstreamLoad
from batchline.domain.models import Catalog
from batchline.domain.money import Tariff
from batchline.domain.outcomes import KEY_UNAVAILABLE, Failure, Outcome, Retryable, Success
from batchline.domain.replies import FaultKind
from batchline.domain.retry import RetryPolicy
from batchline.domain.states import Stop
from batchline.pipeline.dispatch.attempts import Attempts
from batchline.pipeline.dispatch.circuit_breaker import CircuitBreaker
from batchline.pipeline.dispatch.completion import Completer, Failover, JobTarget
from batchline.pipeline.dispatch.demand import Demand
from batchline.pipeline.dispatch.in_flight import InFlight
from batchline.pipeline.dispatch.limiter import Limiter
from batchline.pipeline.dispatch.quarantine import WINDOW_SECONDS, Quarantine
from batchline.pipeline.dispatch.queues import ReadyQueue, RetryQueue
from batchline.pipeline.job import HeldBatch, Job
from batchline.pipeline.record import Recorder
from batchline.pipeline.token_limit import TokenLimit
from batchline.ports import Clock, Random, Upstream
from batchline.telemetry.metrics import Metrics

_SHORTEST_RATE_WAIT_SECONDS = 0.001
"""Event loops count milliseconds, so a shorter wait would be none. A start that is late is made up for at once."""

_SHORTEST_PROBE_WAIT_SECONDS = 0.1
"""A probe may be due while nothing can start, and must not be waited for in a busy loop."""


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
        breaker: CircuitBreaker,
        policy: RetryPolicy,
        limiter: Limiter,
        clock: Clock,
        random: Random,
        metrics: Metrics,
        count_sync_calls: Callable[[], int],
        on_line_dropped: Callable[[], None],
        on_demand: Callable[[], None],
        find_alternative: Callable[[Job], JobTarget | None],
    ) -> None:
        self._recorder, self._breaker, self._limiter = recorder, breaker, limiter
        self._catalog, self._policy = catalog, policy
        self._clock, self._random, self._metrics = clock, random, metrics
        self._quarantine = Quarantine()
        self._ready = ReadyQueue()
        self._retries = RetryQueue()
        self._overdue: list[Job] = []
        """Jobs past their batch's window. They do not start, and end when the store says that the batch expired."""
        self._rate_timer: asyncio.TimerHandle | None = None
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
            breaker=breaker,
            completer=self._completer,
            on_demand=on_demand,
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
        """How many more lines may be claimed."""
        return self._demand.wanted_lines

    @property
    def satisfied_projects(self) -> set[str]:
        """The projects that need no more lines."""
        return self._demand.satisfied_projects

    @property
    def paused(self) -> bool:
        return self._breaker.paused

    @property
    def needs_probe_job(self) -> bool:
        """Whether the upstream is paused and no job is here to probe it with."""
        return self.paused and not self._ready and not self._in_flight and not self._quarantine.occupied

    @property
    def load(self) -> float:
        """Jobs here for every slot."""
        return (self.in_flight + self.waiting) / max(1, self._limiter.limit)

    @property
    def held_bytes(self) -> int:
        """Bytes of the bodies of jobs that have no outcome yet."""
        return self._completer.bytes_by_project.total()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def limit(self) -> int:
        """How many may be in flight now."""
        return self._limiter.limit

    @property
    def rate_limit(self) -> float | None:
        """How many may start in a second now; None while that is not limited."""
        return self._limiter.rate

    @property
    def upstream_load(self) -> UpstreamLoad:
        return UpstreamLoad(
            in_flight=self.in_flight,
            sync_calls=self._in_flight.sync_calls,
            limit=self.limit,
            pause=self._breaker.pause,
        )

    def set_cap(self, cap: int) -> None:
        self._limiter.set_cap(cap)
        self.pump()

    @property
    def waiting(self) -> int:
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

    def drain(self) -> None:
        """Start nothing more. What is in flight may finish; other workers will run the rest."""
        self._completer.draining = True
        for job in self._withdraw(lambda _: True):
            self._completer.drop(job)

    def pump(self) -> None:
        """Start ready jobs, as many as may start now."""
        touched: set[str] = set()
        while jobs := self._take(self._room()):
            now = self._clock.now()
            started = [job for job in jobs if self._start_or_park(job, now)]
            if started and self._breaker.paused:
                self._breaker.begin_probe()
            self._in_flight.start(started)
            for job in started:
                self._attempts.send(job)
            touched.update([job.batch.project_id for job in jobs])
        self._demand.on_lines_taken(touched)

    @property
    def _some_could_start(self) -> bool:
        return not self._completer.draining and (bool(self._ready) or self._quarantine.occupied)

    def _room(self) -> int:
        """Return how many jobs may start now. Under a rate limit that is one at a time, when its time has come."""
        if not self._some_could_start or self._recorder.full or self._quarantine.crash_seen:
            return 0
        room = self._in_flight.room
        return room if room <= 0 or self._limiter.rate is None else self._room_by_rate()

    def _room_by_rate(self) -> int:
        wait = self._limiter.wait(self._clock.steady())
        if wait and self._rate_timer is None:
            wait = max(wait, _SHORTEST_RATE_WAIT_SECONDS)
            self._rate_timer = asyncio.get_running_loop().call_later(wait, self._on_rate_timer)
        return 0 if wait else 1

    def _on_rate_timer(self) -> None:
        self._rate_timer = None
        self.pump()

    def _take(self, room: int) -> list[Job]:
        """Take jobs out of the queues. While suspects are in quarantine nothing else runs, except a probe."""
        if room <= 0:
            return []
        if self._breaker.paused:
            self._breaker.end_pause_if_overdue()
        probing = self._breaker.paused
        if probing and self._breaker.seconds_to_probe:
            return []
        if self._ready and (probing or not self._quarantine.occupied):
            limit = 1 if probing else room
            return self._ready.take(
                limit, in_flight=self._in_flight.by_project, project_limit=self._in_flight.project_limit
            )
        suspect = self._quarantine.start_next(in_flight=self.in_flight)
        return [] if suspect is None else [suspect]

    def _start_or_park(self, job: Job, now: float) -> bool:
        """Return whether a job may start. One that may not is ended, or parked because its batch is overdue."""
        if now >= job.batch.expires_at:
            self._overdue.append(job)
        elif not self._completer.end_if_stopped(job):
            return True
        self._quarantine.finish(job)
        return False

    async def _collect_outcomes(self) -> None:
        while True:
            outcomes = await self._attempts.outcomes()
            now = self._clock.steady()
            for job, outcome in outcomes:
                self._finish_attempt(job, outcome, now)
            self.pump()

    def _finish_attempt(self, job: Job, outcome: Outcome, now: float) -> None:
        # The answers of an unavailable upstream say nothing about how much it can take.
        evidence = None if self._breaker.paused else outcome
        self._metrics.upstream_seconds.observe(self._in_flight.finish(job, evidence, now))
        if job.suspect:
            self._quarantine.finish(job)
        if isinstance(outcome, Success):
            self._end(job, outcome, "success")
        elif isinstance(outcome, Retryable):
            (self._on_break if outcome.kind == FaultKind.BROKEN else self._on_fault)(job, outcome)
        elif job.within_limit:
            self._end(job, outcome, "refused")
        else:
            # The input was too long, so nothing was sent.
            self._completer.complete(job, outcome)

    def _on_break(self, job: Job, fault: Retryable) -> None:
        job.last_fault = fault
        window_was_open = self._quarantine.window_open
        if self._quarantine.note_break(job, beside=self._in_flight):
            if not window_was_open:
                self._group.create_task(self._decide_breaks())
            return
        if not self._in_flight:
            # If the upstream crashed, this line alone can be the cause.
            job.suspect = True
            self._breaker.on_crash()
        self._on_fault(job, fault)

    async def _decide_breaks(self) -> None:
        """Wait until the window of breaks closes, then treat them as one crash or as a fault of each line."""
        await self._clock.sleep(WINDOW_SECONDS)
        broken, together = self._quarantine.close_window()
        if together:
            self._breaker.on_crash()
            self._timers_changed.set()
            self._quarantine.suspect([job for job in broken if not self._completer.end_if_stopped(job)])
        else:
            for job in broken:
                self._on_fault(job, _last_fault(job))
        self.pump()

    def _end(self, job: Job, outcome: Success | Failure, result: str) -> None:
        self._metrics.attempts.counts[result] += 1
        self._on_upstream_answer(job)
        self._completer.complete(job, outcome)

    def _on_fault(self, job: Job, fault: Retryable) -> None:
        self._metrics.attempts.counts["throttled" if fault.throttled else "fault"] += 1
        if fault.unavailable:
            was_paused = self._breaker.paused
            line = (job.batch.id, job.line.index)
            self._breaker.on_unavailable(line, fault.kind, throttled=fault.throttled)
            if self._breaker.paused and not was_paused:
                self._failover.move_all()
        else:
            self._on_upstream_answer(job)
        self._retry_or_fail(job, fault)
        if self._breaker.paused:
            self._timers_changed.set()

    def _on_upstream_answer(self, job: Job) -> None:
        job.suspect = False
        self._breaker.on_real_answer()
        self._demand.on_upstream_answer()

    def _retry_or_fail(self, job: Job, fault: Retryable) -> None:
        job.last_fault = fault
        forgiven = fault.unavailable and self._breaker.forgives(fault.kind)
        if not forgiven:
            job.throttles += fault.throttled
            job.attempts += not fault.throttled
        if self._completer.end_if_stopped(job):
            return
        if forgiven:
            self._make_ready(job)
        elif job.throttles > self._policy.max_throttles or job.attempts >= self._policy.max_attempts:
            self._completer.complete(job, fault.as_failure(job.attempts))
        else:
            self._wait_for_retry(job, fault)

    def _wait_for_retry(self, job: Job, fault: Retryable) -> None:
        self._metrics.retries.labels("throttled" if fault.throttled else "fault").inc()
        wait = self._policy.wait(
            tries=max(1, job.throttles if fault.throttled else job.attempts),
            retry_after=fault.retry_after,
            jitter=self._random.uniform(0, 1),
        )
        self._retries.add(job, until=self._clock.steady() + wait)
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
        job.within_limit = checked.max_tokens is None or job.batch.endpoint != CHAT
        self._make_ready(job)

    def _make_ready(self, job: Job) -> None:
        if self._completer.end_if_stopped(job):
            return
        if self._breaker.paused and self._failover.move(job):
            return
        if job.suspect:
            self._quarantine.suspect([job])
        else:
            self._ready.add(job)
        if self._breaker.paused:
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
        overdue = [job for job in self._overdue if condition(job)]
        if overdue:
            self._overdue = [job for job in self._overdue if not condition(job)]
        queues = (self._retries, self._ready, self._quarantine)
        return overdue + [job for queue in queues for job in queue.withdraw(condition)]

    async def _run_timers(self) -> None:
        """Make jobs ready when their wait is over, and start a probe when it is due."""
        while True:
            self._timers_changed.clear()
            now = self._clock.steady()
            for job in self._retries.take_due(now):
                self._make_ready(job)
            self.pump()
            self._demand.update()
            waits = [] if self._retries.next_due is None else [self._retries.next_due - now]
            if self._breaker.paused and self._some_could_start:
                waits.append(max(self._breaker.seconds_to_probe, _SHORTEST_PROBE_WAIT_SECONDS))
            try:
                async with asyncio.timeout(min(waits, default=None)):
                    await self._timers_changed.wait()
            except TimeoutError:
                continue


def _last_fault(job: Job) -> Retryable:
    return job.last_fault or Retryable(FaultKind.BROKEN, "the connection broke", unavailable=True)
