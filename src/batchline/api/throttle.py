"""Limits what one project, and all of them together, may have under way, so that none takes the service from others."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from batchline.domain.errors import RateLimited

_RETRY_AFTER_SECONDS = 1


class Throttle:
    """Counts the requests of every project; ``of`` names them in the error message, ``bound`` in the metrics."""

    def __init__(self, limit: int, *, of: str, bound: str) -> None:
        self._limit, self._of, self._bound = limit, of, bound
        self._in_flight: Counter[str] = Counter()

    @contextmanager
    def slot(self, project_id: str) -> Iterator[None]:
        """Hold one of the project's slots. Raise RateLimited if all are taken."""
        if self._in_flight[project_id] >= self._limit:
            raise RateLimited(
                f"This project has {self._limit} {self._of} under way already. Try again shortly.",
                retry_after=_RETRY_AFTER_SECONDS,
                bound=self._bound,
            )
        self._in_flight[project_id] += 1
        try:
            yield
        finally:
            self._in_flight[project_id] -= 1
            if not self._in_flight[project_id]:
                del self._in_flight[project_id]


class BodyBytes:
    """Counts the bytes of the bodies that calls hold, from before they are read until the call has ended.

    One body is always accepted, however large, if nothing else is held against the same limit.
    """

    def __init__(self, *, limit: int, project_limit: int) -> None:
        self._limit, self._project_limit = limit, project_limit
        self._total = 0
        self._by_project: Counter[str] = Counter()

    @contextmanager
    def reserve(self, project_id: str, size: int) -> Iterator[None]:
        """Hold bytes for one body. Raise RateLimited if too many are held."""
        if 0 < self._by_project[project_id] > self._project_limit - size:
            raise RateLimited(
                f"This project has synchronous calls under way with {self._project_limit} bytes. Try again shortly.",
                retry_after=_RETRY_AFTER_SECONDS,
                bound="project_call_bytes",
            )
        if 0 < self._total > self._limit - size:
            raise RateLimited(
                "The service has too many large synchronous calls under way. Try again shortly.",
                retry_after=_RETRY_AFTER_SECONDS,
                bound="call_bytes",
            )
        self._add(project_id, size)
        try:
            yield
        finally:
            self._add(project_id, -size)

    def _add(self, project_id: str, size: int) -> None:
        self._total += size
        self._by_project[project_id] += size
        if not self._by_project[project_id]:
            del self._by_project[project_id]
