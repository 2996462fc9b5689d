"""Defines the metrics of `/metrics`. Labels have a bounded set of values: never an id, never text of a prompt."""

from collections.abc import Callable, Collection, Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from batchline import __version__
from batchline.domain.money import NANO
from batchline.domain.records import Charge
from batchline.domain.states import OPEN_STATUSES, TERMINAL
from batchline.telemetry.aggregate import MergedCollector, RemoteMetrics
from batchline.telemetry.instruments import Durations, Tally
from batchline.telemetry.labels import OTHER_MODEL, ModelLabels

_UPSTREAM_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600)
_HTTP_BUCKETS = (0.005, 0.025, 0.1, 0.5, 2.5, 10)
_FLUSH_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)

OUTCOMES = ("succeeded", "failed")
RESULTS = ("success", "refused", "throttled", "fault")
RETRY_REASONS = ("throttled", "fault")
TOKEN_KINDS = ("input", "cached_input", "output")
DAMAGED_PARTS = ("file", "segment", "shard")
DELIVERY_RESULTS = ("delivered", "failed", "gone", "given_up")
BOUNDS = (
    *("call_bytes", "connections", "idle_connections", "key_reads", "organization_storage", "project_call_bytes"),
    *("project_calls", "project_downloads", "project_lists", "project_live_pages", "project_requests"),
    *("project_result_reads", "project_storage", "sign_in", "unread_answer"),
)
CONSOLE_REFUSALS = ("bound", "forged_form", "missing_scope", "not_found", "other", "wrong_key")
"""The values of labels. All series of them are shown from the start, so that a rate over the first event is right."""

# Creation times double the number of series, and nothing reads them.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """One set of instruments with its own registry, so that one process can have two of them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.remote = RemoteMetrics()
        self.model_labels = ModelLabels(on_learned=self._prepare_learned)
        self._open_upstreams: list[str] = []
        """The upstreams that take any model."""

        self.lines = self._counter("lines", "Recorded lines, by outcome.", "outcome")
        self.attempts = self._tally(
            "attempts", "Requests of lines that were sent to upstreams, by result.", "upstream", "model", "result"
        )
        self.retries = self._counter("retries", "Attempts that were followed by another attempt, by reason.", "reason")
        self.tokens = self._tally("tokens", "Tokens of answers, by model and kind.", "model", "kind")
        self.cost = self._tally("cost_units", "Cost of answers in units, by model.", "model")
        self.segments = self._counter("segments", "Recorded segments.")
        self.segment_bytes = self._counter("segment_bytes", "Size of the recorded segments in bytes.")
        self.batches = self._counter("batches", "Batches that ended, by status.", "status")
        self.damage = self._counter("damage", "Damaged or missing pieces of stored data, by what they are.", "what")
        self.sweep_deleted = self._counter("sweep_deleted", "Objects that no row needed and that sweeps deleted.")
        self.webhook_deliveries = self._counter(
            "webhook_deliveries", "Attempts to deliver events to webhooks, by result.", "result"
        )
        self.reused_lines = self._counter("reused_lines", "Lines of batches that took an earlier answer.")
        self.saved_units = self._counter("saved_units", "What these lines would have cost, in units.")
        self.refusals = self._counter(
            "refusals", "Requests and connections that were refused or ended at a bound, by bound.", "bound"
        )
        self.console_refusals = self._counter(
            "console_refusals", "Requests that the console refused, by reason.", "reason"
        )

        self.queue_lines = self._gauge("queue_lines", "Lines of all batches that no worker has leased yet.")
        self.open_batches = self._gauge("open_batches", "Batches that have not ended, by status.", "status")
        self.oldest_line_seconds = self._gauge(
            "oldest_line_seconds",
            "Age in seconds of the oldest batch with lines that no worker has leased yet; 0 if there is none.",
        )
        self.nearest_deadline_seconds = self._gauge(
            "nearest_deadline_seconds",
            "Seconds until the window of the first batch with unfinished lines ends; +Inf if there is none.",
        )
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

        self.disk_free_bytes = self._gauge(
            "disk_free_bytes", "Free space on the disk of the data folder; +Inf if the process has no such folder."
        )
        self.clock_offset_seconds = self._gauge(
            "clock_offset_seconds",
            "Seconds by which the clock of this machine is ahead of the time that decides; negative if behind.",
        )
        self.clock_held = self._gauge(
            "clock_held", "1 while nothing expires and nothing is deleted, because the clock is in doubt."
        )
        self.build_info = self._gauge("build_info", "1, with the version of the program.", "version")

        self.upstream_seconds = self._durations(
            "upstream_seconds", "Duration of one attempt in seconds.", "upstream", "model", buckets=_UPSTREAM_BUCKETS
        )
        self.http_request_seconds = self._durations(
            "http_request_seconds",
            "Duration of HTTP requests in seconds, by route, method and status of the answer.",
            "route",
            "method",
            "status",
            buckets=_HTTP_BUCKETS,
        )
        self.flush_seconds = self._histogram("flush_seconds", "Time to record one segment in seconds.", _FLUSH_BUCKETS)
        ProcessCollector(namespace="batchline", registry=self.registry)
        self._prepare()

    def watch(self, *labels: str, **readings: Callable[[], float]) -> None:
        """Set gauges that are read when the metrics are collected."""
        for name, reading in readings.items():
            gauge: Gauge = getattr(self, name)
            (gauge.labels(*labels) if labels else gauge).set_function(reading)

    def on_charges(self, charges: Iterable[Charge]) -> None:
        """Count the tokens and the cost of answers."""
        for charge in charges:
            model, usage = self.model_labels.of(charge.model), charge.usage
            self.tokens.counts[model, "input"] += usage.input_tokens - usage.cached_tokens
            self.tokens.counts[model, "cached_input"] += usage.cached_tokens
            self.tokens.counts[model, "output"] += usage.output_tokens
            self.cost.counts[(model,)] += charge.cost / NANO

    def render(self) -> bytes:
        """Return all metrics, with those of the worker processes, in the text format of Prometheus."""
        return generate_latest(MergedCollector(self.registry, self.remote))

    def prepare_upstreams(self, models: Mapping[str, Collection[str]]) -> None:
        """Show every series of the upstreams, with the configured models of each.

        One that takes any model has none. Its series of a model are shown when an upstream has answered for that model.
        """
        for upstream, served in models.items():
            self.upstream_paused.labels(upstream, "", "")
            if not served:
                self._open_upstreams.append(upstream)
            for model in served or (OTHER_MODEL,):
                self.model_labels.add(model)
                self._prepare_model(upstream, model)

    def _prepare(self) -> None:
        """Show every series from the start."""
        self.build_info.labels(__version__).set(1)
        for counter, values in (
            (self.lines, OUTCOMES),
            (self.retries, RETRY_REASONS),
            (self.batches, sorted(TERMINAL)),
            (self.damage, DAMAGED_PARTS),
            (self.webhook_deliveries, DELIVERY_RESULTS),
            (self.refusals, BOUNDS),
            (self.console_refusals, CONSOLE_REFUSALS),
        ):
            for value in values:
                counter.labels(value)
        for status in OPEN_STATUSES:
            self.open_batches.labels(status)

    def _prepare_learned(self, model: str) -> None:
        """Show every series of a model that an upstream has answered for, not only those of what has happened."""
        for upstream in self._open_upstreams:
            self._prepare_model(upstream, model)

    def _prepare_model(self, upstream: str, model: str) -> None:
        self.upstream_seconds.prepare(upstream, model)
        for result in RESULTS:
            self.attempts.counts[upstream, model, result] = 0
        for kind in TOKEN_KINDS:
            self.tokens.counts[model, kind] = 0
        self.cost.counts[(model,)] = 0

    def _tally(self, name: str, text: str, *labels: str) -> Tally:
        tally = Tally(f"batchline_{name}", text, *labels)
        self.registry.register(tally)
        return tally

    def _durations(self, name: str, text: str, *labels: str, buckets: tuple[float, ...]) -> Durations:
        durations = Durations(f"batchline_{name}", text, *labels, buckets=buckets)
        self.registry.register(durations)
        return durations

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace="batchline", registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, namespace="batchline", registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, namespace="batchline", registry=self.registry, buckets=buckets)
