"""Routes synchronous calls: chooses the upstream of each, and counts the slots that they take from batches."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from batchline.ports import Clock

_EJECTION_SECONDS = 10.0
"""The time for which an upstream that failed a call is avoided if the model has others."""


class SyncCalls:
    """The synchronous calls to one upstream that are in progress."""

    def __init__(self) -> None:
        self.total = 0
        self.by_project: Counter[str] = Counter()

    def begin(self, project_id: str) -> None:
        self.total += 1
        self.by_project[project_id] += 1

    def end(self, project_id: str) -> None:
        self.total -= 1
        self.by_project[project_id] -= 1
        if not self.by_project[project_id]:
            del self.by_project[project_id]


class SyncRouter:
    """The synchronous calls in progress, by upstream."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._calls: defaultdict[str, SyncCalls] = defaultdict(SyncCalls)
        self._failed_at: dict[str, float] = {}
        self._watchers: dict[str, Callable[[], None]] = {}
        self._answer_watchers: dict[str, Callable[[str], None]] = {}

    def calls(self, upstream: str) -> SyncCalls:
        """Return the calls to an upstream. The object is the same one while calls begin and end."""
        return self._calls[upstream]

    def watch(self, upstream: str, *, on_call_ended: Callable[[], None], on_answer: Callable[[str], None]) -> None:
        """Call ``on_call_ended`` after each call to an upstream: a slot is free again.

        ``on_answer`` is called with the model of each call that was answered: the upstream is available.
        """
        self._watchers[upstream], self._answer_watchers[upstream] = on_call_ended, on_answer

    def choose(self, upstreams: Sequence[str]) -> str:
        """Return the upstream with the fewest calls. One that failed lately is chosen only if all did."""
        now = self._clock.steady()

        def rank(name: str) -> tuple[bool, int]:
            return now - self._failed_at.get(name, -math.inf) < _EJECTION_SECONDS, self._calls[name].total

        return min(upstreams, key=rank)

    def on_answer(self, upstream: str, model: str) -> None:
        """Notify the watcher of an upstream that it answered a call of a model."""
        if (on_answer := self._answer_watchers.get(upstream)) is not None:
            on_answer(model)

    def on_failure(self, upstream: str) -> None:
        """Avoid an upstream for a while, because a call to it failed."""
        self._failed_at[upstream] = self._clock.steady()

    @contextmanager
    def call(self, upstream: str, project_id: str) -> Iterator[None]:
        """Count a call of a project to an upstream while the body runs."""
        calls = self._calls[upstream]
        calls.begin(project_id)
        try:
            yield
        finally:
            calls.end(project_id)
            if (on_call_ended := self._watchers.get(upstream)) is not None:
                on_call_ended()
