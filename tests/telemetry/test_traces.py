"""Traces of batches: which lines are sampled, what their spans say, and that no text of a request is in them."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from batchline.domain.records import Batch
from batchline.domain.replies import Answer
from batchline.domain.states import BatchStatus
from batchline.pipeline.job import Job
from batchline.telemetry.traces import Traces, context_of
from tests.simulation.virtual import EPOCH
from tests.support.clocks import SettableClock
from tests.support.dispatchers import DispatcherHarness
from tests.support.jobs import FAR_FUTURE, make_jobs
from tests.support.records import make_batch

_SECRET = "the words of the prompt"
_ANSWER = Answer(
    status=200,
    body=b'{"id":"chatcmpl-1","model":"m-2026","choices":[{"finish_reason":"stop","message":{"content":"the answer"}}],'
    b'"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}',
)
_FAILED = Answer(status=500, body=b"")
_REFUSED = Answer(status=400, body=b'{"error":{"message":"the words of the prompt are too long"}}')


class Scene(DispatcherHarness):
    """A dispatcher whose lines are traced."""

    def __init__(self, *, line_share: float = 0.0) -> None:
        super().__init__()
        self.exporter = InMemorySpanExporter()
        self.traces = Traces(
            self.exporter,
            clock=self.clock,
            owner="process-1",
            line_share=line_share,
            servers={"default": ("models.example.com", 8001)},
        )
        self.dispatcher._tracer = self.traces

    def spans(self) -> tuple[ReadableSpan, ...]:
        self.traces.close()
        return self.exporter.get_finished_spans()


@pytest.fixture
def scene() -> Iterator[Scene]:
    with closing(Scene()) as scene:
        yield scene


def _job(*, endpoint: str = "/v1/chat/completions") -> Job:
    (job,) = make_jobs(1, expires_at=FAR_FUTURE)
    job.batch.endpoint = endpoint
    job.body = (
        b'{"model":"m","max_tokens":9,"temperature":0.5,"messages":[{"role":"user","content":"%b"}]}' % _SECRET.encode()
    )
    return job


def test_the_span_of_a_line_has_the_names_of_the_conventions(scene: Scene) -> None:
    job = _job()
    scene.add([job])
    scene.advance(2.0)
    scene.reply(_ANSWER)
    (span,) = scene.spans()
    assert (span.name, span.kind) == ("chat m", SpanKind.CLIENT)
    assert span.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "m-2026",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "server.address": "models.example.com",
        "server.port": 8001,
        "batchline.attempts": 1,
        "batchline.batch.id": job.batch.id,
        "batchline.line.id": f"batch_req_{job.batch.id.removeprefix('batch_')}_0",
        "batchline.upstream": "default",
    }
    assert span.start_time == int(EPOCH * 1e9)
    assert span.end_time is not None
    assert span.end_time - span.start_time == 2_000_000_000
    assert span.status.status_code is StatusCode.UNSET


def test_a_span_covers_all_attempts_of_its_line_and_names_those_that_failed(scene: Scene) -> None:
    scene.add([_job()])
    scene.advance(1.0)
    scene.reply(_FAILED)
    scene.advance(600.0)
    scene.reply(_ANSWER)
    (span,) = scene.spans()
    assert span.attributes is not None
    assert span.attributes["batchline.attempts"] == 2
    assert [(event.name, event.attributes) for event in span.events] == [
        ("batchline.attempt_failed", {"error.type": "http_500", "batchline.upstream": "default", "seconds": 1.0})
    ]
    assert span.start_time == int(EPOCH * 1e9)
    assert span.end_time is not None
    assert span.end_time - span.start_time > 600_000_000_000


@pytest.mark.rule("F5", "No span has text of a request or an answer.")
def test_a_line_that_failed_has_its_code_and_no_text(scene: Scene) -> None:
    """The text of an upstream may repeat the prompt."""
    scene.add([_job()])
    scene.reply(_REFUSED)
    (span,) = scene.spans()
    assert span.attributes is not None
    assert span.attributes["error.type"] == "invalid_request_error"
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "invalid_request_error")
    assert _SECRET not in span.to_json()


def test_a_line_that_was_never_sent_has_no_span(scene: Scene) -> None:
    job = _job()
    job.batch.key_revoked = True
    scene.add([job])
    assert scene.recorder.errors
    assert scene.spans() == ()


def test_the_first_line_and_a_share_of_the_others_are_sampled_and_always_the_same() -> None:
    def sampled(share: float) -> list[int]:
        traces = _traces(InMemorySpanExporter(), share=share)
        found = [index for index in range(10_000) if traces.sample("batch_1", index, endpoint="/v1") is not None]
        traces.close()
        return found

    assert sampled(0.0) == [0]
    assert len(sampled(1.0)) == 10_000
    assert sampled(0.01) == sampled(0.01)
    assert 50 < len(sampled(0.01)) < 200


@pytest.mark.rule("F5", "All processes add to the same trace of a batch.")
def test_the_lines_of_a_batch_are_in_its_trace_whoever_ran_them() -> None:
    """The process that finalizes a batch knows nothing of those that ran its lines."""
    with closing(Scene()) as scene:
        job = _job()
        scene.add([job])
        scene.reply(_ANSWER)
        (line,) = scene.spans()
    exporter, clock = InMemorySpanExporter(), SettableClock(now=1_800_000_100.5)
    other = _traces(exporter, clock=clock)
    other.on_batch_ended(_batch(job.batch.id), BatchStatus.COMPLETED, completed=1, failed=0)
    other.on_batch_ended(_batch("batch_other"), BatchStatus.COMPLETED, completed=1, failed=0)
    other.close()
    batch, another = exporter.get_finished_spans()
    assert batch.name == "batch"
    assert batch.parent is None
    assert batch.context is not None
    assert line.parent is not None
    assert (line.parent.trace_id, line.parent.span_id) == (batch.context.trace_id, batch.context.span_id)
    assert batch.context.trace_id == context_of(job.batch.id).trace_id
    assert another.context is not None
    assert another.context.trace_id != batch.context.trace_id
    assert (batch.start_time, batch.end_time) == (1_800_000_000_000_000_000, 1_800_000_100_500_000_000)
    assert batch.attributes is not None
    expected: dict[str, Any] = {
        "batchline.batch.id": job.batch.id,
        "batchline.batch.status": "completed",
        "batchline.batch.completed": 1,
        "batchline.batch.failed": 0,
        "gen_ai.usage.input_tokens": 70,
    }
    assert expected.items() <= dict(batch.attributes).items()


def test_names_of_the_operator_go_before_those_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "batches")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=production")
    exporter = InMemorySpanExporter()
    traces = _traces(exporter)
    traces.on_batch_ended(_batch("batch_1"), BatchStatus.EXPIRED, completed=0, failed=1)
    traces.close()
    (span,) = exporter.get_finished_spans()
    assert span.resource.attributes["service.name"] == "batches"
    assert span.resource.attributes["service.instance.id"] == "process-1"
    assert span.resource.attributes["deployment.environment.name"] == "production"


def _traces(exporter: InMemorySpanExporter, *, share: float = 0.0, clock: SettableClock | None = None) -> Traces:
    return Traces(exporter, clock=clock or SettableClock(), owner="process-1", line_share=share, servers={})


def _batch(batch_id: str) -> Batch:
    return make_batch(
        id=batch_id,
        status=BatchStatus.FINALIZING,
        created_at=1_800_000_000,
        expires_at=1_800_086_400,
        input_tokens=70,
        output_tokens=30,
    )
