"""Builds the application from its routes and middleware, and serves it with uvicorn."""

import asyncio
import math
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product

import uvicorn
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from batchline.api.auth import Auth
from batchline.api.batches import BatchRoutes
from batchline.api.check import CheckRoutes
from batchline.api.cors import Cors
from batchline.api.files import FileRoutes
from batchline.api.form_upload import MULTIPART_OVERHEAD_BYTES
from batchline.api.health import HealthRoutes
from batchline.api.inference import InferenceRoutes
from batchline.api.lists import Lists
from batchline.api.methods import Methods
from batchline.api.middleware import Middleware
from batchline.api.models import ModelRoutes, UpstreamModels
from batchline.api.openapi.routes import DescriptionRoutes
from batchline.api.protocol import ConnectionLimits, connection_class
from batchline.api.read_rate import ReadLimitedAuth, ReadRate
from batchline.api.results import ResultRoutes
from batchline.api.services import ApiServices
from batchline.api.throttle import BodyBytes, Throttle
from batchline.api.usage import UsageRoutes
from batchline.domain.errors import NotFound
from batchline.domain.models import DEFAULT_UPSTREAM
from batchline.pipeline.identity import IdentityCheck
from batchline.pipeline.inference import PATHS
from batchline.ports import Clock, Objects, Random, Store, WatchedClock
from batchline.settings import Settings
from batchline.telemetry.metrics import Metrics

_KEEP_ALIVE_SECONDS = 75
_MIN_BACKLOG, _MAX_BACKLOG = 16, 1024
"""Connections that the system holds until they are accepted."""
_EXPECTED_STATUSES = ("200", "500")
"""The statuses for which the metrics of every route have a time series before the first request."""


def build(services: ApiServices, *, console: Sequence[Route] = ()) -> ASGIApp:
    """Return the application with every route of the API, and with those of the console."""
    return _with_middleware(
        [*_routes(services), *console],
        settings=services.settings,
        metrics=services.metrics,
        clock=services.clock,
        random=services.random,
    )


def build_health(
    *,
    settings: Settings,
    store: Store,
    objects: Objects,
    identity: IdentityCheck,
    metrics: Metrics,
    clock: WatchedClock,
    random: Random,
) -> ASGIApp:
    """Return the application of a process that only answers health checks and metrics."""
    routes = _health_routes(
        settings=settings,
        store=store,
        objects=objects,
        identity=identity,
        metrics=metrics,
        clock=clock,
        needs_storage=True,
    )
    return _with_middleware(routes, settings=settings, metrics=metrics, clock=clock, random=random)


def _with_middleware(
    routes: Sequence[Route], *, settings: Settings, metrics: Metrics, clock: Clock, random: Random
) -> ASGIApp:
    names: dict[object, str] = {}
    for route in routes:
        # The pattern ends with $, which also matches before a last line feed.
        route.path_regex = re.compile(route.path_regex.pattern.removesuffix("$") + r"\Z")
        if isinstance(route.endpoint, Methods) and not _has_empty_id(route.path):
            names[route.endpoint] = route.path
            for method, status in product(route.endpoint.methods, _EXPECTED_STATUSES):
                metrics.http_request_seconds.prepare(route.path, method, status)
    return Middleware(
        Router(routes, redirect_slashes=False, default=_no_route),
        cors=Cors(origins=settings.cors_origins),
        clock=clock,
        random=random,
        metrics=metrics,
        stall_seconds=settings.body_timeout_seconds,
        drain_bytes=2 * (settings.max_file_bytes + MULTIPART_OVERHEAD_BYTES),
        route_names=names,
    )


def _has_empty_id(path: str) -> bool:
    """Return whether a path is the variant of another one for a request without an id, which is answered with 400."""
    return path.endswith("/") or "//" in path


class Server:
    """Runs uvicorn on a bound socket in the running loop; the caller handles signals."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: Settings,
        metrics: Metrics,
        random: Random,
        sock: socket.socket,
        max_connections: float,
    ) -> None:
        limits = ConnectionLimits(
            header_seconds=settings.header_timeout_seconds,
            write_seconds=settings.write_timeout_seconds,
            connections=max_connections,
        )
        config = uvicorn.Config(
            app,
            loop="none",
            http=connection_class(limits=limits, metrics=metrics, random=random),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=backlog_for(max_connections),
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=math.ceil(settings.shutdown_grace_seconds),
        )
        self._uvicorn = _Uvicorn(config)
        self._sock = sock

    async def serve(self) -> None:
        """Serve until ``stop``; requests in flight then have ``shutdown_grace_seconds`` to end."""
        await self._uvicorn.serve(sockets=[self._sock])
        # uvicorn cancels requests that outlast the grace without waiting for them; a cancelled upload must clean up.
        if left := set(self._uvicorn.server_state.tasks):
            await asyncio.wait(left)

    def stop(self) -> None:
        """Accept no more connections, and end ``serve`` once the requests in flight have ended."""
        self._uvicorn.should_exit = True


def backlog_for(max_connections: float) -> int:
    """Return how many connections may wait to be accepted.

    All that wait are accepted at once, before those that are turned away or give way are closed. With more than half of
    the limit, these could take the last descriptors of the process.
    """
    return int(max(_MIN_BACKLOG, min(_MAX_BACKLOG, max_connections / 2)))


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _no_route(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotFound(f"Unknown route: {scope['method']} {scope['path']}")


def _routes(services: ApiServices) -> list[Route]:
    settings = services.settings
    auth = ReadLimitedAuth(
        reads=ReadRate(settings.max_key_reads_per_second, clock=services.clock),
        accounts=services.store,
        bearer=settings.bearer,
        metered=settings.metering,
        on_key_used=services.on_key_used,
    )
    throttle = Throttle(settings.max_project_requests, of="uploads and creates", bound="project_requests")
    lists = Lists(limit=settings.max_project_requests)
    return [
        *_file_routes(services, auth, throttle, lists),
        *_batch_routes(services, auth, throttle, lists),
        *_usage_routes(services, auth, lists),
        *_inference_routes(services, auth),
        *_model_routes(services, auth, lists),
        *_health_routes(
            settings=settings,
            store=services.store,
            objects=services.objects,
            identity=services.identity,
            metrics=services.metrics,
            clock=services.clock,
            needs_storage=False,
        ),
        *_description_routes(services),
    ]


def _file_routes(services: ApiServices, auth: Auth, throttle: Throttle, lists: Lists) -> list[Route]:
    files = FileRoutes(services, auth=auth, throttle=throttle, lists=lists)
    all_files = Methods(GET=files.list, POST=files.create)
    one_file = Methods(GET=files.retrieve, DELETE=files.delete)
    content = Methods(GET=files.content)
    return [
        Route("/v1/files", all_files),
        Route("/v1/files/", one_file),
        Route("/v1/files/{file_id}", one_file),
        Route("/v1/files//content", content),
        Route("/v1/files/{file_id}/content", content),
    ]


def _batch_routes(services: ApiServices, auth: Auth, throttle: Throttle, lists: Lists) -> list[Route]:
    batches = BatchRoutes(
        auth=auth,
        throttle=throttle,
        creator=services.creator,
        rerun=services.rerun,
        cancellation=services.cancellation,
        hold_release=services.hold_release,
        progress_reader=services.progress_reader,
        batches=services.store,
        storage_quota=services.storage_quota,
        lists=lists,
    )
    check = CheckRoutes(auth=auth, throttle=throttle, input_check=services.input_check)
    all_batches = Methods(GET=batches.list, POST=batches.create)
    one_batch = Methods(GET=batches.retrieve)
    progress = Methods(GET=batches.progress)
    cancel = Methods(POST=batches.cancel)
    rerun = Methods(POST=batches.rerun)
    of_results = ResultRoutes(
        auth=auth,
        throttle=Throttle(services.settings.max_project_requests, of="reads of results", bound="project_result_reads"),
        reader=services.results,
        merger=services.merger,
        clock=services.clock,
    )
    results = Methods(GET=of_results.results)
    merged = Methods(GET=of_results.merged)
    release = Methods(POST=batches.release)
    return [
        Route("/v1/batches", all_batches),
        Route("/v1/batches/check", Methods(POST=check.check)),
        Route("/v1/batches/", one_batch),
        Route("/v1/batches/{batch_id}", one_batch),
        Route("/v1/batches//progress", progress),
        Route("/v1/batches/{batch_id}/progress", progress),
        Route("/v1/batches//cancel", cancel),
        Route("/v1/batches/{batch_id}/cancel", cancel),
        Route("/v1/batches//rerun", rerun),
        Route("/v1/batches/{batch_id}/rerun", rerun),
        Route("/v1/batches//results", results),
        Route("/v1/batches/{batch_id}/results", results),
        Route("/v1/batches//merged", merged),
        Route("/v1/batches/{batch_id}/merged", merged),
        Route("/v1/batches//release", release),
        Route("/v1/batches/{batch_id}/release", release),
    ]


def _usage_routes(services: ApiServices, auth: Auth, lists: Lists) -> list[Route]:
    usage = UsageRoutes(
        auth=auth, lists=lists, ledger=services.store, clock=services.clock, metered=services.settings.metering
    )
    return [Route("/v1/usage", Methods(GET=usage.retrieve))]


def _inference_routes(services: ApiServices, auth: Auth) -> list[Route]:
    settings = services.settings
    inference = InferenceRoutes(
        auth=auth,
        throttle=Throttle(settings.max_project_calls, of="synchronous calls", bound="project_calls"),
        body_bytes=BodyBytes(limit=settings.max_call_bytes, project_limit=settings.max_project_call_bytes),
        inference=services.inference,
        max_request_bytes=settings.max_request_bytes,
    )
    paths = dict.fromkeys((*PATHS, *settings.batch_endpoints))
    return [Route(path, Methods(POST=partial(inference.call, path))) for path in paths]


def _model_routes(services: ApiServices, auth: Auth, lists: Lists) -> list[Route]:
    models = ModelRoutes(
        auth=auth,
        lists=lists,
        catalog=services.settings.catalog,
        upstream_models=UpstreamModels(services.upstreams.get(DEFAULT_UPSTREAM), clock=services.clock),
    )
    return [
        Route("/v1/models", Methods(GET=models.list)),
        Route("/v1/models/{model:path}", Methods(GET=models.retrieve)),
    ]


def _health_routes(
    *,
    settings: Settings,
    store: Store,
    objects: Objects,
    identity: IdentityCheck,
    metrics: Metrics,
    clock: WatchedClock,
    needs_storage: bool,
) -> list[Route]:
    token = settings.admin_token
    health = HealthRoutes(
        store=store,
        objects=objects,
        identity=identity,
        metrics=metrics,
        clock=clock,
        admin_token=token.get_secret_value() if token else None,
        needs_storage=needs_storage,
    )
    return [
        Route("/healthz", Methods(GET=health.healthz)),
        Route("/readyz", Methods(GET=health.readyz)),
        Route("/metrics", Methods(GET=health.metrics)),
    ]


def _description_routes(services: ApiServices) -> list[Route]:
    settings = services.settings
    description = DescriptionRoutes(
        bearer=settings.bearer, endpoints=settings.batch_endpoints, model=settings.example_model
    )
    return [
        Route("/openapi.json", Methods(GET=description.openapi)),
        Route("/docs", Methods(GET=description.docs)),
        Route("/docs/{asset}", Methods(GET=description.docs_asset)),
    ]
