"""Announces limits to `Announced`, as the headers of an answer do."""

from batchline.domain.rate_limits import Quota, RateLimits
from batchline.pipeline.dispatch.limiter.announced import Announced
from batchline.pipeline.dispatch.limiter.load import Start
from tests.support.starts import start_of


def answer_to(order: int, *, is_check: bool = False) -> Start:
    """Return the so-many-th request of the model."""
    return start_of("m", 0.0, in_flight=1, order=order, is_check=is_check)


def announce(
    announced: Announced,
    *,
    order: int,
    now: float,
    requests: Quota | None = None,
    tokens: Quota | None = None,
    started: int | None = None,
) -> None:
    announced.on_announcement(
        RateLimits(requests=requests, tokens=tokens),
        answer_to(order),
        started=order if started is None else started,
        now=now,
    )


def left(remaining: float, reset_seconds: float, *, limit: float | None = 100.0) -> Quota:
    return Quota(limit=limit, remaining=remaining, reset_seconds=reset_seconds)
