"""Metrics: what `/metrics` tells. Labels are words of this program, never ids and nothing out of a prompt."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from batchline.telemetry.aggregate import MergedCollector, RemoteMetrics
from batchline.telemetry.instruments import Durations, Tally

_UPSTREAM_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600)
_FLUSH_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    """One set of instruments, with a registry of its own so that two of them can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.remote = RemoteMetrics()

        self.lines = self._counter("lines", "Lines recorded.", "outcome")
        self.attempts = Tally("batchline_attempts", "Attempts at the upstream.", "result")
        self.retries = self._counter("retries", "Attempts that were followed by another.", "reason")
        self.segments = self._counter("segments", "Segments recorded.")
        self.segment_bytes = self._counter("segment_bytes", "Bytes of recorded segments.")
        self.batches = self._counter("batches", "Batches that reached a terminal state.", "status")
        self.http_requests = self._counter("http_requests", "Requests answered.", "method", "status")

        self.queue_lines = self._gauge("queue_lines", "Lines that no worker holds yet, of all there are.")
        self.lines_in_flight = self._gauge("lines_in_flight", "Lines the upstream is answering.", "upstream")
        self.upstream_limit = self._gauge("upstream_limit", "Lines it may be answering at once, as found.", "upstream")
        self.upstream_rate_limit = self._gauge(
            "upstream_rate_limit", "Lines it may be sent in a second, as found; +Inf while it never minds.", "upstream"
        )
        self.lines_waiting = self._gauge("lines_waiting", "Lines waiting for a slot or their next attempt.")
        self.shards_held = self._gauge("shards_held", "Shards this process has leased.")
        self.held_bytes = self._gauge("held_bytes", "Bytes of answers not recorded yet.")
        self.upstream_paused = self._gauge(
            "upstream_paused", "1 while the upstream is taken to be gone.", "upstream", "reason"
        )

        self.upstream_seconds = Durations("batchline_upstream_seconds", "Time of one attempt.", _UPSTREAM_BUCKETS)
        self.registry.register(self.attempts)
        self.registry.register(self.upstream_seconds)
        self.flush_seconds = self._histogram("flush_seconds", "Time to record one segment.", _FLUSH_BUCKETS)

    def watch(self, *labels: str, **readings: Callable[[], float]) -> None:
        """Have gauges read when they are asked for."""
        for name, reading in readings.items():
            gauge: Gauge = getattr(self, name)
            (gauge.labels(*labels) if labels else gauge).set_function(reading)

    def render(self) -> bytes:
        """All of it, with what others of this service told, in Prometheus' text format."""
        return generate_latest(MergedCollector(self.registry, self.remote))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace="batchline", registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, namespace="batchline", registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, namespace="batchline", registry=self.registry, buckets=buckets)
