"""Metrics: names and labels are part of what operators build on."""

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from batchline.domain.records import Charge
from batchline.domain.usage import Usage
from batchline.telemetry.instruments import Durations, Tally
from batchline.telemetry.metrics import (
    DAMAGED_PARTS,
    DELIVERY_RESULTS,
    OUTCOMES,
    RESULTS,
    RETRY_REASONS,
    TOKEN_KINDS,
    Metrics,
)

_LABELS = {
    "lines": ("outcome",),
    "attempts": ("upstream", "model", "result"),
    "tokens": ("model", "kind"),
    "cost_units": ("model",),
    "retries": ("reason",),
    "segments": (),
    "segment_bytes": (),
    "batches": ("status",),
    "damage": ("what",),
    "refusals": ("bound",),
    "console_refusals": ("reason",),
    "reused_lines": (),
    "saved_units": (),
    "webhook_deliveries": ("result",),
    "http_request_seconds": ("route", "method", "status"),
    "open_batches": ("status",),
    "oldest_line_seconds": (),
    "nearest_deadline_seconds": (),
    "disk_free_bytes": (),
    "build_info": ("version",),
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
    "upstream_seconds": ("upstream", "model"),
    "flush_seconds": (),
    "clock_offset_seconds": (),
    "clock_held": (),
}


_PROCESS = {
    "batchline_process_cpu_seconds",
    "batchline_process_max_fds",
    "batchline_process_open_fds",
    "batchline_process_resident_memory_bytes",
    "batchline_process_start_time_seconds",
    "batchline_process_virtual_memory_bytes",
}


def test_every_instrument_has_its_name_and_labels_and_no_others() -> None:
    """F5: names start with batchline_, and a label that could hold an id or a prompt does not exist."""
    metrics = Metrics()
    instruments = [part for part in vars(metrics).values() if isinstance(part, MetricWrapperBase | Tally | Durations)]
    names = {_name(part): _labels(part) for part in instruments}
    assert names == {f"batchline_{name}": labels for name, labels in _LABELS.items()}
    assert {family.name for family in metrics.registry.collect()} == names.keys() | _PROCESS


def _name(instrument: Any) -> str:
    name: str = instrument.name if isinstance(instrument, Tally | Durations) else instrument._name
    return name


def _labels(instrument: Any) -> tuple[str, ...]:
    labels: tuple[str, ...] = instrument.labels if isinstance(instrument, Tally | Durations) else instrument._labelnames
    return labels


_PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()


def test_labels_are_documented_beside_their_metric() -> None:
    """A row may name several metrics with the same labels. After a colon it lists the values of a label."""
    documented: dict[str, tuple[str, ...]] = {}
    for names, labels in re.findall(r"^\| (`batchline_[^|]*) \|([^|]*)\|", _PAGE, re.MULTILINE):
        named = re.findall(r"`(\w+)`", re.sub(r":(?:,? `\w+`)+", "", labels))
        documented |= dict.fromkeys(re.findall(r"`(batchline_\w+?)(?:_total)?`", names), tuple(named))
    assert {name: documented.get(f"batchline_{name}") for name in _LABELS} == _LABELS


def test_the_values_of_labels_that_are_documented_are_those_that_are_counted() -> None:
    listed = re.findall(r"`(\w+)`:((?:,? `\w+`)+)", _PAGE)
    assert {(label, tuple(re.findall(r"\w+", values))) for label, values in listed} == {
        ("outcome", OUTCOMES),
        ("result", RESULTS),
        ("result", DELIVERY_RESULTS),
        ("reason", RETRY_REASONS),
        ("kind", TOKEN_KINDS),
        ("what", DAMAGED_PARTS),
    }


def test_every_series_is_there_before_the_first_event() -> None:
    """F5: the rate of a series that begins at 1 is 0."""
    metrics = Metrics()
    metrics.prepare_upstreams({"default": ["small", "large"], "any": []})
    families = list(text_string_to_metric_families(metrics.render().decode()))
    samples = {(sample.name, *sample.labels.values()) for family in families for sample in family.samples}
    for upstream, model in (("default", "small"), ("default", "large"), ("any", "other")):
        for result in ("success", "refused", "throttled", "fault"):
            assert ("batchline_attempts_total", model, result, upstream) in samples
        assert ("batchline_upstream_seconds_count", model, upstream) in samples
        assert ("batchline_tokens_total", "output", model) in samples
        assert ("batchline_cost_units_total", model) in samples
    empty = [family.name for family in families if not family.samples]
    assert empty == ["batchline_lines_in_flight"] + [
        f"batchline_{name}" for name in ("upstream_limit", "upstream_rate_limit", "lines_waiting")
    ] + ["batchline_http_request_seconds"], "these begin with the worker and with the routes"


def test_every_series_of_a_learned_model_is_there_with_its_first_answer() -> None:
    """F5: otherwise the first fault of a model would make a series that begins at 1."""
    metrics = Metrics()
    metrics.prepare_upstreams({"any": [], "default": ["small"]})
    metrics.model_labels.on_answer("llama")
    samples = _samples(metrics)
    for result in ("success", "refused", "throttled", "fault"):
        assert samples["batchline_attempts_total", "llama", result, "any"] == 0
    for kind in ("input", "cached_input", "output"):
        assert samples["batchline_tokens_total", kind, "llama"] == 0
    assert samples["batchline_cost_units_total", "llama"] == 0
    assert samples["batchline_upstream_seconds_count", "llama", "any"] == 0
    assert ("batchline_attempts_total", "llama", "success", "default") not in samples


def test_no_series_tells_when_another_was_created() -> None:
    assert b"_created" not in Metrics().render()


def test_charges_count_tokens_by_kind_and_cost_in_units() -> None:
    metrics = Metrics()
    metrics.model_labels.add("m")
    usage = Usage(input_tokens=10, cached_tokens=4, output_tokens=3)
    metrics.on_charges([Charge(model=model, requests=1, usage=usage, cost=500_000_000) for model in ("m", "unknown")])
    samples = _samples(metrics)
    for model in ("m", "other"):
        kinds = [samples["batchline_tokens_total", kind, model] for kind in ("input", "cached_input", "output")]
        assert kinds == [6, 4, 3]
        assert samples["batchline_cost_units_total", model] == 0.5


def _samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_what_is_counted_is_rendered() -> None:
    metrics = Metrics()
    metrics.lines.labels(outcome="completed").inc(3)
    metrics.attempts.counts["east", "m", "success"] += 2
    metrics.upstream_seconds.observe([0.2], "east", "m")
    samples = _samples(metrics)
    assert samples["batchline_lines_total", "completed"] == 3
    assert samples["batchline_attempts_total", "m", "success", "east"] == 2
    assert samples["batchline_upstream_seconds_bucket", "0.1", "m", "east"] == 0
    assert samples["batchline_upstream_seconds_bucket", "0.25", "m", "east"] == 1
    assert samples["batchline_upstream_seconds_bucket", "+Inf", "m", "east"] == 1
    assert samples["batchline_upstream_seconds_count", "m", "east"] == 1
    assert samples["batchline_upstream_seconds_sum", "m", "east"] == pytest.approx(0.2)


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
