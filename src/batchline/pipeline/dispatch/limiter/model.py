"""Holds back the starts of one model at one upstream, after what its refusals say."""

from collections.abc import Hashable
from math import inf

from batchline.domain.rate_limits import RateLimits
from batchline.pipeline.dispatch.limiter.announced import Announced
from batchline.pipeline.dispatch.limiter.ceiling import Ceiling
from batchline.pipeline.dispatch.limiter.load import Start
from batchline.pipeline.dispatch.limiter.rate import RateLimit

_TOGETHER_SECONDS = 1.0
"""Two lines that are refused within this time are evidence; a single one may be refused for what it contains."""
_AGAIN_WEIGHT = 0.1
_SELDOM = 0.15
"""If lines once refused are accepted more seldom than this while others pass, it is for what they contain."""


class ModelLimit:
    """Holds back one model by what is announced, by the number in flight that is accepted, and by the rate."""

    def __init__(self) -> None:
        self._ceiling = Ceiling()
        self._rate = RateLimit()
        self._announced = Announced()
        self.started = 0
        """How many were started in all."""
        self._answers_since_refusal = 0
        self._accepted_any = False
        """Whether anything was answered since the last outage."""
        self._refused_at = -inf
        self._refused_line: Hashable = None
        """The line that was refused last, and when."""
        self._accepted_again = 0.5
        """The part of the lines once refused that is accepted when they are tried again."""

    @property
    def is_limited(self) -> bool:
        return self._rate.paced or self._ceiling.limit is not None or self._announced.is_limiting

    @property
    def ceiling(self) -> int | None:
        return self._ceiling.limit

    def rate(self, now: float) -> float | None:
        """Return how many may start in a second; None while that is not limited."""
        return self._rate.rate(now) if self._rate.paced else None

    @property
    def blocked_until(self) -> float:
        """When the upstream lets the next one start, as it said."""
        return self._rate.blocked_until

    def allowance(self, in_flight: int, now: float) -> int:
        """Return how many may start now beside those that are in flight."""
        if in_flight and self._rate.is_all_refused(now):
            # Those in flight were accepted, and nothing beside them is at any rate: it is about their number.
            self._rate.give_up()
            self._ceiling.hold(in_flight, now)
        room = inf if self._ceiling.limit is None else self._ceiling.limit - in_flight
        allowed = min(room, self._rate.allowance(now), self._announced.allowance(now))
        return _MANY if allowed == inf else int(allowed)

    def wait(self, now: float) -> float:
        """Return the seconds until the rate lets one start; 0 if it does now."""
        return max(self._rate.wait(now), self._announced.wait(now))

    def on_start(self, now: float, count: int) -> None:
        self.started += count
        self._rate.on_start(now, count)
        if self._announced.is_limiting:
            self._announced.on_start(count)

    def on_announcement(self, limits: RateLimits, start: Start, now: float) -> None:
        """Believe what an answer says about the rate limits of the upstream."""
        self._announced.on_announcement(limits, start, started=self.started, now=now)

    def on_answer(self, start: Start, now: float, *, again: bool) -> None:
        self._answers_since_refusal += 1
        self._accepted_any = True
        if again:
            self._accepted_again += _AGAIN_WEIGHT * (1 - self._accepted_again)
        self._ceiling.on_answer(start.model_in_flight, started=start.at, now=now)
        self._rate.on_answer()

    def on_refusal(
        self,
        start: Start,
        now: float,
        *,
        line: Hashable,
        again: bool,
        retry_after: float | None,
        all_refused: bool,
    ) -> None:
        """Learn from a 429.

        ``again`` says that the line was refused before, and ``all_refused`` that nothing of the model is in flight any
        more.
        """
        others_pass, self._answers_since_refusal = self._answers_since_refusal > 0, 0
        if again:
            self._accepted_again -= _AGAIN_WEIGHT * self._accepted_again
            if others_pass and self._accepted_again < _SELDOM:
                return
        together = line != self._refused_line and now - self._refused_at <= _TOGETHER_SECONDS
        self._refused_at, self._refused_line = now, line
        if not together and self._ceiling.limit is None:
            return
        if all_refused and not self._accepted_any:
            self._ceiling.reset()
        elif self._ceiling.explains(start.model_in_flight, started=start.at):
            self._ceiling.on_refusal(start.model_in_flight, started=start.at, now=now)
            self._rate.on_other_refusal(start.at)
            return
        elif self._ceiling.is_settling(start.at):
            self._rate.on_other_refusal(start.at)
            return
        else:
            self._ceiling.on_unexplained_refusal(now)
        self._rate.on_refusal(start.at, now, retry_after=retry_after)

    def on_outage_over(self, now: float) -> None:
        self._accepted_any = False
        self._ceiling.reset()
        self._rate.on_outage_over(now)


_MANY = 1 << 30
