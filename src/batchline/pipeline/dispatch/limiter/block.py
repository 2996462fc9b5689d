"""Holds up all starts of a model whose upstream refuses everything, and tries one line now and then.

If the upstream said with Retry-After until when, all lines start then. Some upstreams send the same Retry-After
whatever they refuse, and an outage may end before it. Others say nothing, for example if they accept so many in each
few seconds. So one line is tried, each time another one. If it is not refused, the block is over::

    blocked ──(5 s; 1 s if an answer came; 0.25 s if a project waits that was not refused)──> one line is tried
       ^      (an eighth of the time so far, if the upstream did not say until when)           │
       └───────────────────────────────────(it is refused)─────────────────────────────────────┴──(else)──> over
"""

from math import inf

_SECONDS_BETWEEN_TRIES = 5.0
"""The time between two tries, as between the probes of an upstream that is paused because of 429s. When the upstream
accepts again, that must be noticed within 15 s."""
_SECONDS_AFTER_ANSWER = 1.0
"""The same if an answer came, so that a slot may be free. More tries would be a burden to an upstream that is right
about its Retry-After."""
_SECONDS_BEFORE_FIRST = 0.25
"""The same if a project waits that was not refused. That is no burden: if its line is refused, it is refused too."""
_LEAST_SECONDS_WITHOUT_END, _SECONDS_WITHOUT_END = 0.1, 2.0
_PART_WITHOUT_END = 1 / 8
"""If the upstream did not say until when it refuses, the time between two tries is this part of the time so far, within
these bounds. So the block is hardly longer than it must be. It is the least time if an answer came."""
_YOUNG_SECONDS = 10.0
"""An upstream that accepts so many in each few seconds accepts some within this time. A refusal after it may be due to
an outage, in which lines must end."""


class Block:
    """The block of one model."""

    def __init__(self) -> None:
        self.until = 0.0
        """The time at which the next request may start, as the upstream said; infinity if it did not say so."""
        self.began_at = 0.0
        self._tried_at = 0.0
        """The time of the last try, or of the beginning of the block."""
        self._tried = 0
        """The order of the last start that is a try; 0 if it was refused, or if there was none."""
        self._accepted_at = inf
        """The time at which the last try counts as accepted if it was not refused."""
        self._is_answered = False
        """Whether an answer came since the last try."""

    def begin(self, until: float, now: float) -> None:
        """Begin a block, or set its end again."""
        if now >= self.until:
            self.began_at = self._tried_at = now
            self._tried, self._is_answered = 0, False
        self.until = until

    def end(self) -> None:
        self.until = 0.0

    def is_on(self, now: float) -> bool:
        return now < self.until

    def is_young(self, now: float) -> bool:
        return now - self.began_at < _YOUNG_SECONDS

    def is_accepted(self, now: float) -> bool:
        """Return whether the last try was accepted."""
        return self._tried > 0 and now >= self._accepted_at

    def may_try(self, now: float, *, first: bool = False) -> bool:
        """Return whether a line may be tried. ``first`` says that its project was not refused."""
        return not self._tried and now >= (self._first_try_at if first else self._next_try_at)

    def wait(self, now: float) -> float:
        """Return the seconds until the block is over, the last try is accepted, or another line may be tried."""
        if self._tried:
            return max(0.0, min(self.until, self._accepted_at) - now)
        times = (self.until, self._next_try_at, self._first_try_at)
        return min((time - now for time in times if time > now), default=0.0)

    def on_try(self, now: float, order: int, *, patience: float) -> None:
        self._tried_at, self._tried, self._accepted_at = now, order, now + patience
        self._is_answered = False

    def on_answer(self, order: int, now: float) -> None:
        self._is_answered = True
        if order == self._tried:
            self._accepted_at = now

    def on_refusal(self, order: int) -> None:
        if order == self._tried:
            self._tried = 0

    @property
    def _first_try_at(self) -> float:
        return self._tried_at + _SECONDS_BEFORE_FIRST

    @property
    def _next_try_at(self) -> float:
        if self.until == inf:
            seconds = 0.0 if self._is_answered else _PART_WITHOUT_END * (self._tried_at - self.began_at)
            return self._tried_at + min(_SECONDS_WITHOUT_END, max(_LEAST_SECONDS_WITHOUT_END, seconds))
        return self._tried_at + (_SECONDS_AFTER_ANSWER if self._is_answered else _SECONDS_BETWEEN_TRIES)
