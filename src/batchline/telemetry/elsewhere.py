"""What other processes of a service count, told together with what this one does."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

_STATES = frozenset({"batchline_upstream_paused"})
"""Gauges that are 1 while something is so: it is not more so when two processes find it."""


class Counted(NamedTuple):
    """One number of one process."""

    family: str
    name: str
    labels: tuple[tuple[str, str], ...]
    value: float
    lasts: bool
    """Whether it stays counted when its process is over: a gauge does not."""


def counted(registry: CollectorRegistry) -> list[Counted]:
    """Everything a registry tells, but for when it began to."""
    return [
        Counted(family.name, sample.name, tuple(sorted(sample.labels.items())), sample.value, family.type != "gauge")
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


class Elsewhere:
    """The last word of each of the others, and of those that are over what must not be forgotten."""

    def __init__(self) -> None:
        self._told: dict[str, Sequence[Counted]] = {}
        self._past: dict[tuple[str, tuple[tuple[str, str], ...]], Counted] = {}

    def tell(self, owner: str, numbers: Sequence[Counted]) -> None:
        self._told[owner] = numbers

    def leave(self, owner: str) -> None:
        for number in self._told.pop(owner, ()):
            if number.lasts:
                key = number.name, number.labels
                before = self._past.get(key)
                self._past[key] = number if before is None else number._replace(value=before.value + number.value)

    def numbers(self) -> Iterator[Counted]:
        yield from self._past.values()
        for told in self._told.values():
            yield from told


class Together(Collector):
    """A registry's numbers with those of the others added to them."""

    def __init__(self, registry: CollectorRegistry, elsewhere: Elsewhere) -> None:
        self._registry, self._elsewhere = registry, elsewhere

    def collect(self) -> Iterator[Metric]:
        others: dict[str, list[Counted]] = {}
        for number in self._elsewhere.numbers():
            others.setdefault(number.family, []).append(number)
        for family in self._registry.collect():
            yield _summed(family, others[family.name]) if family.name in others else family


def _summed(family: Metric, others: Iterable[Counted]) -> Metric:
    values = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in family.samples}
    for number in others:
        key = number.name, number.labels
        values[key] = values.get(key, 0.0) + number.value
        if number.family in _STATES:
            values[key] = min(1.0, values[key])
    summed = Metric(family.name, family.documentation, family.type)
    for (name, labels), value in values.items():
        summed.add_sample(name, dict(labels), value)
    return summed
