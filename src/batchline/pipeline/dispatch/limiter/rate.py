"""How fast requests may start, where an upstream refuses by rate.

Nothing is held back until the first refusal. From then on starts are spaced evenly. A refusal takes the rate down a
little and opens a *trial*: of the starts that follow, the share that is refused tells by how much it is still too
high. Between refusals the rate grows, slowly at first and faster the longer nothing is refused.

Some upstreams refuse now and then whatever the rate. So when few were refused the new rate is *checked*: if that did
not help, the rate is what it was before, and as many refusals are put up with.

::

    free ──(refused)──> trial ──(many)──> slower ──(refused)──> trial
    trial ──(few)──> check ──(hardly any left)──> slower, and growing ──(refused)──> trial
    check ──(as many as before)──> as before, free or not, until more are refused than that
"""

from math import inf, sqrt

_LEAST_TRIAL, _MOST_TRIAL, _TRIAL_SECONDS = 8, 24, 0.5
_STEP_BACK = 0.94
_BELOW = 0.97
"""Of the rate that was accepted."""
_DEEPEST_CUT = 0.25
_GUESS, _ROUGH = 0.4, 0.75
"""When less than such a share was accepted, the new rate is a guess, or a rough estimate."""
_SEARCHING, _SEEKING, _SLOW, _FAST = 0.2, 0.03, 0.005, 0.1
"""Growth a second: after a guess, after a rough estimate, after a good one, and after a long time."""
_PATIENCE = 15.0
"""Seconds without a refusal after which growth doubles."""
_LATE = 0.02
"""Seconds of starts that are caught up with when nobody asked in time."""
_LEAST_RATE = 1.0
"""Of an upstream that refuses everything: its lines must come to an end all the same."""
_SHORTEST_SPAN = 0.1
_CHECK, _CHECK_SECONDS, _LEAST_CHECK = 100, 5.0, 30
_HELPED = 0.3
"""A slower rate helped when less than such a share of the refusals is left."""
_FEW = 3
_LATELY, _SLOWLY = 1 / 40, 1 / 1000
"""Weights of one more end in the share that was refused lately, and of that share in what is put up with."""


class Trial:
    """Starts that are watched; over when the refused ones among them have had the time to come back."""

    def __init__(self, *, size: int, since: float, seconds: float) -> None:
        self._size, self._since, self.seconds = size, since, seconds
        self._starts = self.refusals = 0
        self._last: float | None = None

    @property
    def full(self) -> bool:
        return self._last is not None

    @property
    def over_at(self) -> float:
        if 2 * self.refusals >= self._size:
            return self._since
        return float("inf") if self._last is None else self._last + 1.5 * self.seconds + 0.005

    @property
    def accepted(self) -> float:
        return 1 - self.refusals / self._starts

    def started(self, now: float) -> None:
        if self._last is None:
            self._starts += 1
            if self._starts == self._size:
                self._last = now

    def refused(self, started: float, now: float) -> None:
        if self._since <= started and (self._last is None or started <= self._last):
            self.refusals += self.refusals < self._starts
            self.seconds = max(self.seconds, now - started)


class RateLimit:
    def __init__(self) -> None:
        self.rate: float | None = None
        """Starts a second; None while nothing is held back."""
        self._known: float | None = None
        """The rate that was accepted when it was last found out."""
        self._due = self._last_start = 0.0
        self._growth, self._faster_at = 0.0, 0.0
        self._counted = self._counted_before = 0
        self._counted_from = self._before_from = -inf
        self._trial: Trial | None = None
        self._checking = False
        self._before: float | None = None
        """The rate before the trial."""
        self._deaf_until = 0.0
        self.lately = self._lately_before = 0.0
        """The share that was refused of the last ends; nothing needs to be heard of answers while there is none."""
        self.background = 0.0
        """The share that is refused whatever the rate."""

    @property
    def careful(self) -> bool:
        """Whether it is about right, and grows slowly."""
        return self.rate is not None and self._growth <= 2 * _SLOW

    def wait(self, now: float) -> float:
        """Seconds until the next one may start."""
        return self._due - now if self._due > now else 0.0

    def started(self, now: float, count: int) -> None:
        """So many at once, which is one wherever they are spaced."""
        if now - self._counted_from > 1:
            self._counted_before, self._before_from = self._counted, self._counted_from
            self._counted, self._counted_from = 0, now
        self._counted += count
        if self._trial is not None:
            self._review(self._trial, now)
        if self._trial is not None:
            self._trial.started(now)
        if self.rate is not None:
            self._space(now, self.rate)

    def accepted(self) -> None:
        self.lately -= _LATELY * self.lately
        self.background = min(self.background, self.background + _SLOWLY * (self.lately - self.background))

    def refused(self, *, started: float, now: float) -> None:
        self.lately += _LATELY * (1 - self.lately)
        if self._trial is not None:
            self._trial.refused(started, now)
            self._review(self._trial, now)
        elif started >= self._deaf_until and self.lately > self._tolerated:
            self._begin_trial(seconds=now - started, now=now)

    @property
    def _tolerated(self) -> float:
        return self.background + 2 * sqrt(_LATELY * self.background)

    def _review(self, trial: Trial, now: float) -> None:
        if self.rate is None or now < trial.over_at:
            return
        self._trial, self._deaf_until = None, now
        if self._checking:
            self._end_check(trial)
        else:
            self._end_trial(trial, self.rate, now)

    def _end_check(self, trial: Trial) -> None:
        self._checking = False
        share = 1 - trial.accepted
        if trial.refusals >= _FEW and share > _HELPED * self._lately_before:
            self.rate, self.background = self._before, share
            self._growth = _SEARCHING
            self._due = self._last_start if self.rate is None else self._last_start + 1 / self.rate
        else:
            self.background = 0.0

    def _end_trial(self, trial: Trial, rate: float, now: float) -> None:
        accepted = trial.accepted
        self._known = None if accepted < _GUESS else rate * accepted
        self._growth = _SEARCHING if accepted < _GUESS else _SEEKING if accepted < _ROUGH else _SLOW
        self._faster_at = now + _PATIENCE
        if accepted < 1:
            self.rate = rate = max(_LEAST_RATE, rate * max(_DEEPEST_CUT, accepted) * _BELOW)
        self._due = self._last_start + 1 / rate
        if accepted >= _ROUGH:
            self._checking, self._lately_before = True, max(self.lately, 1 - accepted)
            size = int(max(_LEAST_CHECK, min(_CHECK, rate * _CHECK_SECONDS)))
            self._trial = Trial(size=size, since=now, seconds=trial.seconds)

    def _begin_trial(self, *, seconds: float, now: float) -> None:
        self._before = self.rate
        started = self._starts_a_second(now)
        self.rate = max(_LEAST_RATE, started if self.rate is None else _STEP_BACK * min(self.rate, 2 * started))
        size = int(min(_MOST_TRIAL, max(_LEAST_TRIAL, self.rate * _TRIAL_SECONDS)))
        self._trial = Trial(size=size, since=now, seconds=seconds)

    def _starts_a_second(self, now: float) -> float:
        """By one span of time or by two, of which the first may have been idle."""
        lately = self._counted / max(now - self._counted_from, _SHORTEST_SPAN)
        return max(lately, (self._counted + self._counted_before) / max(now - self._before_from, _SHORTEST_SPAN))

    def _space(self, now: float, rate: float) -> None:
        held = now - self._due < _LATE
        self._due = max(self._due, now - _LATE) + 1 / rate
        if self._trial is not None:
            if self._trial.full:
                self._wait_for(self._trial, now)
        elif held:
            self._grow(now, rate)
        self._last_start = now

    def _wait_for(self, trial: Trial, now: float) -> None:
        """Until the trial's verdict, go no faster than is known to be accepted; if nothing is known, not at all."""
        self._due = trial.over_at if self._known is None else max(self._due, now + 1 / self._known)

    def _grow(self, now: float, rate: float) -> None:
        if now >= self._faster_at:
            self._growth = max(self._growth, min(_FAST, 2 * self._growth))
            self._faster_at = now + _PATIENCE
        self.rate = rate * (1 + self._growth * min(1.0, now - self._last_start))
