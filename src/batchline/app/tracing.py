"""Opens the tracer if the settings turn traces on. Without that, nothing of OpenTelemetry is imported."""

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from batchline.app.startup import StartupError
from batchline.ports import Clock, Tracer
from batchline.settings import Settings


@contextmanager
def open_tracer(settings: Settings, *, clock: Clock, owner: str) -> Iterator[Tracer | None]:
    """Provide the tracer, or None if traces are off. At the end, send what was not sent yet. Raise StartupError."""
    if not settings.traces:
        yield None
        return
    try:
        from batchline.telemetry.traces import Traces, otlp_exporter  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise StartupError("Traces need more packages: pip install 'batchline[otel]'; or set --traces off.") from error
    tracer = Traces(
        otlp_exporter(),
        clock=clock,
        owner=owner,
        line_share=settings.trace_line_share,
        servers={name: _server(upstream.url) for name, upstream in settings.all_upstreams.items()},
    )
    try:
        yield tracer
    finally:
        tracer.close()


def _server(url: str) -> tuple[str, int]:
    """Return the host and the port of a URL."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
