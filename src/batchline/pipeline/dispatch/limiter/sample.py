"""Counts which of some successive starts are refused."""

from math import inf

from batchline.pipeline.dispatch.limiter.gaps import gap_evidence

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
        self._in_flight: list[int] = []
        """The number in flight with each of its starts."""
        self._starts: list[float] = []
        self._refused: list[int] = []
        """The numbers of the refused starts, from 0."""
        self._refused_for_lines: list[int] = []
        """The numbers of the starts whose refusals seem to be about their lines."""
        self.complete_at = inf
        """The time at which its last start counts as accepted; infinity until it has enough starts."""

    def on_start(self, now: float, count: int, in_flight: int, *, patience: float) -> None:
        if self._started >= max(1, self._least) and now >= self._until:
            return
        if self._started >= self._size and now >= self._since:
            return
        self._started += count
        self._starts.extend([now] * count)
        self._in_flight.extend(range(in_flight - count + 1, in_flight + 1))
        if self._started >= self._size:
            self.complete_at = max(now, self._since) + patience
        elif self._started >= self._least and self._until < inf:
            self.complete_at = max(now, self._until) + patience

    def on_refusal(self, order: int) -> None:
        """Count the refusal of the start with this number, if it belongs to this sample."""
        number = order - self._after
        if 0 < number <= self._started:
            self._judged = max(self._judged, number)
            self._refused.append(number - 1)

    def on_other_refusal(self, order: int) -> None:
        """Count a refusal that seems to be about its line."""
        number = order - self._after
        if 0 < number <= self._started:
            self._refused_for_lines.append(number - 1)

    def end_if_complete(self, now: float) -> bool:
        """Return whether the sample is complete. When its time is over, what was not refused was accepted."""
        if now >= self.complete_at:
            self._judged = self._started
            return True
        return not self._whole and self.refused >= max(_REFUSALS_TO_JUDGE, _REFUSED_PART_TO_JUDGE * self._size)

    @property
    def refused(self) -> int:
        return len(self._refused)

    @property
    def refused_part(self) -> float:
        """The part of its starts that was refused. Before it is complete, starts up to the last refused one count.

        A start whose refusal seems to be about its line counts as accepted, unless no other was.
        """
        if not self.refused:
            return 0.0
        for_lines = sum(number < self._judged for number in self._refused_for_lines)
        return 1.0 if self.refused + for_lines == self._judged else self.refused / self._judged

    @property
    def rate(self) -> float:
        """Its starts in a second, from the first to the last."""
        seconds = self._starts[-1] - self._starts[0] if self._starts else 0.0
        return (self._started - 1) / seconds if seconds > 0 else inf

    @property
    def gap_evidence(self) -> float | None:
        """How clearly the refused starts followed others too closely, from 0.5 to 1.

        It is None if there are too few of them, or if all had more in flight than the accepted ones: that is as clear.
        """
        evidence = gap_evidence(self._starts[: self._judged], self._refused)
        if evidence is None:
            return None
        accepted = set(range(self._judged)).difference(self._refused)
        most, least = (max(self._in_flight[n] for n in accepted), min(self._in_flight[n] for n in self._refused))
        return evidence if most >= least else None

    @property
    def accepted_number(self) -> int | None:
        """The number in flight beyond which every start was refused, and no other; None if there is no such number.

        As many as were refused must have been accepted after the first of them: if an upstream refuses all from some
        moment on, these are mostly the ones with the most in flight too.
        """
        if self.refused <= 1:
            return None
        in_flight, first = self._in_flight[: self._judged], min(self._refused)
        if len(in_flight) - first < 2 * self.refused:
            return None
        number = min(in_flight[refused] for refused in self._refused) - 1
        return number if sum(each > number for each in in_flight) == self.refused else None
