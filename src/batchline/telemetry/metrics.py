"""Defines the metrics of `/metrics`. Labels have a fixed set of values: never an id, never text of a prompt."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from batchline.telemetry.aggregate import MergedCollector, RemoteMetrics
from batchline.telemetry.instruments import Durations, Tally

_UPSTREAM_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600)
_FLUSH_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    """One set of instruments with its own registry, so that one process can have two of them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.remote = RemoteMetrics()

        self.lines = self._counter("lines", "Recorded lines, by outcome.", "outcome")
        self.attempts = Tally("batchline_attempts", "Requests sent to upstreams, by result.", "result")
        self.retries = self._counter("retries", "Attempts that were followed by another attempt, by reason.", "reason")
        self.segments = self._counter("segments", "Recorded segments.")
        self.segment_bytes = self._counter("segment_bytes", "Size of the recorded segments in bytes.")
        self.batches = self._counter("batches", "Batches that ended, by status.", "status")
        self.damage = self._counter("damage", "Damaged or missing pieces of stored data, by what they are.", "what")
        self.sweep_deleted = self._counter("sweep_deleted", "Objects that no row needed and that sweeps deleted.")
        self.webhook_deliveries = self._counter(
            "webhook_deliveries", "Attempts to deliver events to webhooks, by result.", "result"
        )
        self.http_requests = self._counter(
            "http_requests", "Answered HTTP requests, by method and status.", "method", "status"
        )
        self.refusals = self._counter(
            "refusals", "Requests and connections that were refused or ended at a bound, by bound.", "bound"
        )

        self.queue_lines = self._gauge("queue_lines", "Lines of all batches that no worker has leased yet.")
        self.lines_in_flight = self._gauge("lines_in_flight", "Requests in flight to the upstream.", "upstream")
        self.upstream_limit = self._gauge(
            "upstream_limit", "Current limit for requests in flight to the upstream.", "upstream"
        )
        self.upstream_rate_limit = self._gauge(
            "upstream_rate_limit",
            "Current limit for requests per second to the upstream; +Inf if there is none.",
            "upstream",
        )
        self.lines_waiting = self._gauge(
            "lines_waiting",
            "Lines that a worker holds and that are not in flight, by what they wait for.",
            "upstream",
            "reason",
        )
        self.shards_held = self._gauge("shards_held", "Shards that this process has leased.")
        self.held_bytes = self._gauge("held_bytes", "Size in bytes of answers that are not recorded yet.")
        self.sweep_held_back = self._gauge(
            "sweep_held_back",
            "Objects without a row that the last sweep did not delete because they were too many.",
        )
        self.upstream_paused = self._gauge(
            "upstream_paused",
            "1 while requests to the upstream, or of one model to it, are paused because it is unavailable.",
            "upstream",
            "model",
            "reason",
        )

        self.clock_offset_seconds = self._gauge(
            "clock_offset_seconds",
            "Seconds by which the clock of this machine is ahead of the time that decides; negative if behind.",
        )
        self.clock_held = self._gauge(
            "clock_held", "1 while nothing expires and nothing is deleted, because the clock is in doubt."
        )

        self.upstream_seconds = Durations(
            "batchline_upstream_seconds", "Duration of one attempt in seconds.", _UPSTREAM_BUCKETS
        )
        self.registry.register(self.attempts)
        self.registry.register(self.upstream_seconds)
        self.flush_seconds = self._histogram("flush_seconds", "Time to record one segment in seconds.", _FLUSH_BUCKETS)

    def watch(self, *labels: str, **readings: Callable[[], float]) -> None:
        """Set gauges that are read when the metrics are collected."""
        for name, reading in readings.items():
            gauge: Gauge = getattr(self, name)
            (gauge.labels(*labels) if labels else gauge).set_function(reading)

    def render(self) -> bytes:
        """Return all metrics, with those of the worker processes, in the text format of Prometheus."""
        return generate_latest(MergedCollector(self.registry, self.remote))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace="batchline", registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, namespace="batchline", registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, namespace="batchline", registry=self.registry, buckets=buckets)
