"""The upstreams of the settings, the embedded model and the classifier among them."""

import os
from collections.abc import Mapping
from pathlib import Path

from batchline.app.startup import StartupError
from batchline.domain.models import CLASSIFIER_UPSTREAM, DEFAULT_UPSTREAM
from batchline.pipeline.fit import Fitting
from batchline.settings import Settings, UpstreamSettings
from batchline.system import SystemClock, SystemRandom, ThreadPool
from batchline.upstream.classifier import VOCABULARY, ClassifierUpstream, check_classifier
from batchline.upstream.embedded import EmbeddedUpstream
from batchline.upstream.http import HttpUpstream
from batchline.upstream.model_process import check_engine
from batchline.upstream.tokens import UpstreamTokens
from batchline.upstream.weights import (
    SMOLLM2,
    ModelUnavailable,
    Progress,
    Wheel,
    cache_folder,
    fetch_weights,
    find_weights,
)

Site = HttpUpstream | EmbeddedUpstream | ClassifierUpstream


async def open_sites(settings: Settings, progress: Progress) -> dict[str, Site]:
    """Every upstream by name. ``progress`` hears of the embedded model's download, the first time."""
    sites: dict[str, Site] = {name: _site(name, site, settings) for name, site in settings.sites.items()}
    try:
        if settings.embeds_model:
            sites[DEFAULT_UPSTREAM] = await _embedded_model(settings, progress)
        if settings.classifies:
            sites[CLASSIFIER_UPSTREAM] = await _classifier(progress)
    except ModelUnavailable as error:
        raise StartupError(str(error)) from error
    return sites


def _site(name: str, site: UpstreamSettings, settings: Settings) -> HttpUpstream:
    try:
        return HttpUpstream(
            site.url,
            api_key=site.api_key.get_secret_value() if site.api_key else None,
            headers={name: value.get_secret_value() for name, value in site.headers.items()},
            connect_timeout=settings.connect_timeout_seconds,
            request_timeout=settings.request_timeout_seconds,
            max_answer_bytes=settings.max_answer_bytes,
            clock=SystemClock(),
        )
    except ValueError as error:
        where = "BATCHLINE_UPSTREAM_URL" if name == DEFAULT_UPSTREAM else f"upstreams.{name}"
        raise StartupError(f"{where} cannot be used: {error}") from error


async def _embedded_model(settings: Settings, progress: Progress) -> EmbeddedUpstream:
    """The model itself starts when it is first asked; that it can is found out now."""
    clock = SystemClock()
    await check_engine()
    return EmbeddedUpstream(
        weights=await _weights(SMOLLM2, progress),
        slots=settings.embedded_slots,
        connect_timeout=settings.connect_timeout_seconds,
        request_timeout=settings.request_timeout_seconds,
        max_answer_bytes=settings.max_answer_bytes,
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
    cache = cache_folder()
    return find_weights(wheel, cache=cache) or await fetch_weights(
        wheel, cache=cache, clock=SystemClock(), progress=progress
    )


def fitting_of(sites: Mapping[str, Site]) -> Fitting:
    clock = SystemClock()
    return Fitting(tokens={name: UpstreamTokens(site, clock=clock) for name, site in sites.items()})
