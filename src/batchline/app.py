"""The composition root: settings -> adapters -> engine -> server. The only module that knows the adapters."""

import asyncio
import fcntl
import logging
import os
import signal
import socket
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TextIO

import uvloop

from batchline.api.server import Server, Services
from batchline.children import ValidationChildren
from batchline.domain.errors import StoreDown
from batchline.domain.models import CLASSIFIER_UPSTREAM, DEFAULT_UPSTREAM
from batchline.domain.money import nano
from batchline.engine import Engine
from batchline.objects.local import LocalObjects
from batchline.pipeline.fit import Fitting
from batchline.pipeline.inference import Inference
from batchline.pipeline.traffic import Traffic
from batchline.ports import Store
from batchline.settings import Settings, UpstreamSettings
from batchline.store.sqlite.database import SqliteDatabase
from batchline.store.store import SqlStore
from batchline.system import SystemClock, SystemRandom, ThreadPool
from batchline.telemetry.logs import configure_logs
from batchline.telemetry.metrics import Metrics
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

log = logging.getLogger(__name__)
_DISK_THREADS = 4
_SWITCH_SECONDS = 0.0005


class StartupError(Exception):
    """Why the service cannot start, and what to do, for a person to read."""


def run(settings: Settings, *, progress: Progress) -> int:
    """Serve until SIGTERM or SIGINT. ``progress`` hears of the embedded model's download, the first time."""
    configure_logs()
    # Threads that write and sync need the interpreter for moments; by default one may keep it for 5 ms, while answers
    # wait.
    sys.setswitchinterval(_SWITCH_SECONDS)
    uvloop.run(serve(settings, progress))
    return 0


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Store]:
    """The store of the data folder, also beside a running service."""
    _make_folder(settings.data_dir)
    writer, reader = ThreadPool(1, name="sqlite-writer"), ThreadPool(1, name="sqlite-reader")
    path = settings.data_dir / "batchline.sqlite"
    try:
        database = SqliteDatabase(path, clock=SystemClock(), writer=writer, reader=reader)
    except (sqlite3.Error, StoreDown) as error:
        raise StartupError(f"The database {path} cannot be opened: {error}") from error
    try:
        yield SqlStore(database)
    finally:
        writer.close()
        reader.close()
        database.close()


async def serve(settings: Settings, progress: Progress) -> None:
    _make_folder(settings.data_dir)
    with _folder_lock(settings.data_dir) as lock, _listening_socket(settings) as sock:
        sites = await _sites(settings, progress)
        async with open_store(settings) as store:
            await _serve_on(settings, store, sites, sock, lock)


async def _serve_on(
    settings: Settings, store: Store, sites: Mapping[str, "_Site"], sock: socket.socket, lock: TextIO
) -> None:
    clock, random, metrics = SystemClock(), SystemRandom(), Metrics()
    disk = ThreadPool(_DISK_THREADS, name="disk")
    objects = LocalObjects(settings.data_dir / "objects", disk, random)
    validator = ValidationChildren()
    traffic = Traffic(clock=clock)
    fitting = Fitting(tokens={name: UpstreamTokens(site, clock=clock) for name, site in sites.items()})
    await objects.clear_temporary()
    await store.start_metering(nano(settings.free_credits) if settings.metering else None, at=int(clock.now()))
    engine = Engine(
        settings=settings,
        store=store,
        objects=objects,
        upstreams=sites,
        fitting=fitting,
        traffic=traffic,
        validator=validator,
        clock=clock,
        random=random,
        metrics=metrics,
    )
    server = Server(
        Services(
            settings=settings,
            store=store,
            objects=objects,
            upload=engine.upload,
            download=engine.download,
            creation=engine.creation,
            cancellation=engine.cancellation,
            inspection=engine.inspection,
            inference=Inference(
                sites=sites,
                catalog=settings.catalog,
                fitting=fitting,
                ledger=store,
                tariff=settings.tariff,
                traffic=traffic,
                clock=clock,
            ),
            sites=sites,
            catalog=settings.catalog,
            used=engine.uses.mark,
            metrics=metrics,
            clock=clock,
            random=random,
        ),
        sock=sock,
    )
    _stop_on_signals(server, engine)
    url = _url_of(sock)
    _write_lock(lock, os.getpid(), url)
    log.info("batchline listens", extra={"url": url, "data": str(settings.data_dir)})
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        group.create_task(server.serve())
    for site in sites.values():
        await site.close()
    validator.close()
    disk.close()


_Site = HttpUpstream | EmbeddedUpstream | ClassifierUpstream


async def _sites(settings: Settings, progress: Progress) -> dict[str, _Site]:
    sites: dict[str, _Site] = {name: _site(name, site, settings) for name, site in settings.sites.items()}
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


def _stop_on_signals(server: Server, engine: Engine) -> None:
    """The first signal lets what is in flight finish; a second one ends the process at once."""
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        log.info("stopping; lines in flight may finish", extra={"signal": number.name})
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, os._exit, 128 + each)
        server.stop()
        engine.stop()

    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, stop, each)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"The data folder {folder} cannot be made: {error.strerror}") from error


@contextmanager
def _folder_lock(folder: Path) -> Iterator[TextIO]:
    """One process a folder; the lock goes with the process, however it ends. In it stand the process and, once it
    listens, its URL."""
    with (folder / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise StartupError(
                f"The data folder {folder} is served by another process (pid {lock.readline().strip() or 'unknown'}). "
                "Stop that one, or choose another folder with --data-dir."
            ) from None
        _write_lock(lock, os.getpid())
        yield lock


def _write_lock(lock: TextIO, *lines: object) -> None:
    lock.truncate(0)
    lock.write("".join(f"{line}\n" for line in lines))
    lock.flush()


def _url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _listening_socket(settings: Settings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        sock = socket.create_server((settings.host, settings.port), family=family, backlog=1024)
    except OSError as error:
        raise StartupError(
            f"Cannot listen on {settings.host} port {settings.port}: {error.strerror}. "
            "Choose another with --host and --port."
        ) from error
    with sock:
        yield sock
