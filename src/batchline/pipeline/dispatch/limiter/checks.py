"""Checks whether it is true that an upstream accepts no more requests, as its headers say.

::

    believed ──(nothing was left at all, not even after a reset; or nothing is left for a minute)──> doubted
    doubted ──(now and then a request starts all the same: a check)──┬──(refused: checks are rarer)──> doubted
                                                                     └──(four in a row accepted)──> disbelieved
    disbelieved ──(after five minutes: then one accepted check is enough)──> doubted
    any ──(they contradict each other)──> disbelieved

Some upstreams always say that nothing is left, or name a wrong unit for the time of the reset. One that is right shows
that something is left, at least after a reset: it is never asked before the reset, unless that is minutes away.
"""

from math import inf

_BELIEVED_SECONDS = 60.0
"""The time for which it is believed that nothing is left. Most limits are announced for a minute or less."""
_FIRST_WAIT_SECONDS = 1.0
"""The time before a check of headers that are doubted, or half of the time until the reset if that is shorter. It is
nothing beside the minutes that a wrong reset may cost. It doubles with each check that is refused."""
_LONGEST_WAIT_SECONDS, _LONGEST_WAIT_PART = 15.0, 0.25
"""The longest time between two checks, or this part of the time until the reset if that is longer. So a true limit is
checked about four times in a window of a minute, and a shorter window seldom."""
_ACCEPTED_TO_DISBELIEVE = 4
"""One accepted check may be a bucket that was filled a little, or a limit whose last request was left after all."""
_DISBELIEVED_SECONDS = 300.0
"""The headers may be right after the upstream was repaired. If they are not, one more check shows it."""


class Checks:
    """The checks of the headers of one model."""

    def __init__(self) -> None:
        self._nothing_left = self._was_left = False
        """Whether nothing is left now, and whether anything was ever left."""
        self._first_reset_at = inf
        """The time of the first reset that was announced with nothing left."""
        self._is_doubted = False
        self._wait = self._longest_wait = _FIRST_WAIT_SECONDS
        self._due = -inf
        self._accepted = 0
        """The number of checks that were accepted since the last refusal, and nothing was left after them."""
        self._disbelieved_until = -inf

    def is_believed(self, now: float) -> bool:
        return now >= self._disbelieved_until

    def on_announcement(self, reset_seconds: float | None, now: float) -> None:
        """Note that nothing is left until a reset, or with None that something is left."""
        if reset_seconds is None:
            self._nothing_left, self._was_left = False, True
            return
        self._longest_wait = max(_LONGEST_WAIT_SECONDS, _LONGEST_WAIT_PART * reset_seconds)
        self._first_reset_at = min(self._first_reset_at, now + reset_seconds)
        was_doubted, self._is_doubted = self._is_doubted, not self._was_left and now > self._first_reset_at
        if not self._nothing_left or self._is_doubted is not was_doubted:
            first_wait = min(_FIRST_WAIT_SECONDS, reset_seconds / 2) if self._is_doubted else _BELIEVED_SECONDS
            self._due = now + first_wait
        self._nothing_left = True

    @property
    def due(self) -> float:
        """The time of the next check; infinity if there is nothing to check."""
        return self._due if self._nothing_left else inf

    def on_start(self, now: float) -> None:
        """Note that a check starts."""
        self._due = now + self._wait

    def on_accepted(self, now: float) -> bool:
        """Note that a check was accepted, and return whether the headers are disbelieved from now on.

        If its answer says that something is left, only the reset came earlier than announced.
        """
        self._accepted, self._wait = self._accepted + self._nothing_left, _FIRST_WAIT_SECONDS
        self._due = min(self._due, now + self._wait)
        if self._accepted < _ACCEPTED_TO_DISBELIEVE:
            return False
        self.disbelieve(now)
        return True

    def disbelieve(self, now: float) -> None:
        """Ignore the headers for a while."""
        self._accepted, self._nothing_left = _ACCEPTED_TO_DISBELIEVE - 1, False
        self._disbelieved_until = now + _DISBELIEVED_SECONDS

    def on_refused(self, now: float, *, check: bool) -> None:
        """Note a refusal: what the headers say may be true."""
        if self.is_believed(now):
            self._accepted = 0
        if check:
            self._wait = min(2 * self._wait, self._longest_wait)
            self._due = now + self._wait
