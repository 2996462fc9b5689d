"""Reports damage of stored data: once in the log for each place, and in the metrics."""

import logging

from batchline.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_MAX_REMEMBERED = 10_000
"""The most places that are remembered, so that their damage is logged once. Further ones are logged each time."""


class DamageLog:
    """The damage that this process has found."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._known: set[tuple[str, int]] = set()

    def report(self, what: str, *, key: str, offset: int = 0, **owner_ids: str) -> None:
        """Report one damaged piece. ``key`` names its object, or its row if it has none."""
        place = (key, offset)
        if place in self._known:
            return
        if len(self._known) < _MAX_REMEMBERED:
            self._known.add(place)
        self._metrics.damage.labels(what).inc()
        log.error(
            "stored data is damaged or missing", extra={"what": what, **owner_ids, "object": key, "offset": offset}
        )
