"""The API's services, put together on whatever parts a test gives them."""

from collections.abc import Callable, Mapping

from batchline.api.server import Services
from batchline.domain.fleet import Report
from batchline.pipeline.cancel import Cancellation
from batchline.pipeline.download import Download
from batchline.pipeline.enqueue import Creation
from batchline.pipeline.fit import Fitting
from batchline.pipeline.inference import Inference
from batchline.pipeline.progress import Inspection
from batchline.pipeline.traffic import Traffic
from batchline.pipeline.upload import Upload
from batchline.ports import Clock, LiveUpstream, Objects, Store, Validator
from batchline.settings import Settings
from batchline.system import SystemRandom
from batchline.telemetry.metrics import Metrics
from batchline.upstream.http import HttpUpstream
from batchline.upstream.tokens import UpstreamTokens


def open_sites(settings: Settings, clock: Clock) -> dict[str, HttpUpstream]:
    return {
        name: HttpUpstream(
            site.url,
            api_key=None,
            connect_timeout=settings.connect_timeout_seconds,
            request_timeout=settings.request_timeout_seconds,
            max_answer_bytes=settings.max_answer_bytes,
            clock=clock,
        )
        for name, site in settings.sites.items()
    }


class _Nobody:
    """No worker runs beside this API."""

    async def reports(self) -> list[Report]:
        return []


def compose(
    settings: Settings,
    *,
    store: Store,
    objects: Objects,
    validator: Validator,
    sites: Mapping[str, LiveUpstream],
    clock: Clock,
    used: Callable[[str], None],
) -> Services:
    random, catalog = SystemRandom(), settings.catalog
    return Services(
        settings=settings,
        store=store,
        objects=objects,
        upload=Upload(
            files=store,
            objects=objects,
            clock=clock,
            random=random,
            owner="test",
            lease_seconds=settings.lease_seconds,
            retention_seconds=settings.file_retention_seconds,
            max_bytes=settings.max_file_bytes,
        ),
        download=Download(files=store, objects=objects, clock=clock),
        creation=Creation(
            store=store,
            objects=objects,
            validator=validator,
            clock=clock,
            random=random,
            owner="test",
            lease_seconds=settings.lease_seconds,
            window_seconds=settings.completion_window_seconds,
            limits=settings.input_limits,
            started=lambda: None,
        ),
        cancellation=Cancellation(batches=store, clock=clock, stopped=lambda _batch, _stop: None),
        inspection=Inspection(batches=store, workers=_Nobody(), catalog=catalog, clock=clock),
        inference=Inference(
            sites=sites,
            catalog=catalog,
            fitting=Fitting(tokens={name: UpstreamTokens(site, clock=clock) for name, site in sites.items()}),
            ledger=store,
            tariff=settings.tariff,
            traffic=Traffic(clock=clock),
            clock=clock,
        ),
        sites=sites,
        catalog=catalog,
        used=used,
        metrics=Metrics(),
        clock=clock,
        random=random,
    )
