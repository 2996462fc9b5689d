"""Tells how many more lines a dispatcher can use, and of which lanes, and wakes the claim loop when that grows."""

from collections.abc import Callable, Iterable

from batchline.domain.records import SHARED_LANE, Lane
from batchline.pipeline.dispatch.circuit_breaker import Breakers
from batchline.pipeline.dispatch.completion import Completer
from batchline.pipeline.dispatch.in_flight import InFlight
from batchline.pipeline.dispatch.limiter import Limiter
from batchline.pipeline.dispatch.queues import ReadyQueue, RetryQueue

_CLAIM_SECONDS = 0.025
"""The time that a claim may take. Enough lines for this time are claimed ahead, since a claim costs as much as many
lines."""

_MAX_WAITING_LINES = 4096
"""If so many lines of one project wait for their next attempt, no more of its lines are claimed."""

_MAX_PROJECT_BYTES = 32 * 1024 * 1024
"""If so many bytes of one project's lines are held, no more of its lines are claimed."""

_MAX_HELD_BACK_LINES = 4096
"""If the limits and pauses of models hold back so many lines of one project, no more of its shared lane are claimed. A
claim cannot leave out single models of that lane."""

_LINES_TO_PROBE = 16
"""The number of lines to claim while the upstream is paused: one of each project and model, to probe with."""

_LIMITED_SECONDS, _MIN_LIMITED_LINES = 1.0, 8
"""A model with a limited rate is claimed ahead for this time."""


class Demand:
    """The demand of one dispatcher. ``on_demand`` is called when more is wanted than before."""

    def __init__(
        self,
        *,
        ready: ReadyQueue,
        retries: RetryQueue,
        in_flight: InFlight,
        limiter: Limiter,
        breakers: Breakers,
        completer: Completer,
        on_demand: Callable[[], None],
    ) -> None:
        self._ready, self._retries, self._in_flight = ready, retries, in_flight
        self._limiter, self._breakers, self._completer = limiter, breakers, completer
        self._on_demand = on_demand
        self._wanted_nothing = False
        """Whether no line of any lane was wanted at the last update."""
        self._last_satisfied: set[Lane] = set()
        """The lanes that had enough lines at the last update, if lines of others were wanted."""

    @property
    def wanted_lines(self) -> int:
        """The number of further lines that may be claimed."""
        if self._completer.draining:
            return 0
        return _LINES_TO_PROBE if self._breakers.paused else 2 * self._in_flight.lines_for(_CLAIM_SECONDS)

    @property
    def satisfied_lanes(self) -> set[Lane]:
        """The lanes that have enough lines here."""
        return self._satisfied_of(self._completer.bytes_by_project)

    def update(self) -> None:
        """Compare with the last time, and call ``on_demand`` if more is wanted now."""
        wants_nothing = not self.wanted_lines
        satisfied = set[Lane]() if wants_nothing else self.satisfied_lanes
        if not wants_nothing and (self._wanted_nothing or self._last_satisfied - satisfied):
            self._on_demand()
        self._wanted_nothing, self._last_satisfied = wants_nothing, satisfied

    def on_lines_taken(self, project_ids: set[str]) -> None:
        """Update after lines of these projects left the ready queue."""
        satisfied_before = {lane for lane in self._last_satisfied if lane.project_id in project_ids}
        if satisfied_before and not satisfied_before <= self._satisfied_of(project_ids):
            self.update()

    def on_upstream_answer(self) -> None:
        if self._wanted_nothing:
            self.update()

    def _satisfied_of(self, project_ids: Iterable[str]) -> set[Lane]:
        enough = 1 if self._breakers.paused else self._in_flight.lines_for(_CLAIM_SECONDS)
        held_bytes, retrying = self._completer.bytes_by_project, self._retries.by_project
        lanes = set[Lane]()
        for project_id in project_ids:
            if held_bytes[project_id] >= _MAX_PROJECT_BYTES or retrying[project_id] >= _MAX_WAITING_LINES:
                lanes.add(Lane(model=None, project_id=project_id))
            else:
                lanes |= self._satisfied_of_project(project_id, enough)
        return lanes

    def _satisfied_of_project(self, project_id: str, enough: int) -> set[Lane]:
        """Return the lanes of a project that have enough lines.

        Each model counts for itself, because the lines of one may wait for long while those of another start at once.
        The models of the shared lane count together. Lines that are tried again may all be refused for what they
        contain, so only very many of them are enough.
        """
        lanes, free, held_back = set[Lane](), 0, 0
        untried_by_model = self._ready.untried_by_model(project_id)
        for model, count in self._ready.count_by_model(project_id).items():
            untried, needed = untried_by_model[model], self._needed_of(model, enough)
            if needed is None:
                free += untried
            else:
                held_back += count
            most = _LINES_TO_PROBE if self._breakers.is_paused(model) else _MAX_WAITING_LINES
            if untried >= (enough if needed is None else needed) or count >= most:
                lanes.add(Lane(model=model, project_id=project_id))
        if free >= enough or held_back >= _MAX_HELD_BACK_LINES:
            lanes.add(Lane(model=SHARED_LANE, project_id=project_id))
        return lanes

    def _needed_of(self, model: str, enough: int) -> int | None:
        """Return the number of lines of a limited model that is enough; None if the model is not limited."""
        if self._breakers.is_paused(model):
            return 1
        limit = self._limiter.model(model)
        if not limit.is_limited:
            return None
        rate = limit.rate
        return enough if rate is None else min(enough, max(_MIN_LIMITED_LINES, int(rate * _LIMITED_SECONDS)))
