"""Limits the requests that one project may have in parallel, so that no project takes the service from the others."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from batchline.domain.errors import RateLimited

_RETRY_AFTER_SECONDS = 1


class Throttle:
    """Counts the requests of every project; ``of`` names them in the error message."""

    def __init__(self, limit: int, *, of: str) -> None:
        self._limit, self._of = limit, of
        self._in_flight: Counter[str] = Counter()

    @contextmanager
    def slot(self, project_id: str) -> Iterator[None]:
        """Hold one of the project's slots. Raise RateLimited if all are taken."""
        if self._in_flight[project_id] >= self._limit:
            raise RateLimited(
                f"This project has {self._limit} {self._of} under way already. Try again shortly.",
                retry_after=_RETRY_AFTER_SECONDS,
            )
        self._in_flight[project_id] += 1
        try:
            yield
        finally:
            self._in_flight[project_id] -= 1
            if not self._in_flight[project_id]:
                del self._in_flight[project_id]
