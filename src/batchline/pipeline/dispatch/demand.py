"""How many more lines a dispatcher can use, and of which projects; the claim loop is woken when that grows."""

from collections.abc import Callable, Iterable

from batchline.pipeline.dispatch.circuit_breaker import CircuitBreaker
from batchline.pipeline.dispatch.completion import Completer
from batchline.pipeline.dispatch.in_flight import InFlight
from batchline.pipeline.dispatch.queues import ReadyQueue, RetryQueue

_CLAIM_SECONDS = 0.025
"""The time a claim may take. Lines are claimed ahead for that long, since one claim costs as much as many lines."""

_MAX_WAITING_LINES = 4096
"""Lines that may wait for their next attempt before no more are claimed."""

_MAX_PROJECT_BYTES = 32 * 1024 * 1024
"""Bytes of one project's lines that may be held before no more of them are claimed."""

_ALL_PROJECTS = ""
"""Stands for every project in a set of satisfied ones, while nothing at all is wanted."""


class Demand:
    """The demand of one dispatcher. ``on_demand`` is called when something is wanted now that was not wanted before."""

    def __init__(
        self,
        *,
        ready: ReadyQueue,
        retries: RetryQueue,
        in_flight: InFlight,
        breaker: CircuitBreaker,
        completer: Completer,
        on_demand: Callable[[], None],
    ) -> None:
        self._ready, self._retries, self._in_flight = ready, retries, in_flight
        self._breaker, self._completer, self._on_demand = breaker, completer, on_demand
        self._last_satisfied: set[str] = set()

    @property
    def wanted_lines(self) -> int:
        """How many more lines may be claimed. A paused upstream needs one ready line, to be probed with."""
        if self._completer.draining or len(self._retries) >= _MAX_WAITING_LINES:
            return 0
        if self._breaker.paused:
            return 0 if self._ready else 1
        return 2 * self._in_flight.lines_for(_CLAIM_SECONDS)

    @property
    def satisfied_projects(self) -> set[str]:
        """The projects that have enough lines here."""
        return self._satisfied_of(self._completer.bytes_by_project)

    def update(self) -> None:
        """Compare with the last time, and call ``on_demand`` if more is wanted now."""
        satisfied = self.satisfied_projects if self.wanted_lines else {_ALL_PROJECTS}
        if self._last_satisfied - satisfied:
            self._on_demand()
        self._last_satisfied = satisfied

    def on_lines_taken(self, project_ids: set[str]) -> None:
        """Update after lines of these projects left the ready queue."""
        satisfied_before = project_ids & self._last_satisfied
        if satisfied_before and satisfied_before != self._satisfied_of(satisfied_before):
            self.update()

    def on_upstream_answer(self) -> None:
        if _ALL_PROJECTS in self._last_satisfied:
            self.update()

    def _satisfied_of(self, project_ids: Iterable[str]) -> set[str]:
        enough, held_bytes = self._in_flight.lines_for(_CLAIM_SECONDS), self._completer.bytes_by_project
        return {
            project_id
            for project_id in project_ids
            if self._ready.count(project_id) >= enough or held_bytes[project_id] >= _MAX_PROJECT_BYTES
        }
