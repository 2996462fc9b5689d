"""The composition root: settings -> adapters -> engine -> server. The only module that knows the adapters."""

import asyncio
import fcntl
import logging
import os
import signal
import socket
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TextIO

import uvloop

from batchline.api.server import Server, Services
from batchline.children import ValidationChildren
from batchline.domain.errors import StoreDown
from batchline.domain.models import DEFAULT_UPSTREAM
from batchline.domain.money import nano
from batchline.engine import Engine
from batchline.objects.local import LocalObjects
from batchline.pipeline.fit import Fitting
from batchline.pipeline.inference import Inference
from batchline.ports import Store
from batchline.settings import Settings, UpstreamSettings
from batchline.store.sqlite.database import SqliteDatabase
from batchline.store.store import SqlStore
from batchline.system import SystemClock, SystemRandom, ThreadPool
from batchline.telemetry.logs import configure_logs
from batchline.telemetry.metrics import Metrics
from batchline.upstream.http import HttpUpstream
from batchline.upstream.tokens import UpstreamTokens

log = logging.getLogger(__name__)
_DISK_THREADS = 4


class StartupError(Exception):
    """Why the service cannot start, and what to do, for a person to read."""


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT."""
    configure_logs()
    uvloop.run(serve(settings))
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


async def serve(settings: Settings) -> None:
    _make_folder(settings.data_dir)
    with _folder_lock(settings.data_dir) as lock, _listening_socket(settings) as sock:
        async with open_store(settings) as store:
            await _serve_on(settings, store, sock, lock)


async def _serve_on(settings: Settings, store: Store, sock: socket.socket, lock: TextIO) -> None:
    clock, random, metrics = SystemClock(), SystemRandom(), Metrics()
    disk = ThreadPool(_DISK_THREADS, name="disk")
    objects = LocalObjects(settings.data_dir / "objects", disk, random)
    validator = ValidationChildren()
    sites = _sites(settings, clock)
    fitting = Fitting(tokens={name: UpstreamTokens(site, clock=clock) for name, site in sites.items()})
    await objects.clear_temporary()
    await store.start_metering(nano(settings.free_credits) if settings.metering else None, at=int(clock.now()))
    engine = Engine(
        settings=settings,
        store=store,
        objects=objects,
        upstreams=sites,
        fitting=fitting,
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
            inference=Inference(
                sites=sites,
                catalog=settings.catalog,
                fitting=fitting,
                ledger=store,
                tariff=settings.tariff,
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


def _sites(settings: Settings, clock: SystemClock) -> dict[str, HttpUpstream]:
    needed = {model.upstream for model in settings.models.values()} or {DEFAULT_UPSTREAM}
    if not needed <= settings.sites.keys():
        raise StartupError(
            "There is no upstream to answer the lines. Set BATCHLINE_UPSTREAM_URL (or --upstream-url) to an "
            "OpenAI-style base URL such as http://127.0.0.1:8001/v1; to try things out, run: batchline mock"
        )
    return {name: _site(name, site, settings, clock) for name, site in settings.sites.items()}


def _site(name: str, site: UpstreamSettings, settings: Settings, clock: SystemClock) -> HttpUpstream:
    try:
        return HttpUpstream(
            site.url,
            api_key=site.api_key.get_secret_value() if site.api_key else None,
            connect_timeout=settings.connect_timeout_seconds,
            request_timeout=settings.request_timeout_seconds,
            max_answer_bytes=settings.max_answer_bytes,
            clock=clock,
        )
    except ValueError as error:
        where = "BATCHLINE_UPSTREAM_URL" if name == DEFAULT_UPSTREAM else f"upstreams.{name}"
        raise StartupError(f"{where} cannot be used: {error}") from error


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
