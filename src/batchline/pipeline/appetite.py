"""How many more lines a dispatcher can use, of which projects; and a word to whoever claims them when that grows."""

from collections.abc import Callable

from batchline.pipeline.flight import InFlight
from batchline.pipeline.gate import Gate
from batchline.pipeline.leaving import Leaving
from batchline.pipeline.ready import Ready
from batchline.pipeline.waiting import Waiting

_CLAIM_SECONDS = 0.025
"""What a claim may take; as one costs as much as many lines, there should not be many more either."""

_MOST_WAITING = 4096
"""Lines that may wait for their next attempt before no more are claimed."""

_MOST_BYTES = 32 * 1024 * 1024
"""Of one project's lines that have no outcome yet, before no more of them are claimed."""

_NOTHING_IS_WANTED = ""
"""In the place of projects that need no more lines."""


class Appetite:
    def __init__(
        self,
        *,
        ready: Ready,
        waiting: Waiting,
        flying: InFlight,
        gate: Gate,
        leaving: Leaving,
        hungry: Callable[[], None],
    ) -> None:
        self._ready, self._waiting, self._flying = ready, waiting, flying
        self._gate, self._leaving, self._hungry = gate, leaving, hungry
        self._told: set[str] = set()

    @property
    def wanted(self) -> int:
        """How many more lines may be claimed. An upstream that is gone needs one to be probed with, and rather one
        that is not suspected of anything."""
        if self._leaving.draining or len(self._waiting) >= _MOST_WAITING:
            return 0
        if self._gate.paused:
            return 0 if self._ready else 1
        return 2 * self._enough

    @property
    def _enough(self) -> int:
        """Lines that keep every slot busy until the next claim, also where they land in no time."""
        return max(self._flying.slots, self._flying.within(_CLAIM_SECONDS))

    @property
    def sated(self) -> set[str]:
        """Projects that have enough lines, and need no more."""
        return {project_id for project_id in self._leaving.bytes_of if self._is_sated(project_id)}

    def tell(self) -> None:
        """Once, when something that could not be claimed before can be now."""
        sated = self.sated if self.wanted else {_NOTHING_IS_WANTED}
        if self._told - sated:
            self._hungry()
        self._told = sated

    def took(self, project_ids: set[str]) -> None:
        """Lines of theirs are not ready any more."""
        if any(not self._is_sated(project_id) for project_id in project_ids & self._told):
            self.tell()

    def upstream_answered(self) -> None:
        if _NOTHING_IS_WANTED in self._told:
            self.tell()

    def _is_sated(self, project_id: str) -> bool:
        return self._ready.of(project_id) >= self._enough or self._leaving.bytes_of[project_id] >= _MOST_BYTES
