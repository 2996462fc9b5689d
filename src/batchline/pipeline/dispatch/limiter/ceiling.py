"""Learns from refusals how many requests of a model its upstream accepts at once.

::

    unknown ──(refused with n in flight, and nothing with n was accepted lately)──> n - 1
    n - 1   ──(one with more in flight is answered after all)──> as many, or as before if most of them are
    n       ──(now and then, when n are in flight)──> n + 2 % ──(accepted)──> + 16 %, + 100 %
                                                              └──(refused)──> n
"""

_SHORTEST_MEMORY_SECONDS, _MEMORY_LATENCIES = 3.0, 4
"""How long an accepted number is remembered."""
_FIRST_GROWTH, _GROWTH_OF_GROWTH, _LARGEST_GROWTH = 0.02, 8.0, 1.0
_SECONDS_BETWEEN_PROBES = 1.0
_TENTATIVE_SECONDS = 5.0
"""The time in which an answer can show that a refusal was not about the number."""
_MOSTLY = 2
_MIN_ACCEPTED = 8
_UNEXPLAINED_WEIGHT, _MANY_UNEXPLAINED, _DOUBT_SECONDS = 0.03, 0.4, 1.0
"""If more than this part is refused below a ceiling, it is doubled, and not lowered again for this time."""
_SETTLING_FACTOR = 2.0
"""The time that a ceiling needs to show its effect, in latencies of a refusal."""


class Ceiling:
    """The most requests of a model that may be in flight; None while no refusal was about their number."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self._highest = self._highest_before = 0
        """The most that were in flight with an accepted request, in this span of time and in the one before."""
        self._span_ends = 0.0
        self._growth = _FIRST_GROWTH
        self._next_probe = 0.0
        self._stable: int | None = None
        """The highest ceiling that was accepted for half a round."""
        self._accepted = 0
        """How many were accepted at the ceiling since it was set."""
        self._before: int | None = None
        """The ceiling before the first refusal of a row."""
        self._refused_at: float | None = None
        """When that first refusal came, while answers can show that it was not about the number."""
        self._refused_beyond = self._answered_beyond = 0
        """How many were refused and answered since then with more in flight than the ceiling."""
        self._settled_at = 0.0
        """When the upstream has noticed that fewer are sent. Refusals of what started before say nothing new."""
        self._unexplained = 0.0
        """The part of the last few dozen below the ceiling that was refused."""
        self._doubted_until = 0.0

    def on_answer(self, in_flight: int, *, started: float, now: float) -> None:
        if now >= self._span_ends:
            self._highest_before, self._highest = self._highest, 0
            self._span_ends = now + max(_SHORTEST_MEMORY_SECONDS, _MEMORY_LATENCIES * (now - started))
        self._highest = max(self._highest, in_flight)
        self._unexplained -= _UNEXPLAINED_WEIGHT * self._unexplained
        if self.limit is not None:
            self._consider_answer(self.limit, in_flight, started=started, now=now)

    def explains(self, in_flight: int, *, started: float) -> bool:
        """Return whether a refusal of a request that started with so many in flight can be about their number.

        A single number that was accepted above a stable ceiling shows little: the upstream may have finished another
        request that is still on its way back.
        """
        if started < self._doubted_until:
            return False
        if self._stable is not None and in_flight > self._stable:
            return True
        return in_flight > max(1, self._highest, self._highest_before)

    def reset(self) -> None:
        """Forget the ceiling: what was refused was not refused for its number."""
        self.limit, self._stable, self._refused_at = None, None, None
        self._growth, self._accepted, self._unexplained = _FIRST_GROWTH, 0, 0.0

    def hold(self, limit: int, now: float) -> None:
        """Set the ceiling to a number that is being processed while everything else is refused."""
        self.reset()
        self.limit, self._stable = limit, limit
        self._next_probe = self._settled_at = now + _SECONDS_BETWEEN_PROBES

    def is_settling(self, started: float) -> bool:
        """Return whether the upstream may not have noticed yet, when a request started, that fewer are sent."""
        return started < self._settled_at

    def on_refusal(self, in_flight: int, *, started: float, now: float) -> None:
        """Lower the ceiling below a number that was refused."""
        self._settled_at = now + _SETTLING_FACTOR * (now - started)
        if self._stable is None and self._refused_at is None:
            self._refused_at, self._before = now, self.limit
            self._refused_beyond = self._answered_beyond = 0
        self._refused_beyond += 1
        least = 1 if self._stable is None else self._stable
        self.limit = max(least, in_flight - 1 if self.limit is None else min(self.limit, in_flight - 1))
        self._growth, self._accepted = _FIRST_GROWTH, 0
        self._next_probe = now + _SECONDS_BETWEEN_PROBES

    def on_unexplained_refusal(self, now: float) -> None:
        """Doubt the ceiling after many refusals below it: numbers may have nothing to do with them."""
        if self.limit is None or now < self._doubted_until:
            return
        self._unexplained += _UNEXPLAINED_WEIGHT * (1 - self._unexplained)
        if self._unexplained > _MANY_UNEXPLAINED:
            self.limit, self._stable, self._refused_at = 2 * self.limit, None, None
            self._unexplained, self._doubted_until = 0.0, now + _DOUBT_SECONDS

    def _consider_answer(self, limit: int, in_flight: int, *, started: float, now: float) -> None:
        if self._refused_at is not None:
            if in_flight > limit:
                # The upstream may count differently by a few. If it accepts most of them, it does not count at all.
                self._answered_beyond += 1
                if self._answered_beyond > _MOSTLY * self._refused_beyond:
                    self.limit, self._refused_at, self._stable = self._before, None, None
                else:
                    self.limit = in_flight
                return
            if now - self._refused_at > _TENTATIVE_SECONDS:
                self._refused_at = None
        if in_flight >= limit and started >= self._next_probe:
            self._accepted += 1
            if self._accepted >= max(_MIN_ACCEPTED, limit // 2):
                self._raise(limit, now)

    def _raise(self, limit: int, now: float) -> None:
        """Try a higher ceiling, because half a round at the present one was accepted."""
        if self._stable is not None and self._stable < limit:
            self._growth = min(_LARGEST_GROWTH, self._growth * _GROWTH_OF_GROWTH)
        self.limit = max(limit + 1, int(limit * (1 + self._growth)))
        self._stable, self._accepted, self._next_probe, self._refused_at = limit, 0, now, None
