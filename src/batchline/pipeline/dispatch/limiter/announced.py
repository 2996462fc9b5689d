"""Holds back starts by the limits that an upstream announces in its headers: how many more it accepts, until when.

Two kinds of limits are announced with the same headers. In a *window* the time of the reset stays and the remaining
number falls until then. In a *bucket* the number grows all the time, and the reset is when the bucket will be full::

    remaining ──┐                     remaining ──╲  ╱╲╱╲
                └─┐      ┌─ full                   ╲╱     refilled by (limit - remaining) / reset each second
    window        └──────┘ reset      bucket

What they say may be false, so it is checked while nothing is left (`checks.py`). It may be what one of several servers
has left (`rises.py`).
"""

from math import inf

from batchline.domain.rate_limits import Quota, RateLimits
from batchline.domain.retry import MAX_RETRY_AFTER_SECONDS
from batchline.pipeline.dispatch.limiter.checks import Checks
from batchline.pipeline.dispatch.limiter.load import Start
from batchline.pipeline.dispatch.limiter.rises import Rises

_DECIDING_PART, _STAYED_PART = 0.1, 0.3
"""A limit is known to be a window or a bucket when the first part of it was used up. The reset of a bucket has then
moved by the time that refilling takes. If it moved by less than the second part of that time, it is a window."""
_COST_WEIGHT = 0.2


class Announced:
    """Remembers how many requests and tokens of a model its upstream still accepts, as its last headers said."""

    def __init__(self) -> None:
        self._requests = _Remaining()
        self._tokens = _Remaining(cost=None)
        self._checks = Checks()

    @property
    def is_limiting(self) -> bool:
        return self._requests.known or self._tokens.known

    def on_announcement(self, limits: RateLimits, start: Start, *, started: int, now: float) -> None:
        """Note the limits in the answer to a request. ``started`` is the number of starts of the model so far."""
        if not self._checks.is_believed(now):
            return
        if limits.requests is not None:
            self._requests.on_quota(limits.requests, order=start.order, started=started, now=now)
        if limits.tokens is not None:
            self._tokens.on_quota(limits.tokens, order=start.order, started=started, now=now)
        if self._requests.is_contradictory or self._tokens.is_contradictory:
            self._checks.disbelieve(now)
            self._forget()
            return
        used_up = [each.reset_at - now for each in (self._requests, self._tokens) if each.is_used_up]
        self._checks.on_announcement(max(used_up, default=None), now)

    def allowance(self, now: float) -> float:
        """Return the number of requests that may start now."""
        allowed = self._left(now)
        return 1.0 if allowed < 1 and now >= self._checks.due else allowed

    def wait(self, now: float) -> float:
        """Return the seconds until one may start, be it as a check."""
        return max(0.0, min(self.announced_wait(now), self._checks.due - now))

    def announced_wait(self, now: float) -> float:
        """Return the seconds until one may start by what is announced."""
        return max(self._requests.wait(now), self._tokens.wait(now))

    def on_start(self, count: int, now: float) -> bool:
        """Note so many starts, and return whether they are checks: nothing was left for them."""
        is_check = self._left(now) < 1
        if is_check:
            self._checks.on_start(now)
        self._requests.on_start(count)
        self._tokens.on_start(count)
        return is_check

    def on_check_answered(self, now: float) -> None:
        """Note that a request was accepted although nothing was left."""
        if self._checks.on_accepted(now):
            self._forget()

    def on_refusal(self, start: Start, now: float) -> None:
        self._checks.on_refused(now, check=start.is_check)

    def _forget(self) -> None:
        self._requests, self._tokens = _Remaining(), _Remaining(cost=None)

    def _left(self, now: float) -> float:
        return min(self._requests.allowance(now), self._tokens.allowance(now))


class _Remaining:
    """One announced limit, counted in requests. A request costs 1, or as many tokens as requests cost lately."""

    def __init__(self, *, cost: float | None = 1.0) -> None:
        self._cost = cost
        self._fixed_cost = cost is not None
        self._order = 0
        self._remaining = 0.0
        self.reset_at = -inf
        self._in_window = False
        self._anchor: tuple[float, float] | None = None
        """The remaining number and the time of the reset in an earlier answer, which later ones are compared with."""
        self._refill = 0.0
        """The amount that a bucket gains in a second."""
        self._left = inf
        """The number of requests that may start, as of ``_counted_at``."""
        self._counted_at = 0.0
        self._rises = Rises()
        self.is_contradictory = False
        """Whether the numbers must be those of several servers."""

    @property
    def known(self) -> bool:
        return self._left < inf

    @property
    def is_used_up(self) -> bool:
        """Whether the upstream said that less is left than a request costs."""
        return self.known and self._cost is not None and self._remaining < self._cost

    def on_quota(self, quota: Quota, *, order: int, started: int, now: float) -> None:
        if quota.remaining is None or order < self._order:
            return
        reset = quota.reset_seconds or 0.0
        self._learn_cost(quota.remaining, order)
        self._learn_kind(quota, now + reset, reset)
        if quota.limit is not None:
            self.is_contradictory = self._rises.add(
                quota.remaining,
                limit=quota.limit,
                reset_seconds=reset,
                unseen=(started - order) * (self._cost or 0.0),
                now=now,
            )
        # The reset of a daily limit may be hours away. It is tried again after the longest wait for a Retry-After.
        self._order, self._remaining = order, quota.remaining
        self.reset_at = now + min(MAX_RETRY_AFTER_SECONDS, reset)
        if self._cost is not None:
            # The remaining number does not include the requests that were started after the answered one.
            self._left = quota.remaining / self._cost - (started - order)
            self._counted_at = now

    def allowance(self, now: float) -> float:
        if self._left == inf:
            return inf
        if now >= self.reset_at:
            # Nothing was announced since the reset, so nothing is known any more.
            self._left = inf
        elif self._refill and self._cost:
            self._left += (now - self._counted_at) * self._refill / self._cost
        self._counted_at = now
        return self._left

    def wait(self, now: float) -> float:
        left = self.allowance(now)
        if left >= 1:
            return 0.0
        until_reset = self.reset_at - now
        return min(until_reset, (1 - left) * self._cost / self._refill) if self._refill and self._cost else until_reset

    def on_start(self, count: int) -> None:
        self._left -= count

    def _learn_cost(self, remaining: float, order: int) -> None:
        if self._fixed_cost or order <= self._order or remaining >= self._remaining:
            return
        cost = (self._remaining - remaining) / (order - self._order)
        self._cost = cost if self._cost is None else self._cost + _COST_WEIGHT * (cost - self._cost)

    def _learn_kind(self, quota: Quota, reset_at: float, reset: float) -> None:
        """Tell a window from a bucket: as more is used, the reset of a bucket moves on, and that of a window stays."""
        if quota.limit is None or quota.remaining is None or reset <= 0:
            self._refill = 0.0
            return
        used = quota.limit - quota.remaining
        refill = max(0.0, used) / reset
        if self._anchor is None or quota.remaining > self._anchor[0]:
            self._anchor = quota.remaining, reset_at
        dropped = self._anchor[0] - quota.remaining
        if refill and dropped >= _DECIDING_PART * quota.limit:
            moved, expected = reset_at - self._anchor[1], dropped / refill
            self._in_window = moved < _STAYED_PART * expected
            self._anchor = quota.remaining, reset_at
        self._refill = 0.0 if self._in_window else refill
