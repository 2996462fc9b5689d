"""``batchline doctor``: says what is wrong with this machine for a service with these settings."""

import asyncio
import os
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct

from batchline.cli.help import Command
from batchline.cli.loading import load_settings
from batchline.cli.options import settings_options
from batchline.cli.output import exit_codes, json_flag, moment, say, show_json
from batchline.cli.store import now
from batchline.cli.text import counted, format_size, printable, shortened
from batchline.domain.models import DEFAULT_UPSTREAM

if TYPE_CHECKING:
    from batchline.domain.replies import Reply
    from batchline.settings import Settings, UpstreamSettings

_MIN_FREE_BYTES = 1_000_000_000
"""Less free disk space than this is worth a warning: uploads and answers are stored there."""
_MIN_DESCRIPTORS = 1024
_TIMEOUT_SECONDS = 5.0
_EARLIEST_TIME = 1_767_225_600
"""2026-01-01: a clock before this is certainly wrong."""
_MAX_MODELS = 5


class CheckVerdict(StrEnum):
    """The result of one check."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


class CheckResult(Struct, frozen=True):
    """The result of one check, and the remedy."""

    part: str
    verdict: CheckVerdict
    text: str
    remedy: str = ""


@click.command(
    short_help="Find out what is wrong with this machine.",
    cls=Command,
    epilog=exit_codes("0 nothing is wrong", "1 something is", "2"),
)
@json_flag
@settings_options()
def doctor(*, as_json: bool, **flags: Any) -> None:
    """Check this machine for a service: folder, disk, port, clock, database, storage and upstreams.

    Nothing is created, and no line is sent to an upstream.
    """
    settings = load_settings(**flags)
    found = []
    for check in _CHECKS:
        for finding in check(settings):
            found.append(finding)
            if not as_json:
                _show(finding)
    if as_json:
        show_json([{name: str(getattr(each, name)) for name in CheckResult.__struct_fields__} for each in found])
    raise SystemExit(1 if any(each.verdict is CheckVerdict.FAILURE for each in found) else 0)


def _show(finding: CheckResult) -> None:
    colour = {CheckVerdict.OK: "green", CheckVerdict.WARNING: "yellow", CheckVerdict.FAILURE: "red"}[finding.verdict]
    click.secho(f"{finding.verdict:<8}", fg=colour, nl=False)
    say(f"{finding.part:<12}{printable(finding.text)}", indent=20, begun=8)
    if finding.remedy:
        say(f"{'':20}{printable(finding.remedy)}", indent=20)


def _check_folder(settings: "Settings") -> Iterator[CheckResult]:
    folder = settings.data_dir.resolve()
    if not folder.exists():
        parent = next(path for path in folder.parents if path.exists())
        can = os.access(parent, os.W_OK | os.X_OK)
        yield CheckResult(
            "folder",
            CheckVerdict.OK if can else CheckVerdict.FAILURE,
            f"{folder} does not exist; `serve` would create it",
            "" if can else f"{parent} cannot be written to: choose another folder with --data-dir.",
        )
        return
    usable = folder.is_dir() and os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    remedy = "" if usable else "Change its owner or permissions, or choose another folder with --data-dir."
    yield CheckResult("folder", CheckVerdict.OK if usable else CheckVerdict.FAILURE, str(folder), remedy)


def _check_disk(settings: "Settings") -> Iterator[CheckResult]:
    folder = settings.data_dir.resolve()
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    enough = free >= _MIN_FREE_BYTES
    remedy = "" if enough else "Free some space: a full disk stops every batch until there is room."
    yield CheckResult("disk", CheckVerdict.OK if enough else CheckVerdict.WARNING, f"{format_size(free)} free", remedy)


def _check_service(settings: "Settings") -> Iterator[CheckResult]:
    """Check who holds the data folder and who listens on the port."""
    from batchline.cli.connection.local_service import find_holder, url_of_another_folder  # noqa: PLC0415

    holder = find_holder(settings.data_dir)
    if holder is not None:
        yield CheckResult(
            "service", CheckVerdict.OK, f"runs on this folder: {holder.url or 'starting'} (pid {holder.pid})"
        )
        for answer in holder.description.answers if holder.description else ():
            yield CheckResult("service", CheckVerdict.OK, f"its answers come from: {answer}")
        return
    yield CheckResult("service", CheckVerdict.OK, "none runs on this folder")
    other = url_of_another_folder(settings)
    if other is not None:
        yield CheckResult(
            "port",
            CheckVerdict.WARNING,
            f"{other} is a batchline service with another data folder",
            "Stop it, or choose another --port.",
        )
    else:
        yield _port(settings)


def _port(settings: "Settings") -> CheckResult:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        socket.create_server((settings.host, settings.port), family=family).close()
    except OSError as error:
        text = f"cannot listen on {settings.host} port {settings.port}: {error.strerror}"
        return CheckResult("port", CheckVerdict.FAILURE, text, "Choose another with --host and --port.")
    return CheckResult("port", CheckVerdict.OK, f"{settings.host} port {settings.port} is free")


def _check_limits(_: "Settings") -> Iterator[CheckResult]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    enough = hard == resource.RLIM_INFINITY or hard >= _MIN_DESCRIPTORS
    remedy = "" if enough else "Raise it (ulimit -Hn): half of it is left to clients, the rest to upstreams and files."
    text = "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard:,} open files"
    yield CheckResult("limits", CheckVerdict.OK if enough else CheckVerdict.WARNING, text, remedy)


def _check_clock(settings: "Settings") -> Iterator[CheckResult]:
    at = now()
    if at < _EARLIEST_TIME:
        yield CheckResult(
            "clock", CheckVerdict.FAILURE, f"{moment(at)} is in the past", "Set the clock of this machine."
        )
        return
    if settings.database_url is None and settings.data_dir.is_dir():
        from batchline.app import clock_file  # noqa: PLC0415 (all of the service: not for --help)

        saved = clock_file(settings).load()
        if saved is not None and saved.held:
            remedy = "Set the clock, or if it is right: batchline clock accept"
            yield CheckResult(
                "clock", CheckVerdict.WARNING, "it jumped; nothing expires until it is trusted again", remedy
            )
            return
    yield CheckResult("clock", CheckVerdict.OK, moment(at))


def _check_store(settings: "Settings") -> Iterator[CheckResult]:
    """Check that the database and the storage can be used, if there are any yet."""
    from batchline.app import has_database  # noqa: PLC0415 (all of the service: not for --help)
    from batchline.app.backends import database_name  # noqa: PLC0415

    if not has_database(settings):
        yield CheckResult("database", CheckVerdict.OK, "none yet; `serve` would create it")
        return
    problem = asyncio.run(_store_problem(settings))
    if problem is None:
        yield CheckResult("database", CheckVerdict.OK, database_name(settings))
    else:
        yield CheckResult("database", CheckVerdict.FAILURE, shortened(problem), "Check the setting and the server.")


async def _store_problem(settings: "Settings") -> str | None:
    from batchline.app import StartupError, open_store  # noqa: PLC0415 (all of the service: not for --help)
    from batchline.domain.errors import StoreDown  # noqa: PLC0415

    try:
        async with open_store(settings) as store:
            await store.check()
            found = await store.schema_versions()
    except (StartupError, StoreDown) as error:
        return str(error)
    if found.database < found.program:
        return f"its tables have version {found.database}, this program needs {found.program}; run: batchline migrate"
    return None


def _check_upstreams(settings: "Settings") -> Iterator[CheckResult]:
    if settings.embeds_model:
        yield _embedded_model()
    for name, upstream in settings.all_upstreams.items():
        yield _upstream(name, upstream, settings)


def _embedded_model() -> CheckResult:
    from batchline.upstream.embedded.download import (  # noqa: PLC0415 (not for --help)
        ModelUnavailable,
        cache_folder,
        find_weights,
    )

    try:
        weights = find_weights(cache=cache_folder())
    except ModelUnavailable as error:
        return CheckResult("upstream", CheckVerdict.FAILURE, str(error))
    state = "is installed" if weights is not None else "will be downloaded at the first start"
    remedy = "Name a model server with --upstream-url for real work."
    return CheckResult(
        "upstream", CheckVerdict.WARNING, f"only the embedded model, a toy for trying; it {state}", remedy
    )


def _upstream(name: str, upstream: "UpstreamSettings", settings: "Settings") -> CheckResult:
    """Ask an upstream for its models, as the service does. No line is sent."""
    from batchline.app import StartupError  # noqa: PLC0415 (all of the service: not for --help)
    from batchline.domain.replies import Fault  # noqa: PLC0415

    part, setting = "upstream", "BATCHLINE_UPSTREAM_URL" if name == DEFAULT_UPSTREAM else f"upstreams.{name}"
    try:
        reply = asyncio.run(_ask_for_models(name, upstream, settings))
    except StartupError as error:
        return CheckResult(part, CheckVerdict.FAILURE, str(error), f"Correct {setting}: no service starts with it.")
    if isinstance(reply, Fault):
        remedy = f"Is it running, and is {setting} right? Lines wait until it answers."
        return CheckResult(part, CheckVerdict.FAILURE, f"{name}: {reply.detail}", remedy)
    if reply.status in {401, 403}:
        text = f"{name}: does not accept the credentials (status {reply.status})"
        return CheckResult(part, CheckVerdict.FAILURE, text, "Check the API key of the upstream.")
    models = _model_ids(reply.body)
    if models is None:
        return CheckResult(part, CheckVerdict.WARNING, f"{name}: answers, but lists no models (status {reply.status})")
    shown = ", ".join(shortened(model, length=40) for model in models[:_MAX_MODELS])
    return CheckResult(part, CheckVerdict.OK, f"{name}: answers with {counted(len(models), 'model')}: {shown}")


async def _ask_for_models(name: str, upstream: "UpstreamSettings", settings: "Settings") -> "Reply":
    from batchline.app.upstreams import http_upstream  # noqa: PLC0415 (all of the service: not for --help)

    limits = {"connect_timeout_seconds": _TIMEOUT_SECONDS, "request_timeout_seconds": _TIMEOUT_SECONDS}
    client = http_upstream(name, upstream, settings.model_copy(update=limits))
    try:
        return await client.get("/v1/models")
    finally:
        await client.close()


def _model_ids(body: bytes) -> list[str] | None:
    from msgspec import DecodeError  # noqa: PLC0415

    from batchline.client.models import model_decoder, page_decoder  # noqa: PLC0415

    try:
        return [model_decoder.decode(raw).id for raw in page_decoder.decode(body).data]
    except DecodeError:
        return None


_CHECKS: tuple[Callable[["Settings"], Iterator[CheckResult]], ...] = (
    _check_folder,
    _check_disk,
    _check_limits,
    _check_service,
    _check_clock,
    _check_store,
    _check_upstreams,
)
