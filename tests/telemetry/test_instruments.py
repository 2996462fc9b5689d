"""The instruments of the per-line path give the same text as those of prometheus_client."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from batchline.telemetry.instruments import Durations, Tally

_BUCKETS = (0.1, 1, 2.5)


def _text(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_a_tally_is_a_counter_with_labels() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally("n", "Help.", "upstream", "result")
    counter = Counter("n", "Help.", ("upstream", "result"), registry=theirs)
    ours.register(tally)
    for labels in (("a", "success"), ("a", "success"), ("b", "timeout")):
        tally.counts[labels] += 1
        counter.labels(*labels).inc()
    assert _text(ours) == _text(theirs)


def test_durations_are_a_histogram_whose_bounds_are_included() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    durations = Durations("n", "Help.", "route", buckets=_BUCKETS)
    histogram = Histogram("n", "Help.", ("route",), registry=theirs, buckets=_BUCKETS)
    ours.register(durations)
    for route in ("/a", "/b"):
        durations.prepare(route)
        histogram.labels(route)
    for seconds in (0.05, 0.1, 0.5, 2.5, 99):
        durations.observe([seconds], "/a")
        histogram.labels("/a").observe(seconds)
    assert _text(ours) == _text(theirs)


def test_the_durations_of_a_label_are_added_up_over_the_others() -> None:
    durations = Durations("n", "Help.", "upstream", "model", buckets=_BUCKETS)
    for seconds, upstream, model in ((0.5, "a", "x"), (1.5, "a", "y"), (9, "b", "x")):
        durations.observe([seconds], upstream, model)
    assert durations.totals("a") == (2, 2.0)
    assert durations.totals("none") == (0, 0)
