"""Finds how fast requests may start, if an upstream refuses by rate.

Nothing is held back until the first refusal. From then on starts are spaced evenly. A refusal lowers the rate a little
and begins a *trial*: the part of the following starts that is refused shows by how much the rate is still too high.
Between refusals the rate grows, slowly at first and faster the longer nothing is refused.

Some upstreams refuse now and then at any rate. So if few were refused, the new rate is *checked*: if it did not help,
the rate from before is restored, and as many refusals are tolerated.

::

    free ──(refused)──> trial ──(many)──> slower ──(refused)──> trial
    trial ──(few)──> check ──(hardly any left)──> slower, and growing ──(refused)──> trial
    check ──(as many as before)──> as before, free or not, until more are refused than that
"""

from math import inf, sqrt

_MIN_TRIAL_STARTS, _MAX_TRIAL_STARTS, _TRIAL_SECONDS = 8, 24, 0.5
_FIRST_CUT_FACTOR = 0.94
"""What a refusal leaves of the rate during its trial."""
_ACCEPTED_FACTOR = 0.97
"""The part of the accepted rate that is used."""
_MAX_CUT_FACTOR = 0.25
_GUESS_BELOW, _ROUGH_BELOW = 0.4, 0.75
"""If less than this part of a trial was accepted, the new rate is a guess, or a rough estimate."""
_GROWTH_AFTER_GUESS, _GROWTH_AFTER_ROUGH, _SLOW_GROWTH, _FAST_GROWTH = 0.2, 0.03, 0.005, 0.1
"""Growth per second: after a guess, after a rough estimate, after a good one, and after a long time."""
_SECONDS_TO_DOUBLE_GROWTH = 15.0
"""The time without a refusal after which growth doubles."""
_CATCH_UP_SECONDS = 0.02
"""The time whose starts are made up for if no start was asked for when it was due."""
_MIN_RATE = 1.0
"""The rate for an upstream that refuses everything: its lines must end even then."""
_MIN_SPAN_SECONDS = 0.1
_MAX_CHECK_STARTS, _CHECK_SECONDS, _MIN_CHECK_STARTS = 100, 5.0, 30
_HELPED_BELOW = 0.3
"""A slower rate helped if less than this part of the refusals is left."""
_MIN_CHECK_REFUSALS = 3
_RECENT_WEIGHT, _BACKGROUND_WEIGHT = 1 / 40, 1 / 1000
"""The weight of one end in the recent refusals, and of the recent refusals in those that are tolerated."""


class Trial:
    """Starts that are counted. It ends when the refused ones among them have had the time to end."""

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
    """The limit on starts per second, and the search for it."""

    def __init__(self) -> None:
        self.rate: float | None = None
        """Starts per second; None while nothing is held back."""
        self._known: float | None = None
        """The rate that was accepted at the end of the last trial."""
        self._due = self._last_start = 0.0
        self._growth, self._faster_at = 0.0, 0.0
        self._counted = self._counted_before = 0
        self._counted_from = self._before_from = -inf
        self._trial: Trial | None = None
        self._checking = False
        self._before: float | None = None
        """The rate before the trial."""
        self._ignore_starts_before = 0.0
        self.recent_refusals = self._recent_refusals_before = 0.0
        """The part of the recent ends that was refused. While it is 0, answers need not be reported."""
        self.background = 0.0
        """The part that is refused at any rate, and tolerated."""

    @property
    def careful(self) -> bool:
        """Whether the rate is about right, and grows slowly."""
        return self.rate is not None and self._growth <= 2 * _SLOW_GROWTH

    def wait(self, now: float) -> float:
        """Return the seconds until the next one may start."""
        return self._due - now if self._due > now else 0.0

    def started(self, now: float, count: int) -> None:
        """Report so many starts at once. It is one at a time while starts are spaced."""
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
        """Report an end that was no refusal."""
        self.recent_refusals -= _RECENT_WEIGHT * self.recent_refusals
        self.background = min(
            self.background, self.background + _BACKGROUND_WEIGHT * (self.recent_refusals - self.background)
        )

    def refused(self, *, started: float, now: float) -> None:
        self.recent_refusals += _RECENT_WEIGHT * (1 - self.recent_refusals)
        if self._trial is not None:
            self._trial.refused(started, now)
            self._review(self._trial, now)
        elif started >= self._ignore_starts_before and self.recent_refusals > self._tolerated:
            self._begin_trial(seconds=now - started, now=now)

    @property
    def _tolerated(self) -> float:
        return self.background + 2 * sqrt(_RECENT_WEIGHT * self.background)

    def _review(self, trial: Trial, now: float) -> None:
        if self.rate is None or now < trial.over_at:
            return
        self._trial, self._ignore_starts_before = None, now
        if self._checking:
            self._end_check(trial)
        else:
            self._end_trial(trial, self.rate, now)

    def _end_check(self, trial: Trial) -> None:
        self._checking = False
        share = 1 - trial.accepted
        if trial.refusals >= _MIN_CHECK_REFUSALS and share > _HELPED_BELOW * self._recent_refusals_before:
            self.rate, self.background = self._before, share
            self._growth = _GROWTH_AFTER_GUESS
            self._due = self._last_start if self.rate is None else self._last_start + 1 / self.rate
        else:
            self.background = 0.0

    def _end_trial(self, trial: Trial, rate: float, now: float) -> None:
        accepted = trial.accepted
        self._known = None if accepted < _GUESS_BELOW else rate * accepted
        self._growth = (
            _GROWTH_AFTER_GUESS
            if accepted < _GUESS_BELOW
            else _GROWTH_AFTER_ROUGH
            if accepted < _ROUGH_BELOW
            else _SLOW_GROWTH
        )
        self._faster_at = now + _SECONDS_TO_DOUBLE_GROWTH
        if accepted < 1:
            self.rate = rate = max(_MIN_RATE, rate * max(_MAX_CUT_FACTOR, accepted) * _ACCEPTED_FACTOR)
        self._due = self._last_start + 1 / rate
        if accepted >= _ROUGH_BELOW:
            self._checking, self._recent_refusals_before = True, max(self.recent_refusals, 1 - accepted)
            size = int(max(_MIN_CHECK_STARTS, min(_MAX_CHECK_STARTS, rate * _CHECK_SECONDS)))
            self._trial = Trial(size=size, since=now, seconds=trial.seconds)

    def _begin_trial(self, *, seconds: float, now: float) -> None:
        self._before = self.rate
        started = self._starts_per_second(now)
        self.rate = max(_MIN_RATE, started if self.rate is None else _FIRST_CUT_FACTOR * min(self.rate, 2 * started))
        size = int(min(_MAX_TRIAL_STARTS, max(_MIN_TRIAL_STARTS, self.rate * _TRIAL_SECONDS)))
        self._trial = Trial(size=size, since=now, seconds=seconds)

    def _starts_per_second(self, now: float) -> float:
        """Return the recent starts per second, by one span of time or by two, of which the first may have been idle."""
        by_one_span = self._counted / max(now - self._counted_from, _MIN_SPAN_SECONDS)
        started = self._counted + self._counted_before
        return max(by_one_span, started / max(now - self._before_from, _MIN_SPAN_SECONDS))

    def _space(self, now: float, rate: float) -> None:
        held = now - self._due < _CATCH_UP_SECONDS
        self._due = max(self._due, now - _CATCH_UP_SECONDS) + 1 / rate
        if self._trial is not None:
            if self._trial.full:
                self._wait_for(self._trial, now)
        elif held:
            self._grow(now, rate)
        self._last_start = now

    def _wait_for(self, trial: Trial, now: float) -> None:
        """Until the trial ends, start no faster than is known to be accepted; if nothing is known, start nothing."""
        self._due = trial.over_at if self._known is None else max(self._due, now + 1 / self._known)

    def _grow(self, now: float, rate: float) -> None:
        if now >= self._faster_at:
            self._growth = max(self._growth, min(_FAST_GROWTH, 2 * self._growth))
            self._faster_at = now + _SECONDS_TO_DOUBLE_GROWTH
        self.rate = rate * (1 + self._growth * min(1.0, now - self._last_start))
