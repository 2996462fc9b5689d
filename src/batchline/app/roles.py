"""What a process can be: everything in one, or on many machines an API node or a worker."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TextIO

import uvloop

from batchline.api.server import Server, Services, build, build_health
from batchline.app.backends import migrate_store, open_objects, open_store
from batchline.app.sites import Site, fitting_of, open_sites
from batchline.app.startup import (
    StartupError,
    folder_lock,
    listening_socket,
    make_folder,
    stop_on_signals,
    url_of,
    write_lock,
)
from batchline.children import ValidationChildren
from batchline.domain.money import nano
from batchline.engine import Desk, Engine, Works
from batchline.loops.share import LiveCalls
from batchline.pipeline.fit import Fitting
from batchline.pipeline.inference import Inference
from batchline.pipeline.traffic import Traffic
from batchline.ports import Objects, Store
from batchline.settings import Settings
from batchline.system import SystemClock, SystemRandom
from batchline.telemetry.logs import configure_logs
from batchline.telemetry.metrics import Metrics
from batchline.upstream.weights import Progress

log = logging.getLogger(__name__)
_SWITCH_SECONDS = 0.0005


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What every role stands on."""

    settings: Settings
    store: Store
    objects: Objects
    sites: dict[str, Site]
    sock: socket.socket
    clock: SystemClock
    random: SystemRandom
    metrics: Metrics


def run(role: Coroutine[Any, Any, None]) -> None:
    """Be something until SIGTERM or SIGINT."""
    configure_logs()
    # Threads that write and sync need the interpreter for moments; by default one may keep it for 5 ms, while answers
    # wait.
    sys.setswitchinterval(_SWITCH_SECONDS)
    uvloop.run(role)


async def serve(settings: Settings, progress: Progress) -> None:
    """API and worker in one process, on any backend."""
    make_folder(settings.data_dir)
    with _own_folder(settings) as lock:
        if settings.database_url is not None:
            await migrate_store(settings)
        async with _parts(settings, progress) as parts:
            traffic, fitting = Traffic(clock=parts.clock), fitting_of(parts.sites)
            validator = ValidationChildren()
            await _start_metering(parts)
            engine = Engine(
                settings=settings,
                store=parts.store,
                objects=parts.objects,
                upstreams=parts.sites,
                fitting=fitting,
                traffic=traffic,
                validator=validator,
                clock=parts.clock,
                random=parts.random,
                metrics=parts.metrics,
                fleet=settings.database_url is not None,
            )
            server = _api_server(parts, engine.desk, traffic, fitting)

            def stop() -> None:
                server.stop()
                engine.stop()

            stop_on_signals(stop)
            if lock is not None:
                write_lock(lock, os.getpid(), url_of(parts.sock))
            await _until_stopped("batchline", parts, server.serve(), engine.run())
            validator.close()


async def api(settings: Settings, progress: Progress) -> None:
    """Takes batches in and hands results out, beside any number of others."""
    _require_shared(settings, role="api")
    async with _parts(settings, progress) as parts:
        traffic, validator = Traffic(clock=parts.clock), ValidationChildren()
        owner = parts.random.bytes(8).hex()
        await _start_metering(parts)
        desk = Desk(
            settings=settings,
            store=parts.store,
            objects=parts.objects,
            validator=validator,
            workers=parts.store,
            clock=parts.clock,
            random=parts.random,
            owner=owner,
            calls=LiveCalls(fleet=parts.store, traffic=traffic, owner=owner, settings=settings),
        )
        server = _api_server(parts, desk, traffic, fitting_of(parts.sites))
        stop_on_signals(server.stop)
        async with asyncio.TaskGroup() as group:
            pulses = group.create_task(desk.run())
            await _until_stopped("batchline api", parts, server.serve())
            pulses.cancel()
        validator.close()


async def worker(settings: Settings, progress: Progress) -> None:
    """Runs batches, beside any number of others; answers only whether it is well."""
    _require_shared(settings, role="worker")
    async with _parts(settings, progress) as parts:
        works = Works(
            settings=settings,
            store=parts.store,
            objects=parts.objects,
            upstreams=parts.sites,
            fitting=fitting_of(parts.sites),
            traffic=Traffic(clock=parts.clock),
            clock=parts.clock,
            random=parts.random,
            metrics=parts.metrics,
            owner=parts.random.bytes(8).hex(),
            fleet=True,
        )
        server = _health_server(parts)
        stop_on_signals(works.stop)

        async def work() -> None:
            await works.run()
            server.stop()

        await _until_stopped("batchline worker", parts, work(), server.serve())


@asynccontextmanager
async def _parts(settings: Settings, progress: Progress) -> AsyncIterator[Parts]:
    with listening_socket(settings) as sock:
        sites = await open_sites(settings, progress)
        async with open_store(settings) as store, open_objects(settings) as objects:
            yield Parts(
                settings=settings,
                store=store,
                objects=objects,
                sites=sites,
                sock=sock,
                clock=SystemClock(),
                random=SystemRandom(),
                metrics=Metrics(),
            )
        for site in sites.values():
            await site.close()


async def _until_stopped(what: str, parts: Parts, *running: Coroutine[Any, Any, None]) -> None:
    log.info("%s listens", what, extra={"url": url_of(parts.sock), "data": str(parts.settings.data_dir)})
    async with asyncio.TaskGroup() as group:
        for each in running:
            group.create_task(each)


async def _start_metering(parts: Parts) -> None:
    settings = parts.settings
    await parts.store.start_metering(
        nano(settings.free_credits) if settings.metering else None, at=int(parts.clock.now())
    )


def _api_server(parts: Parts, desk: Desk, traffic: Traffic, fitting: Fitting) -> Server:
    settings = parts.settings
    services = Services(
        settings=settings,
        store=parts.store,
        objects=parts.objects,
        upload=desk.upload,
        download=desk.download,
        creation=desk.creation,
        cancellation=desk.cancellation,
        inspection=desk.inspection,
        inference=Inference(
            sites=parts.sites,
            catalog=settings.catalog,
            fitting=fitting,
            ledger=parts.store,
            tariff=settings.tariff,
            traffic=traffic,
            clock=parts.clock,
        ),
        sites=parts.sites,
        catalog=settings.catalog,
        used=desk.uses.mark,
        metrics=parts.metrics,
        clock=parts.clock,
        random=parts.random,
    )
    return Server(build(services), settings=settings, random=parts.random, sock=parts.sock)


def _health_server(parts: Parts) -> Server:
    app = build_health(
        settings=parts.settings,
        store=parts.store,
        objects=parts.objects,
        metrics=parts.metrics,
        clock=parts.clock,
        random=parts.random,
    )
    return Server(app, settings=parts.settings, random=parts.random, sock=parts.sock)


@contextmanager
def _own_folder(settings: Settings) -> Iterator[TextIO | None]:
    """What is kept in the folder is kept by one process."""
    shared = settings.database_url is not None and settings.storage_url is not None
    with nullcontext() if shared else folder_lock(settings.data_dir) as lock:
        yield lock


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
