"""What `batchline top` reads from the metrics of a service."""

from batchline.cli.top.metrics import read_metrics
from batchline.telemetry.metrics import Metrics


def test_the_state_of_each_upstream_is_read() -> None:
    metrics = Metrics()
    metrics.lines.labels("succeeded").inc(7)
    metrics.lines.labels("failed").inc(2)
    metrics.queue_lines.set(1000)
    metrics.held_bytes.set(5)
    metrics.lines_in_flight.labels("big").set(3)
    metrics.upstream_limit.labels("big").set(8)
    metrics.upstream_rate_limit.labels("big").set(2.5)
    metrics.lines_waiting.labels("big", "rate_limit").set(40)
    metrics.lines_waiting.labels("big", "slots").set(0)
    metrics.upstream_paused.labels("small", "m", "http_503").set(1)
    metrics.upstream_paused.labels("small", "", "refused").set(0)
    state = read_metrics(metrics.render().decode())
    assert (state.queued_lines, state.recorded_lines, state.in_flight, state.held_bytes) == (1000, 9, 3, 5)
    big, small = state.upstreams
    assert (big.name, big.in_flight, big.limit, big.rate_limit, big.waiting) == ("big", 3, 8, 2.5, {"rate_limit": 40})
    assert small.pauses == ["model m paused: http_503"]
