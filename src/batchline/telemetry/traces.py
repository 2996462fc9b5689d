"""Makes OpenTelemetry traces, with the names of the semantic conventions for generative AI.

::

    batch            from its creation to its end; made by the process that finalizes it
      chat MODEL     one line, from its first attempt to its outcome; each attempt that failed is an event of it

The ids of the trace and of the batch's span follow from the id of the batch, so that all processes of a fleet add to
the same trace without talking to each other. A span is made when it has ended. No span contains text of a request or an
answer.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any
from zlib import crc32

from msgspec import DecodeError, Struct
from msgspec.json import Decoder
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation import set_span_in_context

from batchline import __version__
from batchline.domain import ids
from batchline.domain.models import Model
from batchline.domain.outcomes import Failure, Outcome, Retryable, Success
from batchline.domain.records import Batch
from batchline.domain.states import BatchStatus
from batchline.domain.usage import NOTHING, Usage
from batchline.ports import Clock

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""The name of the operation of an endpoint; every other endpoint is named by its path."""
_PROVIDER = "openai"
"""The API that an upstream speaks: the conventions want it where the provider itself is unknown."""
_NANOSECONDS = 1_000_000_000
_CRC_RANGE = 2**32

Attributes = dict[str, str | int | float | list[str]]


class _Choice(Struct):
    finish_reason: str | None = None


class _Answer(Struct):
    id: str | None = None
    model: str | None = None
    choices: list[_Choice] = []


class _Request(Struct):
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None


_answer, _request = Decoder(_Answer), Decoder(_Request)


class _Ids(RandomIdGenerator):
    """Makes random ids, except for the next span if its ids were chosen."""

    def __init__(self) -> None:
        self.chosen: SpanContext | None = None

    def generate_trace_id(self) -> int:
        return super().generate_trace_id() if self.chosen is None else self.chosen.trace_id

    def generate_span_id(self) -> int:
        return super().generate_span_id() if self.chosen is None else self.chosen.span_id


class Traces:
    """Makes the spans of one process. ``servers`` has host and port of upstreams, by name."""

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        clock: Clock,
        owner: str,
        line_share: float,
        servers: Mapping[str, tuple[str, int]],
    ) -> None:
        self.clock, self.servers = clock, servers
        self._ids = _Ids()
        self._sampled_below = line_share * _CRC_RANGE
        resource = Resource(
            {"service.name": "batchline", "service.version": __version__, "service.instance.id": owner}
        ).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("batchline", __version__)

    def sample(self, batch_id: str, index: int, *, endpoint: str) -> "LineSpan | None":
        """Return what collects the trace of a line, or None if the line is not one of those that are traced.

        The choice follows from the id of the line, so each process makes the same one.
        """
        line_id = ids.line_id(batch_id, index)
        if index and crc32(line_id.encode()) >= self._sampled_below:
            return None
        return LineSpan(self, batch_id, line_id, endpoint)

    def on_batch_ended(self, batch: Batch, status: BatchStatus, *, completed: int, failed: int) -> None:
        """Make the span of a batch, from its creation to now."""
        attributes: Attributes = {
            "batchline.batch.id": batch.id,
            "batchline.batch.status": status,
            "batchline.batch.completed": completed,
            "batchline.batch.failed": failed,
            "batchline.project.id": batch.project_id,
            "gen_ai.operation.name": operation_of(batch.endpoint),
            **_usage(batch.usage),
        }
        self._ids.chosen = context_of(batch.id)
        try:
            span = self.tracer.start_span(
                "batch", context=Context(), attributes=attributes, start_time=batch.created_at * _NANOSECONDS
            )
        finally:
            self._ids.chosen = None
        span.end(nanoseconds(self.clock.now()))

    def close(self) -> None:
        """Send the spans that were not sent yet, and make no more. This blocks."""
        self._provider.shutdown()


class LineSpan:
    """Collects the attempts of one line, and makes its span when it has an outcome."""

    def __init__(self, traces: Traces, batch_id: str, line_id: str, endpoint: str) -> None:
        self._traces, self._batch_id, self._endpoint = traces, batch_id, endpoint
        self._attributes: Attributes = {"batchline.batch.id": batch_id, "batchline.line.id": line_id}
        self._started_at: float | None = None
        self._attempts = 0
        self._faults: list[tuple[float, Attributes]] = []

    def on_attempt(self, outcome: Outcome, *, upstream: str, model: Model, body: bytes, seconds: float) -> None:
        """Note an attempt that just ended after so many seconds."""
        now = self._traces.clock.now()
        self._attempts += 1
        if self._started_at is None:
            self._started_at = now - seconds
        if not isinstance(outcome, Success):
            kind = outcome.kind if isinstance(outcome, Retryable) else outcome.legacy
            self._faults.append((now, {"error.type": kind, "batchline.upstream": upstream, "seconds": seconds}))
        host, port = self._traces.servers.get(upstream, ("", 0))
        self._attributes |= {
            "gen_ai.operation.name": operation_of(self._endpoint),
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.request.model": model.name,
            "batchline.upstream": upstream,
            "batchline.attempts": self._attempts,
            **({"server.address": host, "server.port": port} if host else {}),
            **_request_attributes(body),
        }

    def on_outcome(self, outcome: Success | Failure) -> None:
        """Make the span of the line, if there was an attempt."""
        if self._started_at is None:
            return
        attributes = self._attributes
        attributes |= _answer_attributes(outcome) if isinstance(outcome, Success) else {"error.type": outcome.code}
        span = self._traces.tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}",
            context=set_span_in_context(NonRecordingSpan(context_of(self._batch_id)), Context()),
            kind=SpanKind.CLIENT,
            attributes=attributes,
            start_time=nanoseconds(self._started_at),
        )
        for at, fault in self._faults:
            span.add_event("batchline.attempt_failed", fault, timestamp=nanoseconds(at))
        if isinstance(outcome, Failure):
            span.set_status(Status(StatusCode.ERROR, outcome.code))
        span.end(nanoseconds(self._traces.clock.now()))


def otlp_exporter() -> SpanExporter:
    """Return the exporter that the variables OTEL_EXPORTER_OTLP_* configure."""
    return OTLPSpanExporter()


def operation_of(endpoint: str) -> str:
    """Return the name of the operation that an endpoint performs."""
    return _OPERATIONS.get(endpoint, endpoint)


def context_of(batch_id: str) -> SpanContext:
    """Return the ids of the trace and of the span of a batch."""
    digest = blake2b(batch_id.encode(), digest_size=24, person=b"batchline trace").digest()
    return SpanContext(
        trace_id=int.from_bytes(digest[:16]),
        span_id=int.from_bytes(digest[16:]),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


def nanoseconds(at: float) -> int:
    """Return a time in the unit of OpenTelemetry."""
    return int(at * _NANOSECONDS)


def _request_attributes(body: bytes) -> Attributes:
    """Return the parameters of a request. One that cannot be read has none."""
    try:
        request = _request.decode(body)
    except (DecodeError, RecursionError):
        return {}
    given = {
        "gen_ai.request.max_tokens": request.max_completion_tokens or request.max_tokens,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
    }
    return {name: value for name, value in given.items() if value is not None}


def _answer_attributes(success: Success) -> Attributes:
    attributes: Attributes = _usage(success.usage)
    try:
        answer = _answer.decode(success.body)
    except (DecodeError, RecursionError):
        return attributes
    given: dict[str, Any] = {
        "gen_ai.response.id": answer.id,
        "gen_ai.response.model": answer.model,
        "gen_ai.response.finish_reasons": [choice.finish_reason for choice in answer.choices if choice.finish_reason],
    }
    return attributes | {name: value for name, value in given.items() if value}


def _usage(usage: Usage) -> Attributes:
    if usage == NOTHING:
        return {}
    return {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
    }
