"""How fast lines are done, and when all will be."""

from collections import deque

_WINDOW_SECONDS = 10.0


class Pace:
    """Over the last seconds, so that what is told follows what happens."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def see(self, done: int, *, at: float) -> None:
        self._seen.append((at, done))
        while len(self._seen) > 2 and self._seen[1][0] <= at - _WINDOW_SECONDS:
            self._seen.popleft()

    @property
    def per_second(self) -> float:
        if len(self._seen) < 2:
            return 0.0
        (first_at, first), (last_at, last) = self._seen[0], self._seen[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0

    def seconds_for(self, lines: int) -> float | None:
        """None while nothing moves."""
        return lines / self.per_second if self.per_second > 0 else None
