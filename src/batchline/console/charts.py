"""Computes the shapes of the small charts on pages. Each is drawn in units of its own and stretched to its place."""

from collections import defaultdict
from collections.abc import Sequence

from msgspec import Struct

from batchline.console.text import clock_time, plural, span_of
from batchline.pipeline.load_history import HISTORY_SECONDS, BatchSample, UpstreamSample

CHART_WIDTH, CHART_HEIGHT = 600, 80
_STROKE = 2
"""The width of a line. The highest value is drawn this far below the edge, else half of its line would be cut off."""
_LATENCY_SECONDS = 60
"""The latency of an upstream is a mean over this time."""


class ChartBar(Struct, frozen=True, kw_only=True):
    """A bar of a chart. ``label`` says what it stands for."""

    x: float
    y: float
    width: float
    height: float
    label: str
    series: int = 0


class LoadChart(Struct, frozen=True, kw_only=True):
    """Lines in flight as an area, and the limit as a line, each as a list of points."""

    in_flight: str
    limit: str
    peak: int
    """The number that the height of the chart stands for."""


class LatencyChart(Struct, frozen=True, kw_only=True):
    """The mean duration of attempts by minute."""

    bars: list[ChartBar]
    peak: float
    """The highest of them in seconds."""


def load_chart(samples: Sequence[BatchSample | UpstreamSample], *, since: float, until: float) -> LoadChart | None:
    """Return the load from one time to another, or None if there are fewer than two samples."""
    shown = [sample for sample in samples if since <= sample.at <= until]
    peak = max((max(sample.in_flight, sample.limit) for sample in shown), default=0)
    if len(shown) < 2 or not peak:
        return None

    def point(at: float, value: float) -> str:
        y = CHART_HEIGHT - (CHART_HEIGHT - _STROKE) * value / peak
        return f"{CHART_WIDTH * (at - since) / (until - since):.1f},{y:.1f}"

    area = [point(sample.at, sample.in_flight) for sample in shown]
    ends = [point(shown[-1].at, 0), point(shown[0].at, 0)]
    return LoadChart(
        in_flight=" ".join([*area, *ends]),
        limit=" ".join(point(sample.at, sample.limit) for sample in shown),
        peak=peak,
    )


def latency_chart(samples: Sequence[UpstreamSample], *, until: float) -> LatencyChart | None:
    """Return the latency of the last hour, or None if nothing was answered in it."""
    last = int(until) // _LATENCY_SECONDS * _LATENCY_SECONDS
    first = last - HISTORY_SECONDS + _LATENCY_SECONDS
    sums: dict[int, list[float]] = defaultdict(lambda: [0, 0.0])
    for sample in samples:
        minute = sample.at // _LATENCY_SECONDS * _LATENCY_SECONDS
        if sample.attempts and minute >= first:
            sums[minute][0] += sample.attempts
            sums[minute][1] += sample.seconds
    if not sums:
        return None
    means = {minute: seconds / attempts for minute, (attempts, seconds) in sorted(sums.items())}
    peak, width = max(means.values()), CHART_WIDTH * _LATENCY_SECONDS / HISTORY_SECONDS
    bars = []
    for minute, mean in means.items():
        height = max(1.0, CHART_HEIGHT * mean / peak) if peak else 1.0
        bars.append(
            ChartBar(
                x=round((minute - first) / _LATENCY_SECONDS * width, 1),
                y=round(CHART_HEIGHT - height, 1),
                width=round(width - 1, 1),
                height=round(height, 1),
                label=f"{clock_time(minute)}: {span_of(mean)}, {plural(int(sums[minute][0]), 'request')}",
            )
        )
    return LatencyChart(bars=bars, peak=peak)
