"""Holds back the starts of one model at one upstream, by what its answers announce and by what it refuses."""

from collections.abc import Hashable
from math import ceil, inf

from batchline.domain.rate_limits import RateLimits
from batchline.pipeline.dispatch.limiter.announced import Announced
from batchline.pipeline.dispatch.limiter.line_refusals import LineRefusals
from batchline.pipeline.dispatch.limiter.load import Start
from batchline.pipeline.dispatch.limiter.refusals import RefusalLimit

_UNLIMITED = 1 << 30


class ModelLimit:
    """The limit of one model."""

    def __init__(self) -> None:
        self._refusals = RefusalLimit()
        self._line_refusals = LineRefusals()
        self._announced = Announced()

    @property
    def started(self) -> int:
        """How many were started in all."""
        return self._refusals.started

    @property
    def is_limited(self) -> bool:
        return self._refusals.is_limiting or self._announced.is_limiting

    @property
    def is_refused(self) -> bool:
        """Whether it is held back because it was refused."""
        return self._refusals.is_limiting

    @property
    def limit(self) -> int | None:
        """How many may be in flight; None while that is not limited."""
        return ceil(self._refusals.limit) if self._refusals.is_limiting else None

    @property
    def rate(self) -> float | None:
        """How many start in a second; None while that is not limited."""
        return self._refusals.rate

    def allowance(self, in_flight: int, now: float) -> int:
        """Return how many may start now beside those that are in flight."""
        allowed = min(self._refusals.allowance(in_flight, now), self._announced.allowance(now))
        return _UNLIMITED if allowed == inf else int(allowed)

    def wait(self, in_flight: int, now: float) -> float:
        """Return the seconds until one may start although none ends; 0 if it may now, or if one must end first."""
        return max(self._refusals.wait(in_flight, now), self._announced.wait(now))

    def blocked_seconds(self, now: float) -> float:
        """Return the seconds until one may start because the upstream said so, with Retry-After; 0 if it did not."""
        return max(0.0, self._refusals.blocked_until - now)

    def announced_wait(self, now: float) -> float:
        """Return the seconds until the headers of the upstream let one start."""
        return self._announced.wait(now)

    def on_start(self, now: float, count: int, in_flight: int) -> None:
        """Report so many starts, with so many in flight including them."""
        self._refusals.on_start(now, count, in_flight)
        if self._announced.is_limiting:
            self._announced.on_start(count)

    def on_announcement(self, limits: RateLimits, start: Start, now: float) -> None:
        """Believe what an answer says about the rate limits of the upstream."""
        self._announced.on_announcement(limits, start, started=self.started, now=now)

    def on_answer(self, start: Start, now: float, *, again: bool) -> None:
        """Report an answer. ``again`` says that the line was refused before."""
        self._line_refusals.on_answer(now, again=again, latency_seconds=now - start.at)
        self._refusals.on_answer(start, now)

    def on_refusal(self, start: Start, now: float, *, line: Hashable, again: bool, retry_after: float | None) -> bool:
        """Learn from a 429, and return whether the search for the limit provoked it."""
        if self._line_refusals.is_about_line(line, now, again=again):
            if self._line_refusals.first_are_refused:
                self._refusals.give_up()
            self._refusals.on_other_refusal(start)
            return False
        return self._refusals.on_refusal(start, now, retry_after=retry_after)

    def on_outage_over(self, now: float) -> None:
        """Forget what was refused in an outage: it was neither about a limit nor about the lines."""
        self._line_refusals = LineRefusals()
        self._refusals.on_outage_over(now)
