"""How much one project may have under way at once, so that none takes the service from the others."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from batchline.domain.errors import RateLimited

_RETRY_AFTER_SECONDS = 1


class Throttle:
    def __init__(self, most: int, *, of: str) -> None:
        self._most, self._of = most, of
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def place(self, project_id: str) -> Iterator[None]:
        """One of the project's places, while it is needed. Raises RateLimited when all are taken."""
        if self._under_way[project_id] >= self._most:
            raise RateLimited(
                f"This project has {self._most} {self._of} under way already. Try again shortly.",
                retry_after=_RETRY_AFTER_SECONDS,
            )
        self._under_way[project_id] += 1
        try:
            yield
        finally:
            self._under_way[project_id] -= 1
            if not self._under_way[project_id]:
                del self._under_way[project_id]
