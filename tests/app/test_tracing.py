"""The setting that turns traces on: a real service sends the trace of a batch to a real OTLP receiver."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from batchline.app.startup import StartupError
from batchline.app.tracing import open_tracer
from batchline.settings import Settings
from tests.support.clocks import SettableClock
from tests.support.service import Service, await_end, chat_lines, running_mock, submit

LINES = 20


class Receiver:
    """Receives traces over HTTP, as a collector does."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        received = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    received.extend(span for scope in resource.scope_spans for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Write nothing to the output of the tests."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


@pytest.mark.rule("F5", "A service sends a span for each batch, and one for each traced line, to an OTLP receiver.")
def test_a_service_sends_the_trace_of_a_batch_to_an_otlp_receiver(tmp_path: Path) -> None:
    receiver = Receiver()
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "NO_PROXY": "127.0.0.1"}
    with receiver.running(), running_mock() as mock:
        settings: dict[str, object] = {"upstream_url": mock.url, "traces": "on", "trace_line_share": 1}
        service = Service(tmp_path / "data", ("-m", "batchline", "serve"), settings, environment=environment)
        try:
            service.start()
            service.await_ready()
            batch = await_end(
                service.client(), submit(service.client(), chat_lines(f"hello {n}" for n in range(LINES))).id
            )
            assert service.terminate() == 0
        finally:
            service.end()
    (root,) = [span for span in receiver.spans if span.name == "batch"]
    lines = [span for span in receiver.spans if span.name == "chat m"]
    assert len(lines) == LINES
    assert {(line.trace_id, line.parent_span_id) for line in lines} == {(root.trace_id, root.span_id)}
    attributes = {each.key: each.value for each in root.attributes}
    assert attributes["batchline.batch.id"].string_value == batch.id
    assert attributes["batchline.batch.completed"].int_value == LINES
    assert "hello" not in str(receiver.spans)


def test_without_the_setting_there_is_no_tracer_and_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "batchline.telemetry.traces", raising=False)
    with open_tracer(Settings(), clock=SettableClock(), owner="p") as tracer:
        assert tracer is None
    assert "batchline.telemetry.traces" not in sys.modules


def test_without_the_packages_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "batchline.telemetry.traces", None)
    settings = Settings(traces=True)
    with (
        pytest.raises(StartupError, match=r"pip install 'batchline\[otel\]'"),
        open_tracer(settings, clock=SettableClock(), owner="p"),
    ):
        pass
