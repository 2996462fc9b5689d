"""Counts which of some successive starts are refused."""

from math import inf

_REFUSALS_TO_JUDGE, _REFUSED_PART_TO_JUDGE = 4, 0.5
"""A sample with this number and part of refusals shows that too many are refused, also before it is complete."""


class Sample:
    """The starts after one moment, at least ``size`` of them and for at least ``seconds``.

    With ``most_seconds`` it ends after that time if it has ``least`` starts then. Unless ``whole``, many refusals end
    it. Refusals come quickly, so a start that was not refused for some time, the ``patience``, was accepted.
    """

    def __init__(
        self,
        now: float,
        *,
        after: int,
        size: int,
        least: int = 0,
        seconds: float = 0.0,
        most_seconds: float = inf,
        whole: bool = False,
    ) -> None:
        self._after, self._size, self._least = after, size, least
        self._since, self._until = now + seconds, now + most_seconds
        self._whole = whole
        self._started = self._judged = 0
        self.refused = 0
        self.complete_at = inf
        """When the last of its starts can be taken as accepted, once it has enough of them."""

    def on_start(self, now: float, count: int, *, patience: float) -> None:
        if self._started >= max(1, self._least) and now >= self._until:
            return
        if self._started >= self._size and now >= self._since:
            return
        self._started += count
        if self._started >= self._size:
            self.complete_at = max(now, self._since) + patience
        elif self._started >= self._least and self._until < inf:
            self.complete_at = max(now, self._until) + patience

    def on_refusal(self, order: int) -> None:
        """Count the refusal of the so-many-th start of all, if it belongs to this sample."""
        number = order - self._after
        if 0 < number <= self._started:
            self.refused += 1
            self._judged = max(self._judged, number)

    def is_complete(self, now: float) -> bool:
        if now >= self.complete_at:
            self._judged = self._started
            return True
        return not self._whole and self.refused >= max(_REFUSALS_TO_JUDGE, _REFUSED_PART_TO_JUDGE * self._size)

    @property
    def refused_part(self) -> float:
        """The part of its starts that was refused, of those that can be judged: up to the last refused one."""
        return self.refused / self._judged if self._judged else 0.0
