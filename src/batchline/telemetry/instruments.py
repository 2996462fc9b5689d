"""Instruments for events that happen with every line.

The instruments of prometheus_client take a lock and look up labels on every call, which takes 2 to 3 us. These belong
to one event loop and take a tenth of that.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Tally(Collector):
    """A counter with one label: ``tally.counts["success"] += 1``."""

    def __init__(self, name: str, text: str, label: str) -> None:
        self.name, self.label, self._text = name, label, text
        self.counts: Counter[str] = Counter()

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self.name, self._text, labels=[self.label])
        for value, count in self.counts.items():
            family.add_metric([value], count)
        yield family


class Durations(Collector):
    """A histogram of seconds."""

    def __init__(self, name: str, text: str, buckets: Iterable[float]) -> None:
        self.name, self._text, self._bounds = name, text, list(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Add one duration."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self.name, self._text)
        family.add_metric([], list(self._cumulative()), self._sum)
        yield family

    def _cumulative(self) -> Iterator[tuple[str, float]]:
        total = 0
        for bound, count in zip([*map(str, map(float, self._bounds)), "+Inf"], self._counts, strict=True):
            total += count
            yield bound, total
