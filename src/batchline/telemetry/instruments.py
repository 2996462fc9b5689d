"""Instruments for events that happen with every line.

The instruments of prometheus_client take a lock and look up labels on every call, which takes 2 to 3 us. These belong
to one event loop and take a tenth of that.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

Labels = tuple[str, ...]
"""The values of the labels of one series."""


class Tally(Collector):
    """A counter with labels: ``tally.counts["default", "small", "success"] += 1``."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self.name, self.labels, self._text = name, labels, text
        self.counts: dict[Labels, float] = defaultdict(float)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self.name, self._text, labels=self.labels)
        for values, count in self.counts.items():
            family.add_metric(values, count)
        yield family


class Durations(Collector):
    """A histogram of seconds with labels."""

    def __init__(self, name: str, text: str, *labels: str, buckets: Iterable[float]) -> None:
        self.name, self.labels, self._text, self._bounds = name, labels, text, list(buckets)
        self._series: dict[Labels, _Series] = {}

    def observe(self, durations: Iterable[float], *values: str) -> None:
        """Add durations to the series with these values of the labels."""
        series = self._series.get(values) or self.prepare(*values)
        for seconds in durations:
            series.counts[bisect_left(self._bounds, seconds)] += 1
            series.sum += seconds

    def prepare(self, *values: str) -> "_Series":
        """Return a series, which is shown from now on even if it is empty."""
        return self._series.setdefault(values, _Series(len(self._bounds) + 1))

    def totals(self, label: str) -> tuple[int, float]:
        """Return the number and the sum of the durations of all series whose first label has this value."""
        found = [series for values, series in self._series.items() if values[0] == label]
        return sum(sum(series.counts) for series in found), sum(series.sum for series in found)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self.name, self._text, labels=self.labels)
        for values, series in self._series.items():
            family.add_metric(values, list(self._cumulative(series.counts)), series.sum)
        yield family

    def _cumulative(self, counts: Iterable[int]) -> Iterator[tuple[str, float]]:
        total = 0
        for bound, count in zip([*map(str, map(float, self._bounds)), "+Inf"], counts, strict=True):
            total += count
            yield bound, total


class _Series:
    """The durations of one combination of labels."""

    __slots__ = ("counts", "sum")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.sum = 0.0
