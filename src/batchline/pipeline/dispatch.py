"""Send lines to the upstream, as many at once as its limiter lets through, and judge what comes back.

A job is in one place at a time: ready, in flight, waiting for its next attempt (which holds no slot), or in
quarantine. It leaves with an outcome for the recorder, or without one when its batch was stopped before it ran.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable

from batchline.domain.chat import CHAT, addressed, check_request
from batchline.domain.fleet import Station
from batchline.domain.models import Catalog
from batchline.domain.money import Tariff
from batchline.domain.outcomes import KEY_UNAVAILABLE, Failure, Outcome, Setback, Success
from batchline.domain.replies import FaultKind
from batchline.domain.retry import RetryPolicy
from batchline.domain.states import Stop
from batchline.pipeline.appetite import Appetite
from batchline.pipeline.attempts import Attempts
from batchline.pipeline.claim import HeldBatch, Job
from batchline.pipeline.fit import Fitting
from batchline.pipeline.flight import InFlight
from batchline.pipeline.gate import Gate
from batchline.pipeline.handover import Handover, Taker
from batchline.pipeline.leaving import Leaving
from batchline.pipeline.limiter import Limiter
from batchline.pipeline.quarantine import WINDOW_SECONDS, Quarantine
from batchline.pipeline.ready import Ready
from batchline.pipeline.record import Recorder
from batchline.pipeline.waiting import Waiting
from batchline.ports import Clock, Random, Upstream
from batchline.telemetry.metrics import Metrics

_SHORTEST_WAIT = 0.001
"""Event loops count milliseconds: less would be no time at all, again and again. Who is late starts several."""

_SHORTEST_NAP = 0.1
"""A probe may be due and yet unable to start."""


class Dispatcher:
    def __init__(
        self,
        name: str,
        *,
        upstream: Upstream,
        catalog: Catalog,
        fitting: Fitting,
        tariff: Tariff,
        recorder: Recorder,
        gate: Gate,
        policy: RetryPolicy,
        limiter: Limiter,
        clock: Clock,
        random: Random,
        metrics: Metrics,
        live: Callable[[], int],
        changed: Callable[[], None],
        hungry: Callable[[], None],
        elsewhere: Callable[[Job], Taker | None],
    ) -> None:
        """``live`` tells how many slots are taken by calls that somebody waits for, ``elsewhere`` who else serves a
        line's model and is there."""
        self._recorder, self._gate = recorder, gate
        self._catalog, self._policy = catalog, policy
        self._clock, self._random, self._metrics = clock, random, metrics
        self._quarantine = Quarantine()
        self._ready = Ready()
        self._waiting = Waiting()
        self._overdue: list[Job] = []
        """Past their batch's window: not started any more, and ended when the store says that it expired."""
        self._pace: asyncio.TimerHandle | None = None
        self._alarm = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._attempts = Attempts(upstream, name=name, fitting=fitting, clock=clock, group=self._group)
        self._flying = InFlight(limiter, clock=clock, live=live)
        self._leaving = Leaving(recorder=recorder, tariff=tariff, changed=changed)
        self._handover = Handover(ready=self._ready, leaving=self._leaving, elsewhere=elsewhere)
        self._appetite = Appetite(
            ready=self._ready,
            waiting=self._waiting,
            flying=self._flying,
            gate=gate,
            leaving=self._leaving,
            hungry=hungry,
        )

    async def run(self) -> None:
        try:
            async with self._group:
                self._group.create_task(self._keep_time())
                self._group.create_task(self._keep_landing())
        finally:
            self._attempts.cancel()

    @property
    def wanted(self) -> int:
        """How many more lines may be claimed."""
        return self._appetite.wanted

    @property
    def sated(self) -> set[str]:
        """Projects that need no more."""
        return self._appetite.sated

    @property
    def paused(self) -> bool:
        return self._gate.paused

    @property
    def wants_probe(self) -> bool:
        """Whether the upstream is gone and nothing is here to find out with that it is back."""
        return self.paused and not self._ready and not self._flying and not self._quarantine.occupied

    @property
    def load(self) -> float:
        """Lines that are here for every slot."""
        return (self.in_flight + self.waiting) / max(1, self._flying.slots)

    @property
    def held_bytes(self) -> int:
        """Bodies of lines that have no outcome yet."""
        return self._leaving.bytes_of.total()

    @property
    def in_flight(self) -> int:
        return len(self._flying)

    @property
    def limit(self) -> int:
        """How many may be in flight now."""
        return self._flying.slots

    @property
    def rate_limit(self) -> float | None:
        """How many may start in a second now; None while that is not limited."""
        return self._flying.rate

    @property
    def station(self) -> Station:
        return Station(in_flight=self.in_flight, live=self._flying.live, limit=self.limit, pause=self._gate.pause)

    def allow(self, most: int) -> None:
        """Change the cap."""
        self._flying.allow(most)
        self.pump()

    @property
    def waiting(self) -> int:
        return len(self._ready) + len(self._waiting)

    @property
    def in_flight_by_batch(self) -> Counter[str]:
        return Counter(job.batch.id for job in self._flying)

    def add(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._leaving.came(job)
            self._admit(job)
        self.pump()
        self._appetite.tell()

    def stop_batch(self, batch: HeldBatch, stop: Stop) -> None:
        """Start no more attempts: a line that was tried ends with its last fault, one that never ran with none."""
        batch.stop = batch.stop or stop
        for job in self._withdraw(lambda job: job.batch is batch):
            self._leaving.end_without_attempt(job)

    def revoke_key(self, batch: HeldBatch) -> None:
        batch.key_revoked = True
        for job in self._withdraw(lambda job: job.batch is batch):
            self._leaving.settle(job, KEY_UNAVAILABLE)

    def drop_lost(self) -> None:
        """Forget the lines of shards that somebody else holds now."""
        for job in self._withdraw(lambda job: job.shard.lost):
            self._leaving.let_go(job)

    def drain(self) -> None:
        """Start nothing more; what is in flight may finish, the rest goes back as it came."""
        self._leaving.draining = True
        for job in self._withdraw(lambda _: True):
            self._leaving.let_go(job)

    def pump(self) -> None:
        """Start ready lines, as many as may be."""
        touched: set[str] = set()
        while jobs := self._take(self._room()):
            now = self._clock.now()
            started = [job for job in jobs if self._may_start(job, now)]
            self._flying.add(started)
            for job in started:
                self._attempts.send(job)
            touched.update([job.batch.project_id for job in jobs])
        self._appetite.took(touched)

    @property
    def _some_could_start(self) -> bool:
        return not self._leaving.draining and (bool(self._ready) or self._quarantine.occupied)

    def _room(self) -> int:
        """How many may start now. Where an upstream takes so many a second, the next one starts when it is time."""
        if not self._some_could_start or self._recorder.full or self._quarantine.crash_seen:
            return 0
        room = self._flying.room
        return room if room <= 0 or self._flying.rate is None else self._paced()

    def _paced(self) -> int:
        wait = self._flying.wait()
        if wait and self._pace is None:
            self._pace = asyncio.get_running_loop().call_later(max(wait, _SHORTEST_WAIT), self._resume)
        return 0 if wait else 1

    def _resume(self) -> None:
        self._pace = None
        self.pump()

    def _take(self, room: int) -> list[Job]:
        """While suspects are tried apart nothing else runs, except to probe an upstream that is gone."""
        probing = self._gate.paused
        if room <= 0 or (probing and not self._gate.admits()):
            return []
        if self._ready and (probing or not self._quarantine.occupied):
            most = 1 if probing else room
            return self._ready.take(most, in_flight=self._flying.by_project, each=self._flying.most_of_one)
        suspect = self._quarantine.next(in_flight=self.in_flight)
        return [] if suspect is None else [suspect]

    def _may_start(self, job: Job, now: float) -> bool:
        if now >= job.batch.expires_at:
            self._overdue.append(job)
        elif self._leaving.may_go_on(job):
            return True
        self._quarantine.came_back(job)
        return False

    async def _keep_landing(self) -> None:
        while True:
            outcomes = await self._attempts.outcomes()
            now = self._clock.steady()
            for job, outcome in outcomes:
                self._land(job, outcome, now)
            self.pump()

    def _land(self, job: Job, outcome: Outcome, now: float) -> None:
        # How an upstream that is gone answers tells nothing of how much it takes.
        told = None if self._gate.paused else outcome
        self._metrics.upstream_seconds.observe(self._flying.land(job, told, now))
        if job.suspect:
            self._quarantine.came_back(job)
        if isinstance(outcome, Success):
            self._end(job, outcome, "success")
        elif isinstance(outcome, Setback):
            (self._broke if outcome.kind == FaultKind.BROKEN else self._suffer)(job, outcome)
        elif job.fits:
            self._end(job, outcome, "refused")
        else:
            self._leaving.settle(job, outcome)

    def _broke(self, job: Job, setback: Setback) -> None:
        job.last = setback
        window_was_open = self._quarantine.window_open
        if self._quarantine.broke(job, beside=self._flying):
            if not window_was_open:
                self._group.create_task(self._judge_breaks())
            return
        if not self._flying:
            # If the upstream crashed, it was this line, and no other has to pay.
            job.suspect = True
            self._gate.crashed()
        self._suffer(job, setback)

    async def _judge_breaks(self) -> None:
        await self._clock.sleep(WINDOW_SECONDS)
        broken, together = self._quarantine.close_window()
        if together:
            self._gate.crashed()
            self._alarm.set()
            self._quarantine.suspect([job for job in broken if self._leaving.may_go_on(job)])
        else:
            for job in broken:
                self._suffer(job, _last_setback(job))
        self.pump()

    def _end(self, job: Job, outcome: Success | Failure, result: str) -> None:
        self._metrics.attempts.counts[result] += 1
        self._hear_from_upstream(job)
        self._leaving.settle(job, outcome)

    def _suffer(self, job: Job, setback: Setback) -> None:
        self._metrics.attempts.counts["throttled" if setback.throttled else "fault"] += 1
        if setback.gone:
            was_paused = self._gate.paused
            line = (job.batch.id, job.line.index)
            self._gate.gone_answer(line, setback.kind, throttled=setback.throttled)
            if self._gate.paused and not was_paused:
                self._handover.take_all()
        else:
            self._hear_from_upstream(job)
        self._set_back(job, setback)
        if self._gate.paused:
            self._alarm.set()

    def _hear_from_upstream(self, job: Job) -> None:
        job.suspect = False
        self._gate.real_answer()
        self._appetite.upstream_answered()

    def _set_back(self, job: Job, setback: Setback) -> None:
        job.last = setback
        forgiven = setback.gone and self._gate.forgives(setback.kind)
        if not forgiven:
            job.throttles += setback.throttled
            job.attempts += not setback.throttled
        if not self._leaving.may_go_on(job):
            return
        if forgiven:
            self._make_ready(job)
        elif job.throttles > self._policy.max_throttles or job.attempts >= self._policy.max_attempts:
            self._leaving.settle(job, setback.as_failure(job.attempts))
        else:
            self._wait_for_retry(job, setback)

    def _wait_for_retry(self, job: Job, setback: Setback) -> None:
        self._metrics.retries.labels("throttled" if setback.throttled else "fault").inc()
        wait = self._policy.wait(
            tries=max(1, job.throttles if setback.throttled else job.attempts),
            retry_after=setback.retry_after,
            jitter=self._random.uniform(0, 1),
        )
        self._waiting.add(job, until=self._clock.steady() + wait)
        self._alarm.set()

    def _admit(self, job: Job) -> None:
        """A line that breaks the rules ends here, before it can take a slot or be the probe of a pause."""
        checked = check_request(
            job.body, endpoint=job.batch.endpoint, project_id=job.batch.project_id, catalog=self._catalog
        )
        if isinstance(checked, Failure):
            if self._leaving.may_go_on(job):
                self._leaving.settle(job, checked)
            return
        job.model, job.body = checked, addressed(job.body, checked)
        job.fits = checked.max_tokens is None or job.batch.endpoint != CHAT
        self._make_ready(job)

    def _make_ready(self, job: Job) -> None:
        if not self._leaving.may_go_on(job):
            return
        if self._gate.paused and self._handover.take(job):
            return
        if job.suspect:
            self._quarantine.suspect([job])
        else:
            self._ready.add(job)
        if self._gate.paused:
            self._alarm.set()

    def adopt(self, job: Job) -> None:
        """Take a line from another upstream of its model."""
        self._leaving.came(job)
        job.fits = job.model.max_tokens is None or job.batch.endpoint != CHAT
        self._make_ready(job)
        self.pump()

    def lend(self, upstream: str) -> Job | None:
        """A ready line that this other upstream could run as well."""
        return self._handover.lend(upstream)

    def _withdraw(self, condition: Callable[[Job], bool]) -> list[Job]:
        """Take jobs out from wherever they wait."""
        overdue = [job for job in self._overdue if condition(job)]
        if overdue:
            self._overdue = [job for job in self._overdue if not condition(job)]
        places = (self._waiting, self._ready, self._quarantine)
        return overdue + [job for place in places for job in place.withdraw(condition)]

    async def _keep_time(self) -> None:
        """Wake lines whose wait is over, and slots when a probe is due."""
        while True:
            self._alarm.clear()
            now = self._clock.steady()
            for job in self._waiting.due(now):
                self._make_ready(job)
            self.pump()
            self._appetite.tell()
            waits = [] if self._waiting.first is None else [self._waiting.first - now]
            if (probe := self._gate.wait()) is not None and self._some_could_start:
                waits.append(max(probe, _SHORTEST_NAP))
            try:
                async with asyncio.timeout(min(waits, default=None)):
                    await self._alarm.wait()
            except TimeoutError:
                continue


def _last_setback(job: Job) -> Setback:
    return job.last or Setback(FaultKind.BROKEN, "the connection broke", gone=True)
