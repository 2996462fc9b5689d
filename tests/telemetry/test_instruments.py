"""The instruments of the per-line path give the same text as those of prometheus_client."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from batchline.telemetry.instruments import Durations, Tally

_BUCKETS = (0.1, 1, 2.5)


def _text(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_a_tally_is_a_counter_with_one_label() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally, counter = Tally("n", "Help.", "result"), Counter("n", "Help.", ("result",), registry=theirs)
    ours.register(tally)
    for result in ("success", "success", "timeout"):
        tally.counts[result] += 1
        counter.labels(result).inc()
    assert _text(ours) == _text(theirs)


def test_durations_are_a_histogram_whose_bounds_are_included() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    durations, histogram = Durations("n", "Help.", _BUCKETS), Histogram("n", "Help.", registry=theirs, buckets=_BUCKETS)
    ours.register(durations)
    for seconds in (0.05, 0.1, 0.5, 2.5, 99):
        durations.observe(seconds)
        histogram.observe(seconds)
    assert _text(ours) == _text(theirs)
