"""Finds how many requests of a model its upstream accepts in a second, and spaces their starts.

::

    free ──(refusals)──> trial: as fast as before ──> trial: slower ──┬─(as many accepted)──> curve
     ^                                                                │
     └──(fewer accepted, the same part refused: it is not about the rate)
    curve ──(refused)──> curve, from what was accepted
    any   ──(Retry-After)──> blocked until then ──> what was accepted at once the last time ──> curve

The curve is that of TCP CUBIC (RFC 9438), which the AWS SDKs use in their adaptive mode too: fast far below the last
good rate, slow near it, faster again the longer nothing is refused beyond it.
"""

from collections import deque
from math import inf, log, sqrt

from batchline.domain.retry import MAX_RETRY_AFTER_SECONDS

_KEPT = 0.98
"""After a refusal the rate is this part of what was accepted."""
_DOUBLING_SECONDS = 0.5
"""Far below the last good rate the rate doubles in this time: from 1 to 1,000 a second in 5 seconds."""
_FIRST_PLATEAU_SECONDS, _LONGEST_PLATEAU_SECONDS = 2.5, 5.0
"""The time from a cut until the last good rate is reached again, longer if refusals come at the same rate again. After
twice this time without a refusal the limit has changed: the rate doubles in a second, and grows ever faster."""
_SAME_RATE = 0.15
"""Rates that differ by less than this, as a logarithm, are the same."""
_MIN_RATE = 1.0
"""The rate for an upstream that refuses everything: its lines must end even then."""
_SHORTEST_CUT_SECONDS = 0.5
"""A cut needs this time to show its effect. Refusals within it are part of the same event."""
_TRIAL_SECONDS, _TRIAL_STARTS, _LONGEST_TRIAL_SECONDS = 0.4, 20, 3.0
_TOLERANCE, _MORE_REFUSED = 1.5, 0.05
"""Refusals that are not about the rate are tolerated while they are not much more frequent than that."""
_USELESS_CUTS, _ENDS_TO_JUDGE = 3, 50
"""After so many cuts and answers it is judged whether the cuts help."""
_FEW_REFUSED = 0.02
"""If a trial has a smaller part refused, the refusals are over."""
_SAME_PART = 0.6
"""At a lower rate, a limit on the rate accepts as many as before. If fewer are accepted, nearer to as much less as the
rate is lower, and more than this part of the refusals is left, then the rate does not matter."""
_BURST_SECONDS = 0.02
"""The starts of this time may be made up for at once."""
_RUSH_SECONDS, _RUSH_KEPT = 0.3, 0.98
"""The time after a block in which starts count as accepted at once, and the part of them that is tried again."""
_WINDOW_PART = 0.5
_STEADY_SECONDS = 1.0
"""After this time of even starts a refusal says at which rate it came."""
_MOSTLY, _CUT_AGAIN = 0.7, 0.95
"""If more than this part is accepted, a slightly lower rate is enough: that of the last cut times this, if it was a
moment ago."""
_BIN_SECONDS, _BINS = 0.1, 12
_GRACE_SECONDS = 0.05
_PART_WEIGHT, _LATELY_WEIGHT = 0.01, 0.125
_MANY_LATELY = 0.6
"""If a smaller part of the last answers is refused, a Retry-After is about the line that got it."""


class Recent:
    """The starts of about the last second and which of them were refused, in bins of 0.1 s."""

    def __init__(self) -> None:
        self._bins: deque[list[float]] = deque(maxlen=_BINS)

    def on_start(self, now: float, count: int) -> None:
        bins = self._bins
        if not bins or now - bins[-1][0] >= _BIN_SECONDS:
            bins.append([now, 0, 0])
        bins[-1][1] += count

    def on_refusal(self, started: float) -> None:
        for bin_ in reversed(self._bins):
            if bin_[0] <= started:
                bin_[2] += 1
                return

    def rates(self, *, since: float, now: float) -> tuple[float, float]:
        """Return how many started and how many were accepted in a second, over the last second at most."""
        since = max(since, now - _BIN_SECONDS * (_BINS - 2))
        bins = [bin_ for bin_ in self._bins if bin_[0] >= since]
        started = sum(bin_[1] for bin_ in bins)
        seconds = max(_BIN_SECONDS, now - bins[0][0]) if bins else _BIN_SECONDS
        return started / seconds, (started - sum(bin_[2] for bin_ in bins)) / seconds


class Trial:
    """Starts at an even rate, of which the refused ones are counted."""

    def __init__(
        self, rate: float, now: float, *, before: "Trial | None" = None, follows_refusals: bool = False
    ) -> None:
        self.rate, self.before = rate, before
        self.follows_refusals = follows_refusals
        """Whether nothing at all was accepted in the trial before, at a higher rate."""
        self._since = now
        self._until = now + max(_TRIAL_SECONDS, min(_LONGEST_TRIAL_SECONDS, _TRIAL_STARTS / rate))
        self._started = self._refused = 0
        self._slowest_refusal = 0.0

    def on_start(self, now: float, count: int) -> None:
        if now < self._until:
            self._started += count

    def on_refusal(self, started: float, now: float) -> None:
        if self._since <= started < self._until:
            self._refused += 1
            self._slowest_refusal = max(self._slowest_refusal, now - started)

    def is_over(self, now: float) -> bool:
        """Return whether all its starts were made, and those that will be refused have been."""
        return now >= self._until + _GRACE_SECONDS + 2 * self._slowest_refusal

    @property
    def refused_part(self) -> float:
        return min(1.0, self._refused / self._started) if self._started else 0.0

    @property
    def accepted_rate(self) -> float:
        return max(0, self._started - self._refused) / (self._until - self._since)


class Curve:
    """The rate after a cut, as it grows with time."""

    def __init__(self) -> None:
        self.good = 0.0
        """The rate at which refusals began, 0 while unknown."""
        self.cut_at = -inf
        self._base = _MIN_RATE
        self._plateau_seconds = _FIRST_PLATEAU_SECONDS

    def cut(self, accepted: float, now: float) -> None:
        """Start again from a rate that was accepted at the limit."""
        same = self.good > 0 and abs(log(max(accepted, _MIN_RATE) / self.good)) < _SAME_RATE
        self._plateau_seconds = _LONGEST_PLATEAU_SECONDS if same else _FIRST_PLATEAU_SECONDS
        self.good = max(accepted, _MIN_RATE)
        self.restart(_KEPT * self.good, now)

    def forget(self, now: float) -> None:
        """Start again from the lowest rate, because nothing was accepted."""
        self.good = 0.0
        self.restart(_MIN_RATE, now)

    def restart(self, base: float, now: float) -> None:
        """Start again from a rate that is not known to be at the limit."""
        self._base, self.cut_at = max(_MIN_RATE, base), now

    def rate(self, now: float) -> float:
        seconds, plateau = max(0.0, now - self.cut_at), self._plateau_seconds
        if not self.good:
            return self._base * _doubled(seconds)
        if seconds > 2 * plateau:
            return self.good * (2 - _KEPT) * _doubled((seconds - 2 * plateau) ** 2 * _DOUBLING_SECONDS)
        cubic = self.good * (1 + (1 - _KEPT) * ((seconds - plateau) / plateau) ** 3)
        return max(_MIN_RATE, min(self._base * _doubled(seconds), cubic))


def _doubled(seconds: float) -> float:
    return float(2 ** min(40.0, seconds / _DOUBLING_SECONDS))


class Cycle:
    """The time from the end of one block by Retry-After to the end of the next."""

    def __init__(self, since: float | None = None) -> None:
        self.since = inf if since is None else since
        """When it began; without a time, with the first start."""
        self._started = self._refused = self._rush_started = self._rush_refused = 0
        self.blocked_at: float | None = None
        self.steady = False
        """Whether its starts had been even for some time when it was blocked."""

    def on_start(self, now: float, count: int) -> None:
        self._started += count
        self.since = min(self.since, now)
        if now - self.since <= _RUSH_SECONDS:
            self._rush_started += count

    def on_refusal(self, started: float) -> None:
        if started >= self.since:
            self._refused += 1
            self._rush_refused += started - self.since <= _RUSH_SECONDS

    def average(self, now: float) -> float:
        """Return how many were accepted in a second, including the time of the block."""
        return (self._started - self._refused) / max(_BIN_SECONDS, now - self.since)

    def next_rush(self, *, average: float, good: float) -> float:
        """Return how many to start at once after the block.

        If much fewer were accepted on average than at good times, the upstream accepts so many in each window of time.
        Otherwise it is what was accepted at once, or half of it if that was too many.
        """
        if average < _WINDOW_PART * good:
            return _RUSH_KEPT * (self._started - self._refused)
        if self.steady:
            return 0.0
        return (0.5 if self._rush_refused else _RUSH_KEPT) * (self._rush_started - self._rush_refused)


class RateLimit:
    """The limit on the starts per second of one model."""

    def __init__(self) -> None:
        self.paced = False
        """Whether starts are held back at all."""
        self.blocked_until = 0.0
        self._tokens = 0.0
        self._filled_at = 0.0
        self._recent = Recent()
        self._curve = Curve()
        self._trial: Trial | None = None
        self._cycle = Cycle()
        self._background = 0.0
        """The part that is refused at any rate, and tolerated."""
        self._refused_part = 0.0
        """The part of the last hundred or so that was refused."""
        self._cuts, self._part_before_cuts = 0, 0.0
        self._ends_since_cut = self._refused_since_cut = 0
        """Since the first of the cuts."""
        self._refused_lately = 0.0
        """The part of the last eight or so that was refused."""

    def rate(self, now: float) -> float:
        """Return how many may start in a second."""
        if not self.paced:
            return inf
        return self._trial.rate if self._trial is not None else self._curve.rate(now)

    def allowance(self, now: float) -> float:
        """Return how many may start now."""
        if not self.paced:
            return inf
        if now < self.blocked_until:
            return 0
        if self._cycle.blocked_at is not None:
            self._end_block(now)
        if self._trial is not None and self._trial.is_over(now):
            self._end_trial(self._trial, now)
            if not self.paced:
                return inf
        rate = self.rate(now)
        most = max(1.0, self._tokens, _BURST_SECONDS * rate)
        self._tokens = min(most, self._tokens + (now - self._filled_at) * rate)
        self._filled_at = now
        return self._tokens

    def wait(self, now: float) -> float:
        """Return the seconds until one may start."""
        if now < self.blocked_until:
            return self.blocked_until - now
        tokens = self.allowance(now)
        return 0.0 if tokens >= 1 else (1 - tokens) / self.rate(now)

    def on_start(self, now: float, count: int) -> None:
        self._recent.on_start(now, count)
        self._cycle.on_start(now, count)
        if self.paced:
            self._tokens -= count
            if self._trial is not None:
                self._trial.on_start(now, count)

    def on_answer(self) -> None:
        self._ends_since_cut += 1
        if self._refused_part:
            self._refused_part -= _PART_WEIGHT * self._refused_part
            self._background = min(self._background, _TOLERANCE * self._refused_part + _FEW_REFUSED)
            self._refused_lately -= _LATELY_WEIGHT * self._refused_lately

    def on_refusal(self, started: float, now: float, *, retry_after: float | None) -> None:
        """Slow down after a refusal that is evidence about the rate."""
        self._ends_since_cut += 1
        self._refused_since_cut += 1
        self._refused_part += _PART_WEIGHT * (1 - self._refused_part)
        self._refused_lately += _LATELY_WEIGHT * (1 - self._refused_lately)
        self._recent.on_refusal(started)
        self._cycle.on_refusal(started)
        if self._trial is not None:
            self._trial.on_refusal(started, now)
        if started < self._curve.cut_at:
            return
        if retry_after and self._refused_lately > _MANY_LATELY:
            self._heed(retry_after, started, now)
        elif self._trial is None and not self._is_tolerated:
            self._slow_down(started, now)

    def on_other_refusal(self, started: float) -> None:
        """Count a refusal that was about the number in flight: its request was not accepted."""
        self._recent.on_refusal(started)
        self._cycle.on_refusal(started)

    def is_all_refused(self, now: float) -> bool:
        """Return whether a trial has just ended in which nothing was accepted."""
        return self._trial is not None and self._trial.is_over(now) and not self._trial.accepted_rate

    def give_up(self) -> None:
        """End the trial and hold nothing back: the refusals are about something else."""
        self._trial, self.paced = None, False

    def on_outage_over(self, now: float) -> None:
        """Return quickly to the last good rate after an outage, in which nothing was learned."""
        self.blocked_until, self._trial, self._cycle = 0.0, None, Cycle(now)
        self._background = self._refused_part = self._refused_lately = 0.0
        self._tokens, self._filled_at = min(self._tokens, 1.0), now
        if self._curve.good:
            self._curve.restart(self._curve.good / 4, now)
        else:
            self.paced = False

    @property
    def _is_tolerated(self) -> bool:
        return self._background > 0 and self._refused_part < _TOLERANCE * self._background + _MORE_REFUSED

    def _slow_down(self, started: float, now: float) -> None:
        if not self.paced:
            rate, _ = self._recent.rates(since=0.0, now=now)
            self._begin_trial(Trial(max(_MIN_RATE, rate), now), now)
        elif now - self._curve.cut_at >= _SHORTEST_CUT_SECONDS:
            rate, accepted = self._recent.rates(since=self._curve.cut_at, now=started)
            if accepted < 0.5 * rate:
                self._begin_trial(Trial(max(_MIN_RATE, rate), now), now)
            else:
                self._cut_again(accepted, now)

    def _cut_again(self, accepted: float, now: float) -> None:
        """Cut the rate, unless the last cuts were of no use: then the refusals are not about the rate."""
        self._cuts += 1
        if self._cuts == 1:
            self._part_before_cuts, self._ends_since_cut, self._refused_since_cut = self._refused_part, 0, 0
        elif self._cuts >= _USELESS_CUTS and self._ends_since_cut >= _ENDS_TO_JUDGE:
            self._cuts, part = 0, self._refused_since_cut / self._ends_since_cut
            if part > _SAME_PART * self._part_before_cuts:
                self._background = self._refused_part = part
                self.paced = False
                return
        self._curve.cut(accepted, now)

    def _begin_trial(self, trial: Trial, now: float) -> None:
        self._trial, self.paced = trial, True
        self._tokens, self._filled_at = min(self._tokens, 1.0), now
        self._curve.cut_at = now

    def _end_trial(self, trial: Trial, now: float) -> None:
        self._trial = None
        before = trial.before
        if before is None:
            if trial.refused_part < _FEW_REFUSED:
                self._curve.restart(trial.rate, now)
                self.paced = self._curve.good > 0
            elif not trial.accepted_rate and not trial.follows_refusals and trial.rate > _MIN_RATE:
                self._begin_trial(Trial(max(_MIN_RATE, trial.rate / 4), now, follows_refusals=True), now)
            elif not trial.accepted_rate:
                # Nothing is accepted at any rate.
                self._background, self.paced = 1.0, False
            else:
                factor = 2 if trial.refused_part < 0.5 else 4
                self._begin_trial(Trial(max(_MIN_RATE, trial.rate / factor), now, before=trial), now)
        elif (
            trial.refused_part > _SAME_PART * before.refused_part
            and trial.accepted_rate < sqrt(trial.rate / before.rate) * before.accepted_rate
        ):
            self._background = self._refused_part = max(trial.refused_part, before.refused_part)
            self.paced = False
        else:
            self._background = 0.0
            accepted = max(trial.accepted_rate, before.accepted_rate)
            if accepted:
                self._curve.cut(accepted, now)
            else:
                self._curve.forget(now)

    def _heed(self, retry_after: float, started: float, now: float) -> None:
        """Block all starts until the time that the upstream names, unless slightly fewer starts are enough."""
        retry_after = min(MAX_RETRY_AFTER_SECONDS, retry_after)
        if self._cycle.blocked_at is not None:
            self.blocked_until = max(self.blocked_until, now + retry_after)
            return
        self._cycle.steady = self.paced and now - self._cycle.since > _STEADY_SECONDS
        if self._cycle.steady:
            since_cut = now - self._curve.cut_at
            rate, accepted = self._recent.rates(since=self._curve.cut_at, now=started)
            if accepted > _MOSTLY * rate:
                self._curve.cut(accepted if since_cut > _STEADY_SECONDS else _CUT_AGAIN * self._curve.good, now)
                return
        self.paced, self._trial = True, None
        self._cycle.blocked_at, self.blocked_until = now, now + retry_after

    def _end_block(self, now: float) -> None:
        average = self._cycle.average(now)
        good = self._curve.good
        self._curve.restart(_KEPT * good if good > average else 2 * average, now)
        self._tokens, self._filled_at = self._cycle.next_rush(average=average, good=good), now
        self._cycle = Cycle(now)
