"""Holds back the starts of one model at one upstream, by the limits in its answers and by its refusals."""

from collections.abc import Hashable, Sequence
from math import ceil, inf

from batchline.domain.rate_limits import RateLimits
from batchline.pipeline.dispatch.limiter.announced import Announced
from batchline.pipeline.dispatch.limiter.concurrency import ConcurrencyLimit
from batchline.pipeline.dispatch.limiter.line_refusals import LineRefusals
from batchline.pipeline.dispatch.limiter.load import Load, Start
from batchline.pipeline.dispatch.limiter.overload import Overload
from batchline.pipeline.dispatch.limiter.project_refusals import ProjectRefusals
from batchline.pipeline.dispatch.limiter.refusals import RefusalLimit

_UNLIMITED = 1 << 30
_REFUSAL_PART = 0.5
"""A refusal takes less than this part of the time that answers take."""


class ModelLimit:
    """The limit of one model."""

    def __init__(self, *, cap: int) -> None:
        self.load = Load()
        self.concurrency = ConcurrencyLimit(cap=cap)
        """Finds how many of its requests should be in flight, whatever is in flight of other models."""
        self.overload = Overload()
        self._refusals = RefusalLimit()
        self._line_refusals = LineRefusals()
        self._project_refusals = ProjectRefusals()
        self._announced = Announced()

    @property
    def in_flight(self) -> int:
        """The number of requests in flight, with those that hang."""
        return self.load.in_flight + self.load.slow

    @property
    def started(self) -> int:
        """The number of requests that were started in all."""
        return self._refusals.started

    @property
    def is_limited(self) -> bool:
        return self._refusals.is_limiting or self._announced.is_limiting

    @property
    def is_refused(self) -> bool:
        """Whether it is held back because it was refused."""
        return self._refusals.is_limiting

    @property
    def accepts_none(self) -> bool:
        """Whether its upstream refused all of the last requests, and did not say until when."""
        return self._refusals.accepts_none

    @property
    def limit(self) -> int:
        """The number of requests that may be in flight."""
        limit = self.concurrency.limit
        return min(limit, ceil(self._refusals.limit)) if self._refusals.is_limiting else limit

    @property
    def rate(self) -> float | None:
        """The number of requests that may start in a second; None while that is not limited."""
        return self._refusals.rate

    def allowance(self, in_flight: int, now: float) -> int:
        """Return the number of requests that may start now beside those in flight."""
        allowed = min(self._refusals.allowance(in_flight, now), self._announced.allowance(now))
        return _UNLIMITED if allowed == inf else int(allowed)

    def wait(self, in_flight: int, now: float) -> float:
        """Return the seconds until a request may start even if none ends; 0 if it may now, or if one must end first."""
        return max(self._refusals.wait(in_flight, now), self._announced.wait(now))

    def blocked_seconds(self, now: float) -> float:
        """Return the seconds until a request may start, as the upstream said with Retry-After; 0 if it did not."""
        return max(0.0, self._refusals.blocked_until - now)

    def may_try(self, project_id: str, now: float) -> bool:
        """Return whether a line of a project may start although others must wait for the time of Retry-After."""
        return self._refusals.may_try_first(now) and not self._project_refusals.is_refused(project_id)

    def announced_wait(self, now: float) -> float:
        """Return the seconds until a request may start by the limits in the headers of the upstream."""
        return self._announced.announced_wait(now)

    def on_start(self, now: float, count: int, in_flight: int) -> bool:
        """Report ``count`` starts, and return whether they check what is announced. ``in_flight`` includes them."""
        self._refusals.on_start(now, count, in_flight)
        return self._announced.is_limiting and self._announced.on_start(count, now)

    def on_announcement(self, limits: RateLimits, start: Start, now: float) -> None:
        """Note the rate limits of the upstream that an answer announces."""
        self._announced.on_announcement(limits, start, started=self.started, now=now)

    def on_answers(self, starts: Sequence[Start], now: float, *, project_id: str, again: bool) -> None:
        """Report answers to lines of one project. ``again`` says that the lines were refused before."""
        self._project_refusals.on_answers(project_id, len(starts), newest=max([start.order for start in starts]))
        self._line_refusals.on_answers(starts, now, again=again)
        self._refusals.on_answers(starts, now)
        for start in starts:
            if start.is_check:
                self._announced.on_check_answered(now)

    def refuses_within(self, seconds: float) -> bool:
        """Return whether a request that ended without an answer after this time was refused.

        If the upstream had processed it, it would have taken about as long as an answer.
        """
        return seconds < _REFUSAL_PART * self._refusals.latency_seconds

    def on_refusal(
        self, start: Start, now: float, *, project_id: str, line: Hashable, again: bool, retry_after: float | None
    ) -> float | None:
        """Learn from a refusal, and return its cost to the line, from 0 to 1; None if no limit refused it."""
        self._announced.on_refusal(start, now)
        if start.is_check:
            self._refusals.measure_again(now)
            return 0.0
        was_about_project = self._project_refusals.is_about(project_id)
        if self._project_refusals.on_refusal(project_id, order=start.order):
            if not was_about_project:
                # The earlier refusals of the project seemed to show a limit.
                self._refusals.give_up()
            self._refusals.on_other_refusal(start)
            return None
        limited = self._refusals.is_limiting
        if self._line_refusals.count_refusal(line, now, order=start.order, again=again, limited=limited):
            if self._line_refusals.first_are_refused:
                self._refusals.give_up()
            self._refusals.on_other_refusal(start)
            return None
        return self._refusals.on_refusal(start, now, retry_after=retry_after)

    def on_outage_over(self, now: float) -> None:
        """Forget the refusals of an outage: they were neither about a limit nor about the lines."""
        self._line_refusals = LineRefusals()
        self._refusals.on_outage_over(now)
