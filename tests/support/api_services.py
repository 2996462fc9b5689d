"""Builds the services of the API from the parts that a test provides."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from batchline.api.services import ApiServices
from batchline.domain.fleet import Report
from batchline.domain.held_bytes import HeldBytes
from batchline.engine import ApiRole, Context
from batchline.pipeline.budget import Budgets
from batchline.pipeline.damage import DamageLog
from batchline.pipeline.routing import SyncRouter
from batchline.pipeline.token_limit import TokenLimit
from batchline.ports import Clock, Objects, Store, SyncUpstream, Validator, WatchedClock
from batchline.settings import Settings
from batchline.system import SystemRandom
from batchline.telemetry.metrics import Metrics
from batchline.upstream.http import HttpUpstream
from batchline.upstream.tokens import UpstreamTokens
from tests.support.identities import identity_of
from tests.support.webhook_receivers import MemorySender


def open_upstreams(settings: Settings, clock: Clock) -> dict[str, HttpUpstream]:
    return {
        name: HttpUpstream(
            upstream.url,
            api_key=None,
            connect_timeout=settings.connect_timeout_seconds,
            request_timeout=settings.request_timeout_seconds,
            max_answer_bytes=settings.max_answer_bytes,
            clock=clock,
        )
        for name, upstream in settings.all_upstreams.items()
    }


class _NoWorkers:
    """Reports that no worker runs beside the API."""

    async def reports(self) -> list[Report]:
        return []


def compose(
    settings: Settings,
    *,
    store: Store,
    objects: Objects,
    validator: Validator,
    upstreams: Mapping[str, SyncUpstream],
    clock: WatchedClock,
    on_key_used: Callable[[str], None],
) -> ApiServices:
    metrics = Metrics()
    context = Context(
        settings=settings,
        store=store,
        objects=objects,
        identity=identity_of(store, objects),
        upstreams=upstreams,
        held_bytes=HeldBytes(settings.max_held_bytes),
        budgets=Budgets(metered=settings.metering),
        token_limit=TokenLimit(
            tokens={name: UpstreamTokens(upstream, clock=clock) for name, upstream in upstreams.items()}
        ),
        router=SyncRouter(clock=clock),
        clock=clock,
        random=SystemRandom(),
        metrics=metrics,
        damage_log=DamageLog(metrics),
        owner="test",
        event_sender=MemorySender(),
    )
    role = ApiRole(context, validator=validator, workers=_NoWorkers())
    return replace(role.services, on_key_used=on_key_used)
