"""Chooses the lines that may start now: of which project and model, and how many at once."""

from collections.abc import Set

from batchline.pipeline.dispatch.circuit_breaker import Breakers, CircuitBreaker
from batchline.pipeline.dispatch.in_flight import InFlight
from batchline.pipeline.dispatch.limiter import Limiter
from batchline.pipeline.dispatch.quarantine import Quarantine
from batchline.pipeline.dispatch.queues import ReadyQueue
from batchline.pipeline.job import Job

_SHORTEST_PROBE_WAIT_SECONDS = 0.1
"""A probe may be due while nothing can start. This wait keeps the timers from a busy loop until then."""

_LANE_CHECK_SECONDS = 1.0
"""The time between two checks, during a pause, for another project or model to probe with."""


class Selection:
    """The choice of the next lines among those that are ready and those in quarantine.

    A paused upstream or model is probed. Otherwise slots are shared by project, within the limits of each model.
    ``unfunded_projects`` are the projects whose next line waits for money.
    """

    def __init__(
        self,
        *,
        ready: ReadyQueue,
        in_flight: InFlight,
        limiter: Limiter,
        breakers: Breakers,
        quarantine: Quarantine,
        unfunded_projects: Set[str],
    ) -> None:
        self._ready, self._in_flight, self._limiter = ready, in_flight, limiter
        self._breakers, self._quarantine = breakers, quarantine
        self._unfunded_projects = unfunded_projects
        self._held_projects: Set[str] = unfunded_projects
        """Projects of which nothing may start now: these, and those whose lines have just broken."""
        self._now = 0.0
        """The time for which the choice is made."""

    def seconds_to_next_start(self, now: float) -> float | None:
        """Return the seconds until the rate lets the next line start, or None if no line waits for that."""
        if self._breakers.paused:
            return None
        waits = [self._limiter.wait(model, now) for model in self._ready.by_model]
        return min((wait for wait in waits if wait > 0), default=None)

    @property
    def seconds_to_probes(self) -> list[float]:
        """For each paused part of the upstream, the seconds until it is probed next or checked again."""
        if not self._some_could_start:
            return []
        if self._breakers.paused:
            breakers = [self._breakers.upstream]
        else:
            paused = self._breakers.paused_models.items()
            breakers = [breaker for model, breaker in paused if self._ready.by_model[model]]
        waits = [
            min(breaker.seconds_to_probe, breaker.seconds_to_new_lane or _LANE_CHECK_SECONDS) for breaker in breakers
        ]
        return [max(wait, _SHORTEST_PROBE_WAIT_SECONDS) for wait in waits]

    def take(self, now: float) -> list[Job]:
        """Take jobs that may start now. Suspects start first, and may have to be tried with nothing else in flight."""
        self._now = now
        if not self._some_could_start or self._quarantine.crash_seen:
            return []
        broken = self._quarantine.held_projects
        self._held_projects = self._unfunded_projects | broken if broken else self._unfunded_projects
        if self._breakers.any_paused and self._breakers.end_overdue_pauses():
            self._limiter.on_outage_over(now)
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

    @property
    def _some_could_start(self) -> bool:
        return bool(self._ready) or self._quarantine.occupied

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
        return 0 if model in self._breakers.paused_models else self._limiter.allowance(model, self._now)

    def _take_probe(self, breaker: CircuitBreaker, model: str | None = None) -> list[Job]:
        """Take a job to probe a paused upstream or model with, from the project and model whose turn it is."""
        lane = breaker.next_lane(
            lane for lane in self._ready.lanes() if model in (None, lane[1]) and self._in_flight.may_start_one_of(lane)
        )
        return [] if lane is None else self._ready.take_probe(*lane)

    def _take_model_probe(self) -> list[Job]:
        """Take a job to probe one of the paused models with."""
        for model, breaker in self._breakers.paused_models.items():
            if jobs := self._take_probe(breaker, model):
                return jobs
        return []

    def _take_despite_block(self) -> list[Job]:
        """Take a job of a model that others must wait for, because of Retry-After, if its project was not refused."""
        for project_id, model in self._ready.lanes() if self._limiter.is_any_blocked(self._now) else ():
            if (
                model not in self._breakers.paused_models
                and project_id not in self._held_projects
                and self._limiter.may_try(model, project_id, self._now)
                and self._in_flight.may_start_one_of((project_id, model))
            ):
                return self._ready.take_lane(project_id, model)
        return []

    def _take_suspect(self) -> list[Job]:
        """Take a suspect that may start now. While the upstream is paused, it is a probe."""
        if self._in_flight.room <= 0 or (self._breakers.paused and self._breakers.upstream.seconds_to_probe):
            return []
        suspect = self._quarantine.start_next(in_flight=len(self._in_flight))
        return [] if suspect is None else [suspect]
