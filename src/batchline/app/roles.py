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
from batchline.app.crew import Crew, most_processes
from batchline.app.roster import Roster
from batchline.app.sites import Site, fitting_of, open_sites
from batchline.app.staffing import Staffing
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
from batchline.engine import Desk, Engine, Ground, Works
from batchline.loops.share import LiveCalls
from batchline.pipeline.inference import Inference
from batchline.pipeline.traffic import Traffic
from batchline.settings import Settings
from batchline.system import SystemClock, SystemRandom
from batchline.telemetry.logs import configure_logs
from batchline.telemetry.metrics import Metrics
from batchline.upstream.weights import Progress

log = logging.getLogger(__name__)
_SWITCH_SECONDS = 0.0005


@dataclass(frozen=True, kw_only=True)
class Parts(Ground):
    """What every role stands on."""

    sites: dict[str, Site]
    sock: socket.socket


def run(role: Coroutine[Any, Any, None]) -> None:
    """Be something until SIGTERM or SIGINT."""
    configure_logs()
    # Threads that write and sync need the interpreter for moments; by default one may keep it for 5 ms, while answers
    # wait.
    sys.setswitchinterval(_SWITCH_SECONDS)
    uvloop.run(role)


async def serve(settings: Settings, progress: Progress) -> None:
    """API and worker in one process, on any backend; on SQLite more may run lines with it."""
    make_folder(settings.data_dir)
    with _own_folder(settings) as lock:
        if settings.database_url is not None:
            await migrate_store(settings)
        async with _parts(settings, progress) as parts:
            validator, roster = ValidationChildren(), Roster()
            await _start_metering(parts)
            most = most_processes(settings)
            shared, hands = settings.database_url is not None, roster if most > 1 else None
            engine = Engine(parts, validator=validator, shared=shared, hands=hands)
            crew = _crew(parts, engine, roster, most)
            server = _api_server(parts, engine.desk)

            def stop() -> None:
                server.stop()
                engine.stop()
                crew.stop()

            stop_on_signals(stop)
            if lock is not None:
                write_lock(lock, os.getpid(), url_of(parts.sock))
            await _until_stopped("batchline", parts, server.serve(), engine.run(), crew.run())
            validator.close()


async def api(settings: Settings, progress: Progress) -> None:
    """Takes batches in and hands results out, beside any number of others."""
    _require_shared(settings, role="api")
    async with _parts(settings, progress) as parts:
        validator = ValidationChildren()
        await _start_metering(parts)
        calls = LiveCalls(fleet=parts.store, traffic=parts.traffic, owner=parts.owner, settings=settings)
        desk = Desk(parts, validator=validator, workers=parts.store, calls=calls)
        server = _api_server(parts, desk)
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
        works = Works(parts, shared=True)
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
        clock, random = SystemClock(), SystemRandom()
        async with open_store(settings) as store, open_objects(settings) as objects:
            yield Parts(
                settings=settings,
                store=store,
                objects=objects,
                upstreams=sites,
                fitting=fitting_of(sites),
                traffic=Traffic(clock=clock),
                clock=clock,
                random=random,
                metrics=Metrics(),
                owner=random.bytes(8).hex(),
                sites=sites,
                sock=sock,
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


def _crew(parts: Parts, engine: Engine, roster: Roster, most: int) -> Crew:
    return Crew(
        settings=parts.settings,
        works=engine.works,
        roster=roster,
        staffing=Staffing(most=most),
        metrics=parts.metrics,
        clock=parts.clock,
        random=parts.random,
    )


def _api_server(parts: Parts, desk: Desk) -> Server:
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
            fitting=parts.fitting,
            ledger=parts.store,
            tariff=settings.tariff,
            traffic=parts.traffic,
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
    """What is kept in the folder is kept by one process and those it starts."""
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
