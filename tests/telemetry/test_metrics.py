"""Metrics: names and labels are part of what operators build on."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from batchline.telemetry.instruments import Durations, Tally
from batchline.telemetry.metrics import Metrics

_LABELS = {
    "lines": ("outcome",),
    "attempts": ("result",),
    "retries": ("reason",),
    "segments": (),
    "segment_bytes": (),
    "batches": ("status",),
    "damage": ("what",),
    "refusals": ("bound",),
    "http_requests": ("method", "status"),
    "webhook_deliveries": ("result",),
    "sweep_deleted": (),
    "sweep_held_back": (),
    "queue_lines": (),
    "lines_in_flight": ("upstream",),
    "upstream_limit": ("upstream",),
    "upstream_rate_limit": ("upstream",),
    "lines_waiting": ("upstream", "reason"),
    "shards_held": (),
    "held_bytes": (),
    "upstream_paused": ("upstream", "model", "reason"),
    "upstream_seconds": (),
    "flush_seconds": (),
    "clock_offset_seconds": (),
    "clock_held": (),
}


def test_every_instrument_has_its_name_and_labels_and_no_others() -> None:
    """F5: names start with batchline_, and a label that could hold an id or a prompt does not exist."""
    metrics = Metrics()
    instruments = {name: part for name, part in vars(metrics).items() if name not in {"registry", "remote"}}
    assert {name: _labels(part) for name, part in instruments.items()} == _LABELS
    assert {family.name for family in metrics.registry.collect()} == {f"batchline_{name}" for name in _LABELS}


def _labels(instrument: Any) -> tuple[str, ...]:
    if isinstance(instrument, Durations):
        return ()
    return (instrument.label,) if isinstance(instrument, Tally) else instrument._labelnames


def _samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_what_is_counted_is_rendered() -> None:
    metrics = Metrics()
    metrics.lines.labels(outcome="completed").inc(3)
    metrics.attempts.counts["success"] += 2
    metrics.upstream_seconds.observe(0.2)
    samples = _samples(metrics)
    assert samples["batchline_lines_total", "completed"] == 3
    assert samples["batchline_attempts_total", "success"] == 2
    assert samples["batchline_upstream_seconds_bucket", "0.1"] == 0
    assert samples["batchline_upstream_seconds_bucket", "0.25"] == 1
    assert samples["batchline_upstream_seconds_bucket", "+Inf"] == samples["batchline_upstream_seconds_count",] == 1
    assert samples["batchline_upstream_seconds_sum",] == pytest.approx(0.2)


def test_watched_gauges_tell_the_state_of_the_moment_they_are_rendered() -> None:
    metrics, state = Metrics(), {"in_flight": 0}
    metrics.watch("default", lines_in_flight=lambda: state["in_flight"])
    metrics.watch("other", lines_in_flight=lambda: 7)
    metrics.watch(held_bytes=lambda: 2, shards_held=lambda: 3)
    assert _samples(metrics)["batchline_lines_in_flight", "default"] == 0
    state["in_flight"] = 1
    samples = _samples(metrics)
    assert [samples["batchline_lines_in_flight", name] for name in ("default", "other")] == [1, 7]
    assert [samples[f"batchline_{name}",] for name in ("held_bytes", "shards_held")] == [2, 3]


def test_two_sets_live_in_one_process() -> None:
    """Tests and simulations make many; none may count into another's."""
    first, second = Metrics(), Metrics()
    first.segments.inc()
    assert b"batchline_segments_total 0.0" in second.render()
