"""Adds the metrics of the worker processes of `batchline serve` to those of the serving process."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import add
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

_Combine = Callable[[float, float], float]

_COMBINED: dict[str, _Combine] = {
    "batchline_upstream_paused": max,
    "batchline_build_info": max,
    "batchline_clock_held": max,
    "batchline_clock_offset_seconds": lambda one, other: max(one, other, key=abs),
    "batchline_process_max_fds": min,
    "batchline_process_start_time_seconds": min,
}
"""The functions that combine the values of processes if these are not added: flags, limits, and values that all of them
measure."""


class MetricSample(NamedTuple):
    """One sample of one process."""

    family: str
    name: str
    labels: tuple[tuple[str, str], ...]
    value: float
    is_cumulative: bool
    """Whether the sample still counts after its process has ended. A gauge does not."""


def read_samples(registry: CollectorRegistry) -> list[MetricSample]:
    """Return every sample of a registry."""
    return [
        MetricSample(
            family.name, sample.name, tuple(sorted(sample.labels.items())), sample.value, family.type != "gauge"
        )
        for family in registry.collect()
        for sample in family.samples
    ]


class RemoteMetrics:
    """The last samples of every worker process, and the cumulative samples of those that have ended."""

    def __init__(self) -> None:
        self._samples: dict[str, Sequence[MetricSample]] = {}
        self._ended: dict[tuple[str, tuple[tuple[str, str], ...]], MetricSample] = {}

    def update(self, owner: str, samples: Sequence[MetricSample]) -> None:
        """Replace the samples of a process."""
        self._samples[owner] = samples

    def remove(self, owner: str) -> None:
        """Forget a process that has ended, but keep its cumulative samples."""
        for sample in self._samples.pop(owner, ()):
            if sample.is_cumulative:
                key = sample.name, sample.labels
                before = self._ended.get(key)
                self._ended[key] = sample if before is None else sample._replace(value=before.value + sample.value)

    def samples(self) -> Iterator[MetricSample]:
        """Yield all samples of all processes."""
        yield from self._ended.values()
        for samples in self._samples.values():
            yield from samples


class MergedCollector(Collector):
    """Collects a registry with the samples of the other processes added."""

    def __init__(self, registry: CollectorRegistry, remote: RemoteMetrics) -> None:
        self._registry, self._remote = registry, remote

    def collect(self) -> Iterator[Metric]:
        remote: dict[str, list[MetricSample]] = {}
        for sample in self._remote.samples():
            remote.setdefault(sample.family, []).append(sample)
        for family in self._registry.collect():
            yield _merge(family, remote[family.name]) if family.name in remote else family


def _merge(family: Metric, remote: Iterable[MetricSample]) -> Metric:
    values = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in family.samples}
    for sample in remote:
        key = sample.name, sample.labels
        combine: _Combine = _COMBINED.get(sample.family, add)
        values[key] = combine(values[key], sample.value) if key in values else sample.value
    merged = Metric(family.name, family.documentation, family.type)
    for (name, labels), value in values.items():
        merged.add_sample(name, dict(labels), value)
    return merged
