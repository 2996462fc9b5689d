"""Reads what ``top`` needs from the metrics of a service."""

import math
from collections import defaultdict
from collections.abc import Mapping

from msgspec import Struct, field
from prometheus_client.parser import text_string_to_metric_families

_PREFIX = "batchline_"
_Samples = list[tuple[dict[str, str], float]]
"""The values of one metric, each with its labels."""


class ScrapedUpstream(Struct, kw_only=True):
    """An upstream as the metrics of a service show it at one moment."""

    name: str
    in_flight: int = 0
    limit: float = math.inf
    rate_limit: float = math.inf
    waiting: dict[str, int] = field(default_factory=dict)
    """The lines that a worker holds and that wait, by reason."""
    pauses: list[str] = field(default_factory=list)
    """The paused upstreams and models, each with its reason."""


class ServiceState(Struct, kw_only=True):
    """A service at one moment."""

    queued_lines: int = 0
    """Lines that no worker has leased yet."""
    recorded_lines: int = 0
    """Lines recorded since the service started."""
    held_bytes: int = 0
    clock_held: bool = False
    upstreams: list[ScrapedUpstream] = field(default_factory=list)

    @property
    def in_flight(self) -> int:
        """The requests in flight to all upstreams."""
        return sum(upstream.in_flight for upstream in self.upstreams)


def read_metrics(text: str) -> ServiceState:
    """Return the state that the metrics of a service show."""
    samples: dict[str, _Samples] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name.removeprefix(_PREFIX)].append((sample.labels, sample.value))
    return ServiceState(
        queued_lines=_sum(samples["queue_lines"]),
        recorded_lines=_sum(samples["lines_total"]),
        held_bytes=_sum(samples["held_bytes"]),
        clock_held=bool(_sum(samples["clock_held"])),
        upstreams=_upstreams(samples),
    )


def _upstreams(samples: Mapping[str, _Samples]) -> list[ScrapedUpstream]:
    upstreams: dict[str, ScrapedUpstream] = {}

    def upstream(labels: dict[str, str]) -> ScrapedUpstream:
        return upstreams.setdefault(labels["upstream"], ScrapedUpstream(name=labels["upstream"]))

    for labels, value in samples["upstream_limit"]:
        upstream(labels).limit = value
    for labels, value in samples["upstream_rate_limit"]:
        upstream(labels).rate_limit = value
    for labels, value in samples["lines_in_flight"]:
        upstream(labels).in_flight = int(value)
    for labels, value in samples["lines_waiting"]:
        if value:
            upstream(labels).waiting[labels["reason"]] = int(value)
    for labels, value in samples["upstream_paused"]:
        if value:
            model = f"model {labels['model']} " if labels.get("model") else ""
            upstream(labels).pauses.append(f"{model}paused: {labels['reason']}")
    return sorted(upstreams.values(), key=lambda each: each.name)


def _sum(samples: _Samples) -> int:
    return int(sum(value for _, value in samples))
