"""Runs a process in its role: everything in one process, or on many machines an API node or a worker."""

import asyncio
import gc
import logging
import math
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import uvloop
from msgspec.json import encode as encode_json
from starlette.types import ASGIApp

from batchline import __version__
from batchline.api.server import Server, build, build_health
from batchline.app.backends import identity_check, migrate_own_store, open_both
from batchline.app.startup import (
    StartupError,
    connection_limit,
    listening_socket,
    make_folder,
    own_folder,
    raise_descriptor_limit,
    return_freed_memory,
    stop_on_signals,
    url_of,
    write_lock,
)
from batchline.app.tracing import open_tracer
from batchline.app.upstreams import AnyUpstream, engine_queues_for, open_upstreams, token_limit_for
from batchline.app.workers.autoscaler import Autoscaler
from batchline.app.workers.pool import MemoryFleet, WorkerPool, max_worker_processes
from batchline.console.routes import console_routes
from batchline.console.sessions import OneTimeLinks
from batchline.domain.held_bytes import HeldBytes
from batchline.domain.money import nano
from batchline.engine import ApiRole, Context, Engine, Intervals, WorkerRole, clock_task
from batchline.loops.heartbeat import SyncCallHeartbeat
from batchline.pipeline.budget import Budgets
from batchline.pipeline.damage import DamageLog
from batchline.pipeline.routing import SyncRouter
from batchline.pipeline.validation_pool import ValidationPool
from batchline.ports import Objects, Store, Tracer, WatchedClock
from batchline.service_description import describe
from batchline.settings import Settings
from batchline.system import SystemRandom
from batchline.telemetry.metrics import Metrics
from batchline.upstream.embedded.download import Progress
from batchline.webhooks.sender import HttpSender

log = logging.getLogger(__name__)
_FLEET_PROCESSES = 16
"""The number of processes on PostgreSQL among which a balance is divided. If more run, they may overdraw it by more; if
fewer run, an organization whose balance is low has fewer requests in flight than it could pay for."""
_SWITCH_SECONDS = 0.0005
_COLLECTION_THRESHOLDS = 10_000, 2, 2
"""The garbage collector looks at new objects when there are 10,000 of them. About as many belong to the lines in flight
and end with them. By default it looks at 700, which took 4 % of the CPU time of a line. With the other two numbers it
looks at all objects about as often as by default."""
_PRIVATE_UMASK = 0o077
"""Only the owner may read the files that a service writes, also in a data folder that others may enter."""


@dataclass(frozen=True, kw_only=True)
class ProcessContext(Context):
    """The context of a process that listens on a socket and validates input files."""

    sock: socket.socket
    validator: ValidationPool


def new_context(
    settings: Settings,
    *,
    store: Store,
    objects: Objects,
    upstreams: Mapping[str, AnyUpstream],
    held_bytes: HeldBytes,
    metrics: Metrics,
    owner: str,
    clock: WatchedClock,
    tracer: Tracer | None = None,
) -> Context:
    metrics.prepare_upstreams(settings.models_by_upstream)
    return Context(
        settings=settings,
        store=store,
        objects=objects,
        identity=identity_check(settings, store=store, objects=objects),
        upstreams=upstreams,
        held_bytes=held_bytes,
        budgets=Budgets(
            metered=settings.metering, processes=_spending_processes(settings), day_limits=settings.day_limits
        ),
        token_limit=token_limit_for(upstreams),
        engine_queues=engine_queues_for(settings),
        router=SyncRouter(clock=clock),
        clock=clock,
        random=SystemRandom(),
        metrics=metrics,
        damage_log=DamageLog(metrics),
        owner=owner,
        event_sender=HttpSender(allows_private=settings.webhook_private),
        tracer=tracer,
    )


def _spending_processes(settings: Settings) -> int:
    """Return the number of processes that may spend from the same balances."""
    return max_worker_processes(settings) if settings.database_url is None else _FLEET_PROCESSES


def run(role: Coroutine[Any, Any, None]) -> None:
    """Run a role until it ends by itself, or by SIGTERM or SIGINT."""
    os.umask(_PRIVATE_UMASK)
    # Threads that write and sync need the interpreter for moments. By default another thread may keep it for 5 ms,
    # while answers wait.
    sys.setswitchinterval(_SWITCH_SECONDS)
    return_freed_memory()
    gc.set_threshold(*_COLLECTION_THRESHOLDS)
    uvloop.run(role)


async def serve(
    settings: Settings,
    progress: Progress,
    *,
    intervals: Intervals = Intervals(),  # noqa: B008 - frozen
    autoscaler: Autoscaler | None = None,
    pool_check_seconds: float = 1.0,
) -> None:
    """Run the API and a worker in one process, on any backend. On SQLite, worker processes may run lines too."""
    make_folder(settings.data_dir)
    with own_folder(settings) as lock:
        await migrate_own_store(settings)
        async with _process_context(settings, progress, intervals) as context:
            fleet = MemoryFleet()
            await _start_metering(context)
            max_processes = max_worker_processes(settings)
            engine = Engine(
                context,
                validator=context.validator,
                shared=settings.database_url is not None,
                local_fleet=fleet if max_processes > 1 else None,
            )
            pool = WorkerPool(
                context,
                worker_role=engine.worker_role,
                fleet=fleet,
                autoscaler=autoscaler or Autoscaler(max_processes=max_processes),
                check_seconds=pool_check_seconds,
            )
            links = _links_for(context)
            server = _api_server(context, engine.api_role, links)

            def stop() -> None:
                server.stop()
                engine.stop()
                pool.stop()

            stop_on_signals(stop)
            if lock is not None:
                write_lock(lock, os.getpid(), url_of(context.sock), encode_json(describe(settings)).decode())
            context.validator.start()
            await _run_all("batchline", context, server.serve(), engine.run(), pool.run(), links=links)


async def api(settings: Settings, progress: Progress) -> None:
    """Run the API alone, beside any number of other API nodes and workers."""
    _require_shared(settings, role="api")
    async with _process_context(settings, progress) as context:
        await _start_metering(context)
        heartbeat = SyncCallHeartbeat(
            fleet=context.store, router=context.router, owner=context.owner, settings=settings
        )
        role = ApiRole(context, validator=context.validator, workers=context.store, sync_call_heartbeat=heartbeat)
        server = _api_server(context, role)
        stop_on_signals(server.stop)
        context.validator.start()
        await _serve_beside(server, context, role)


async def api_on_folder(settings: Settings, progress: Progress) -> None:
    """Run the API alone on a data folder that no other service uses, for a command that runs no line."""
    with own_folder(settings) as lock:
        async with _process_context(settings, progress) as context:
            workers = MemoryFleet() if settings.database_url is None else context.store
            role = ApiRole(context, validator=context.validator, workers=workers)
            server = _api_server(context, role)
            stop_on_signals(server.stop)
            if lock is not None:
                write_lock(lock, os.getpid(), url_of(context.sock), encode_json(describe(settings)).decode())
            await _serve_beside(server, context, role)


async def worker(settings: Settings, progress: Progress) -> None:
    """Run batches, beside any number of other workers, and serve only the health routes."""
    _require_shared(settings, role="worker")
    async with _process_context(settings, progress) as context:
        role = WorkerRole(context, validator=context.validator, shared=True)
        server = _health_server(context)
        stop_on_signals(role.stop)

        async def run_batches() -> None:
            await role.run()
            server.stop()

        await _run_all("batchline worker", context, run_batches(), server.serve())


async def _serve_beside(server: Server, context: ProcessContext, role: ApiRole) -> None:
    """Serve requests until the server stops, with the tasks of the API in the background."""
    async with asyncio.TaskGroup() as group:
        background = [group.create_task(role.run()), group.create_task(clock_task(context).run())]
        await _run_all("batchline api", context, server.serve())
        for task in background:
            task.cancel()


@asynccontextmanager
async def _process_context(
    settings: Settings,
    progress: Progress,
    intervals: Intervals = Intervals(),  # noqa: B008 - frozen
) -> AsyncIterator[ProcessContext]:
    with listening_socket(settings) as sock:
        held_bytes = HeldBytes(settings.max_held_bytes)
        async with (
            open_upstreams(settings, progress, held_bytes=held_bytes) as upstreams,
            open_both(settings) as (store, objects, clock),
        ):
            owner, metrics = SystemRandom().bytes(8).hex(), Metrics()
            metrics.watch(disk_free_bytes=partial(_free_bytes, settings.data_dir))
            with (
                open_tracer(settings, clock=clock, owner=owner) as tracer,
                closing(ValidationPool()) as validator,
            ):
                context = new_context(
                    settings,
                    store=store,
                    objects=objects,
                    upstreams=upstreams,
                    held_bytes=held_bytes,
                    metrics=metrics,
                    owner=owner,
                    clock=clock,
                    tracer=tracer,
                )
                own = {"intervals": intervals, "sock": sock, "validator": validator}
                yield ProcessContext(**vars(context) | own)


def _free_bytes(folder: Path) -> float:
    """Return the free space on the disk of a folder, or infinity if a process that needs no folder has none."""
    return shutil.disk_usage(folder).free if folder.exists() else math.inf


def _links_for(context: ProcessContext) -> OneTimeLinks | None:
    """Return the maker of the link that signs in without a key, or None if no link is printed.

    It is printed only on a terminal, for the person who starts the service, and works only on this machine.
    """
    is_local = ip_address(context.sock.getsockname()[0]).is_loopback
    return OneTimeLinks(random=context.random, clock=context.clock) if is_local and sys.stderr.isatty() else None


async def _run_all(
    name: str, context: ProcessContext, *parts: Coroutine[Any, Any, None], links: OneTimeLinks | None = None
) -> None:
    _announce(name, context, links)
    # The objects that exist now stay until the end, so the garbage collector need not look at them.
    gc.freeze()
    async with asyncio.TaskGroup() as group:
        for part in parts:
            group.create_task(part)


def _announce(name: str, context: ProcessContext, links: OneTimeLinks | None) -> None:
    """Announce the address and the upstreams: in the log, and on a terminal also as text that is easy to read."""
    description, url, folder = describe(context.settings), url_of(context.sock), context.settings.data_dir.resolve()
    answers = "; ".join(description.answers)
    log.info("%s listens", name, extra={"url": url, "data": str(folder), "version": __version__, "answers": answers})
    if sys.stderr.isatty():
        lines = [
            f"{name} {description.version} listens on {url}",
            *(f"  answers      {text}" for text in description.answers),
            f"  data folder  {folder}",
            f"  API          {url}/v1, described on {url}/docs",
            f"  console      {url}/{'' if links is None else links.new_path()[1:]}",
        ]
        sys.stderr.write("\n".join(["", *lines, "", ""]))


async def _start_metering(context: Context) -> None:
    settings = context.settings
    await context.store.start_metering(
        nano(settings.free_credits) if settings.metering else None, at=int(context.clock.now())
    )


def _api_server(context: ProcessContext, role: ApiRole, links: OneTimeLinks | None = None) -> Server:
    role.keep_load_history()
    return _server(context, build(role.services, console=console_routes(role.services, links)))


def _health_server(context: ProcessContext) -> Server:
    app = build_health(
        settings=context.settings,
        store=context.store,
        objects=context.objects,
        identity=context.identity,
        metrics=context.metrics,
        clock=context.clock,
        random=context.random,
    )
    return _server(context, app)


def _server(context: ProcessContext, app: ASGIApp) -> Server:
    return Server(
        app,
        settings=context.settings,
        metrics=context.metrics,
        random=context.random,
        sock=context.sock,
        max_connections=connection_limit(context.settings, descriptors=raise_descriptor_limit()),
    )


def _require_shared(settings: Settings, *, role: str) -> None:
    missing = [
        name
        for name, value in (
            ("BATCHLINE_DATABASE_URL (postgresql://...)", settings.database_url),
            ("BATCHLINE_STORAGE_URL (s3://bucket/prefix)", settings.storage_url),
        )
        if value is None
    ]
    if missing:
        raise StartupError(
            f"`batchline {role}` shares its work with other processes and needs {' and '.join(missing)}. "
            "On one machine, `batchline serve` is all of it in one process."
        )
