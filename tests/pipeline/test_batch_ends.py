"""Batches that end before a line runs are logged, counted and traced like all others (F5)."""

import asyncio
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from batchline.domain.states import BatchStatus
from batchline.pipeline.batch_ends import BatchEnds
from batchline.pipeline.create import CreateAnswer, CreateRequest
from batchline.telemetry.metrics import Metrics
from batchline.telemetry.traces import Traces
from tests.support.clocks import SettableClock
from tests.support.engine_harness import CHAT, Bench
from tests.support.records import make_batch

_SECRET = "the words of the prompt"


async def _create(bench: Bench, *lines: bytes) -> CreateAnswer:
    owner, services = await bench.owner("alpha"), bench.engine.api_role.services
    async with services.upload.begin(owner.project_id) as incoming:
        await incoming.write(b"\n".join(lines))
        file = await incoming.finish(filename=None, expires_after=None)
    request = CreateRequest(input_file_id=file.id, endpoint=CHAT, metadata=b"{}")
    return await services.creator.create(owner, request, idempotency_key=None, retried=False, admit=lambda: None)


def _ended(bench: Bench) -> dict[str, float]:
    """Return the number of batches that ended by status, without the statuses of none."""
    families = text_string_to_metric_families(bench.metrics.render().decode())
    samples = next(family.samples for family in families if family.name == "batchline_batches")
    return {sample.labels["status"]: sample.value for sample in samples if sample.value}


def _records(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.message.startswith(message)]


@pytest.mark.rule("F5", "A batch whose input is invalid is logged without its text, and counted.")
def test_a_batch_with_an_invalid_input_is_logged_without_its_text_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> CreateAnswer:
            return await _create(bench, b'{"custom_id":"a"}', f'{{"custom_id":"{_SECRET}"}}'.encode())

        answer = bench.play(scene())
        assert (answer.status, _ended(bench)) == (400, {"failed": 1})
    [record] = _records(caplog, "input file is invalid, batch failed")
    assert (record["batch"], record["faults"], record["line"]) == (answer.batch_id, 2, 1)
    assert _SECRET not in caplog.text + str(record)
    assert _records(caplog, "batch created") == []


def test_a_batch_that_is_cancelled_during_its_validation_is_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C10: its create is answered with the cancelled batch, so it was not created."""
    caplog.set_level(logging.INFO)
    with closing(Bench(tmp_path)) as bench:

        async def cancel(batch_id: str, **_: Any) -> None:
            owner = await bench.owner("alpha")
            for _again in range(2):
                await bench.engine.api_role.services.cancellation.cancel(owner.project_id, batch_id)

        async def scene() -> CreateAnswer:
            bench.store.trouble["start_batch"] = cancel
            line = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"m","messages":[]}}'
            return await _create(bench, line)

        answer = bench.play(scene())
        assert (answer.status, b'"cancelled"' in answer.body) == (200, True)
        assert _ended(bench) == {"cancelled": 1}
    assert [record["batch"] for record in _records(caplog, "batch cancelled during")] == [answer.batch_id]
    assert _records(caplog, "batch created") == []


def test_a_batch_whose_validation_was_interrupted_is_counted_by_the_process_that_fails_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C6: the process that validated it has died, and can count nothing."""
    with closing(Bench(tmp_path)) as bench:

        async def never_end(*_: Any, **__: Any) -> None:
            await asyncio.Event().wait()

        async def begin() -> None:
            bench.store.trouble["start_batch"] = never_end
            line = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"m","messages":[]}}'
            bench.loop.create_task(_create(bench, line))
            await asyncio.sleep(1)

        bench.play(begin())
        bench.kill()
        bench.start()
        bench.play(asyncio.sleep(60))
        assert _ended(bench) == {"failed": 1}
    [record] = _records(caplog, "validation interrupted")
    assert record["batch"].startswith("batch_")


def test_every_batch_that_ends_gets_its_span() -> None:
    exporter, clock, metrics = InMemorySpanExporter(), SettableClock(), Metrics()
    traces = Traces(exporter, clock=clock, owner="process-1", line_share=0.0, servers={})
    BatchEnds(metrics=metrics, tracer=traces).on_batch_ended(make_batch(id="batch_1"), BatchStatus.FAILED)
    BatchEnds(metrics=metrics, tracer=None).on_batch_ended(make_batch(id="batch_2"), BatchStatus.FAILED)
    traces.close()
    [span] = exporter.get_finished_spans()
    assert span.attributes is not None
    assert (span.attributes["batchline.batch.id"], span.attributes["batchline.batch.status"]) == ("batch_1", "failed")
