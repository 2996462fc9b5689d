"""What several processes of a service count is told as what one would have read_samples."""

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from batchline import __version__
from batchline.telemetry.aggregate import read_samples
from batchline.telemetry.metrics import Metrics


def _samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def _own(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Return what the program counts itself, without the memory and CPU of this very moment."""
    return {key: value for key, value in _samples(metrics).items() if not key[0].startswith("batchline_process_")}


def _tell(service: Metrics, owner: str, hand: Metrics) -> None:
    service.remote.update(owner, read_samples(hand.registry))


def test_without_others_nothing_changes() -> None:
    service = Metrics()
    service.lines.labels("succeeded").inc(3)
    before = _own(service)
    _tell(service, "hand", Metrics())
    service.remote.remove("hand")
    assert _own(service) == before


def test_counts_and_times_are_summed_whoever_knew_the_label_first() -> None:
    """F5: those of the library, and those of our own."""
    service, hand = Metrics(), Metrics()
    service.lines.labels("succeeded").inc(3)
    hand.lines.labels("succeeded").inc(4)
    hand.lines.labels("failed").inc(1)
    for metrics, seconds in ((service, 0.02), (hand, 0.02), (hand, 100.0)):
        metrics.attempts.counts["east", "m", "success"] += 1
        metrics.upstream_seconds.observe([seconds], "east", "m")
        metrics.flush_seconds.observe(seconds)
    _tell(service, "hand", hand)
    told = _samples(service)
    assert told["batchline_lines_total", "succeeded"] == 7
    assert told["batchline_lines_total", "failed"] == 1
    assert told["batchline_attempts_total", "m", "success", "east"] == 3
    for name, labels in (("upstream", ("m", "east")), ("flush", ())):
        bucket = [told[f"batchline_{name}_seconds_bucket", bound, *labels] for bound in ("0.01", "0.025", "+Inf")]
        assert bucket == [0, 2, 3]
        assert told[f"batchline_{name}_seconds_count", *labels] == 3
        assert math.isclose(told[f"batchline_{name}_seconds_sum", *labels], 100.04)


def test_each_is_counted_by_its_last_word() -> None:
    service, hand, other = Metrics(), Metrics(), Metrics()
    hand.segments.inc(2)
    other.segments.inc(10)
    for _ in range(2):
        _tell(service, "hand", hand)
        _tell(service, "other", other)
    hand.segments.inc()
    _tell(service, "hand", hand)
    assert _samples(service)["batchline_segments_total",] == 13


@pytest.mark.rule("F5", "What a process read_samples stays read_samples when it is over.")
def test_no_count_falls_when_a_process_is_over_and_no_gauge_outlives_it() -> None:
    """F5: also when it is the second that ended, and one that never spoke."""
    service, hand = Metrics(), Metrics()
    hand.lines.labels("succeeded").inc(5)
    hand.upstream_seconds.observe([0.2], "default", "m")
    hand.watch("default", lines_in_flight=lambda: 8)
    service.watch("default", lines_in_flight=lambda: 2)
    for ended in range(1, 3):
        _tell(service, f"hand {ended}", hand)
        assert _samples(service)["batchline_lines_in_flight", "default"] == 10
        service.remote.remove(f"hand {ended}")
        told = _samples(service)
        assert told["batchline_lines_total", "succeeded"] == 5 * ended
        assert told["batchline_upstream_seconds_count", "m", "default"] == ended
        assert told["batchline_lines_in_flight", "default"] == 2
    service.remote.remove("nobody")


def test_an_upstream_is_gone_once_whoever_finds_it_gone() -> None:
    service, hand = Metrics(), Metrics()
    for metrics in (service, hand):
        metrics.upstream_paused.labels("default", "", "refused").set(1)
    hand.upstream_paused.labels("east", "m", "timeout").set(1)
    _tell(service, "hand", hand)
    told = _samples(service)
    assert told["batchline_upstream_paused", "", "refused", "default"] == 1
    assert told["batchline_upstream_paused", "m", "timeout", "east"] == 1


def test_a_rate_without_a_bound_stays_so() -> None:
    service, hand = Metrics(), Metrics()
    service.watch("default", upstream_rate_limit=lambda: 20)
    hand.watch("default", upstream_rate_limit=lambda: math.inf)
    _tell(service, "hand", hand)
    assert _samples(service)["batchline_upstream_rate_limit", "default"] == math.inf


def test_what_every_process_measures_is_not_added_up() -> None:
    """F5: a clock that is five seconds ahead is so in all processes; memory is used in each."""
    service, hand = Metrics(), Metrics()
    for metrics in (service, hand):
        metrics.clock_held.set(1)
        metrics.clock_offset_seconds.set(-5)
    alone = _samples(service)
    _tell(service, "hand", hand)
    told = _samples(service)
    assert told["batchline_clock_held",] == 1
    assert told["batchline_clock_offset_seconds",] == -5
    assert told["batchline_build_info", __version__] == 1
    assert told["batchline_process_start_time_seconds",] == alone["batchline_process_start_time_seconds",]
    assert told["batchline_process_resident_memory_bytes",] > 1.5 * alone["batchline_process_resident_memory_bytes",]
