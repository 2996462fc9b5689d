"""Makes the starts of requests that the parts of the limiter are told about."""

from batchline.pipeline.dispatch.limiter.load import Load, Start

_LIMIT = 1000


def start_of(model: str, now: float, *, in_flight: int, order: int, is_check: bool = False) -> Start:
    """Return the so-many-th request of a model, which starts when so many are in flight with it."""
    group, group_of_all = Load().start(1, limit=_LIMIT), Load().start(1, limit=_LIMIT)
    return Start(now, model, order, in_flight, in_flight, in_flight, group, group_of_all, is_check)
