"""What the dispatcher does about starts, refusals and pauses, in virtual time and without tasks, sockets and storage.

It takes a third of the time of the real one. The limiter, the ready queue, the slots of the projects, the retry policy
and the circuit breakers are the real ones.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from math import inf

from batchline.domain.engine_queue import QueueLength
from batchline.domain.outcomes import Outcome, Retryable, Success
from batchline.domain.replies import FaultKind
from batchline.domain.retry import RetryPolicy
from batchline.pipeline.dispatch.circuit_breaker import Breakers, CircuitBreaker
from batchline.pipeline.dispatch.in_flight import InFlight
from batchline.pipeline.dispatch.limiter import Limiter
from batchline.pipeline.dispatch.quarantine import WINDOW_SECONDS, Quarantine
from batchline.pipeline.dispatch.queues import PROBES_IN_A_ROW, YIELD_CHECK_SECONDS, ReadyQueue
from batchline.pipeline.dispatch.resets import Resets
from batchline.pipeline.job import Job
from batchline.pipeline.routing import SyncCalls
from batchline.telemetry.metrics import Metrics
from tests.support.jobs import FAR_FUTURE, make_jobs
from tests.support.zoo.upstreams import Upstream
from tests.support.zoo.world import World

LINES_PER_SECOND = 3500.0
"""As many as one process of batchline sends. The upstreams that are quicker than that are limited by it."""
_CLAIMED_LINES = 64
_PATIENCE_SECONDS = 3600.0
_SHORTEST_RATE_WAIT_SECONDS = 0.001
_PROBE_CHECK_SECONDS = 0.1
_QUEUE_LENGTH_SECONDS = 5.0


class Work:
    """The lines of one batch, and how many of them failed. It does not wait for lines that are hopeless."""

    def __init__(self, lines: int, *, hopeless: int) -> None:
        self.open, self._hopeless = lines, hopeless
        self.failed = 0

    @property
    def to_do(self) -> int:
        return max(0, self.open - max(0, self._hopeless - self.failed))

    @property
    def is_done(self) -> bool:
        return not self.to_do


class SimulatedDispatcher:
    def __init__(self, world: World, upstream: Upstream, *, cap: int | None = None) -> None:
        self._world, self._upstream = world, upstream
        self.limiter = Limiter(cap=cap)
        self._ready = ReadyQueue()
        self._unclaimed: dict[tuple[str, str], deque[Job]] = defaultdict(deque)
        """The lines of each project and model that wait in the store."""
        self._in_flight = InFlight(self.limiter, clock=world, sync_calls=SyncCalls())
        self._breakers = Breakers(
            "default", clock=world, random=world, patience_seconds=_PATIENCE_SECONDS, metrics=Metrics()
        )
        self._quarantine, self._resets = Quarantine(), Resets()
        self._paused_models: Mapping[str, CircuitBreaker] = {}
        self._policy = RetryPolicy()
        self._work: dict[str, Work] = {}
        self._sent_at = 0.0
        """When the last line that was started is sent: each of them takes some time."""
        self._rate_due, self._probe_timer = inf, False
        self.refused = self.peak = 0

    def add(self, lines: int, *, project: str = "one", model: str = "m", hopeless: int = 0) -> Work:
        """Add the lines of a new batch. So many of them are hopeless."""
        work = Work(lines, hopeless=hopeless)
        jobs = make_jobs(lines, project_id=project, model=model, expires_at=FAR_FUTURE)
        self._work[jobs[0].batch.id] = work
        self._unclaimed[project, model] += jobs
        self._world.after(0.0, self.pump)
        return work

    def read_queue_length(self, read: Callable[[], QueueLength]) -> None:
        """Read the queue of the engine now, and again every few seconds."""
        if self._in_flight:
            self.limiter.on_queue_length(read(), self._world.time)
            self.pump()
        self._world.after(_QUEUE_LENGTH_SECONDS, lambda: self.read_queue_length(read))

    def pump(self) -> None:
        """Start what may start now."""
        self._claim()
        while jobs := self._take():
            self._in_flight.start(jobs)
            for job in jobs:
                self._send(job)
            self._claim()
        self.peak = max(self.peak, len(self._in_flight))
        self._set_rate_timer()

    def _claim(self) -> None:
        """Claim few lines ahead."""
        for (project, model), jobs in self._unclaimed.items():
            if jobs and self._ready.untried_by_model(project).get(model, 0) < _CLAIMED_LINES // 2:
                for _ in range(min(_CLAIMED_LINES, len(jobs))):
                    self._ready.add(jobs.popleft())

    def _take(self) -> list[Job]:
        if not (self._ready or self._quarantine.occupied) or self._quarantine.crash_seen:
            return []
        if self._breakers.paused and self._ready:
            return self._take_probe(self._breakers.upstream, None)
        if self._quarantine.occupied and ((jobs := self._take_suspect()) or self._quarantine.holds_all):
            return jobs
        room = self._in_flight.room
        if (
            jobs := self._take_model_probe()
            or self._take_despite_block()
            or (self._take_ready(room) if room > 0 else [])
        ):
            return jobs
        for project, model in self._in_flight.may_exceed(self._ready.lanes()):
            if project not in self._quarantine.held_projects and self._allowance_of(model) > 0:
                return self._ready.take_lane(project, model)
        return []

    def _take_ready(self, limit: int) -> list[Job]:
        held = self._quarantine.held_projects
        return self._ready.take(
            limit,
            in_flight=self._in_flight.by_project,
            in_flight_of_lane=self._in_flight.by_lane,
            limit_of=lambda project: 0 if project in held else self._in_flight.limit_of(project),
            allowance_of=lambda model: min(self._allowance_of(model), self._in_flight.room_of(model)),
        )

    def _allowance_of(self, model: str) -> int:
        return 0 if model in self._paused_models else self.limiter.allowance(model, self._world.time)

    def _take_despite_block(self) -> list[Job]:
        for project, model in self._ready.lanes():
            may_try = model not in self._paused_models and self.limiter.may_try(model, project, self._world.time)
            if may_try and self._in_flight.may_start_one_of((project, model)):
                return self._ready.take_lane(project, model)
        return []

    def _take_model_probe(self) -> list[Job]:
        for model, breaker in self._paused_models.items():
            if jobs := self._take_probe(breaker, model):
                return jobs
        return []

    def _take_suspect(self) -> list[Job]:
        if self._in_flight.room <= 0 or (self._breakers.paused and self._breakers.upstream.seconds_to_probe):
            return []
        suspect = self._quarantine.start_next(in_flight=len(self._in_flight))
        return [] if suspect is None else [suspect]

    def _take_probe(self, breaker: CircuitBreaker, model: str | None) -> list[Job]:
        lane = breaker.next_lane(
            lane for lane in self._ready.lanes() if model in (None, lane[1]) and self._in_flight.may_start_one_of(lane)
        )
        if lane is None:
            return []
        jobs = self._ready.take_probe(*lane)
        for job in jobs:
            breaker.begin_probe(lane, job.line_key)
        return jobs

    def _set_rate_timer(self) -> None:
        if not self._ready or self._breakers.paused:
            return
        now = self._world.time
        waits = [wait for model in self._ready.by_model if (wait := self.limiter.wait(model, now)) > 0]
        due = now + max(min(waits), _SHORTEST_RATE_WAIT_SECONDS) if waits else inf
        if due < self._rate_due:
            self._rate_due = due
            self._world.after(due - now, lambda: self._on_rate_timer(due))

    def _on_rate_timer(self, due: float) -> None:
        if due == self._rate_due:
            self._rate_due = inf
            self.pump()

    def _set_probe_timer(self) -> None:
        if not self._probe_timer and self._breakers.pauses:
            self._probe_timer = True
            self._world.after(_PROBE_CHECK_SECONDS, self._on_probe_timer)

    def _on_probe_timer(self) -> None:
        self._probe_timer = False
        self.pump()
        self._set_probe_timer()

    def _send(self, job: Job) -> None:
        now = self._world.time
        self._sent_at = max(now, self._sent_at) + 1 / LINES_PER_SECOND
        self._world.after(self._sent_at - now, lambda: self._upstream.receive(job, partial(self._finish, job)))

    def _finish(self, job: Job, outcome: Outcome) -> None:
        model = job.model.id
        is_evidence = self._breakers.is_flowing(model) and not (job.fails_alone and self._breakers.ignores_lone(model))
        if isinstance(outcome, Success):
            self._in_flight.finish_answered([(job, outcome)], (job.batch.project_id, model), self._world.time)
        else:
            self._in_flight.finish(job, outcome if is_evidence else None, self._world.time)
        self._breakers.end_probe(model, job.line_key)
        self._quarantine.finish(job)
        if isinstance(outcome, Retryable):
            self.refused += 1
            (self._on_break if outcome.kind == FaultKind.BROKEN else self._on_fault)(job, outcome)
            self._set_probe_timer()
        else:
            self._work[job.batch.id].open -= 1
            self._quarantine.on_answer(job, self._world.time)
            job.suspect = False
            self._on_answer(model)
            if self._resets.on_answer(job):
                self._in_flight.breaks_are_refusals = True
                for suspect in self._quarantine.withdraw(lambda _: True):
                    self._ready.add(suspect)
        self.pump()

    def _is_lone_failure(self, job: Job) -> bool:
        return job.fails_alone and self._breakers.ignores_lone(job.model.id)

    def _on_break(self, job: Job, fault: Retryable) -> None:
        job.note_fault(answers=self._breakers.answers_of(job.model.id))
        window_was_open = self._quarantine.window_open
        if job.refusal_cost is None and self._quarantine.note_break(job, self._world.time, beside=self._in_flight):
            job.last_fault = fault
            self._resets.on_break(job, beside=self._in_flight, is_first=not window_was_open)
            if not window_was_open:
                self._world.after(WINDOW_SECONDS, lambda: self._decide_breaks(fault))
        else:
            self._on_fault(job, fault)

    def _decide_breaks(self, fault: Retryable) -> None:
        verdict = self._quarantine.close_window(self._world.time, in_flight=self._in_flight)
        self._resets.on_breaks_over(survived=verdict.survived)
        self._in_flight.breaks_are_refusals = self._resets.known
        if verdict.crashed:
            self._breakers.upstream.on_crash()
        self._quarantine.suspect(verdict.suspects)
        for job in verdict.own:
            self._on_fault(job, fault)
        self._set_probe_timer()
        self.pump()

    def _on_answer(self, model: str) -> None:
        if self._breakers.on_real_answers(model):
            self._paused_models = self._breakers.paused_models
            self.limiter.on_outage_over(self._world.time)

    def _on_fault(self, job: Job, fault: Retryable) -> None:
        model, policy = job.model.id, self._policy
        job.last_fault = fault
        if fault.kind == FaultKind.REFUSED:
            self._quarantine.on_refused(self._world.time)
        attempts, refusals = job.cost_of(fault)
        last = (refusals > 0 and job.throttles + refusals > policy.max_throttles) or (
            attempts > 0 and job.attempts + attempts >= policy.max_attempts
        )
        if attempts or not self.limiter.is_blocked(model, self._world.time):
            self._breakers.on_unavailable(job, fault, last_attempt=last)
            self._paused_models = self._breakers.paused_models
        if self._breakers.forgives(model, fault.kind):
            job.probes += 1
            self._ready.add(job, first=job.probes % PROBES_IN_A_ROW != 0)
            return
        job.tries += 1
        job.throttles += refusals
        job.attempts += attempts
        if last:
            work = self._work[job.batch.id]
            work.open -= 1
            work.failed += 1
            return
        tries = max(1, job.attempts if attempts else int(job.throttles))
        limited = not attempts and self.limiter.model(model).is_refused
        wait = policy.wait(
            tries=tries, retry_after=fault.retry_after, jitter=self._world.uniform(0, 1), limited=limited
        )
        job.yields_until = self._world.time + policy.yield_seconds(job.throttles) if limited else 0.0
        self._world.after(wait, lambda: self._retry(job))

    def _retry(self, job: Job) -> None:
        """Make a job ready, unless it yields and others of its model could start."""
        if job.yields_until > self._world.time and self._ready.by_model[job.model.id]:
            self._world.after(YIELD_CHECK_SECONDS, lambda: self._retry(job))
        else:
            self._make_ready(job)

    def _make_ready(self, job: Job) -> None:
        self._ready.add(job)
        self.pump()
