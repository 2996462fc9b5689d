"""Reads and draws what ``batchline top`` shows."""

import asyncio
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import click
import httpx
from msgspec import Struct
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from batchline import __version__
from batchline.app import StartupError, open_store
from batchline.cli.connection.local_service import find_holder
from batchline.cli.connection.stopping import stop_on_signals
from batchline.cli.loading import load_settings
from batchline.cli.output import show_json
from batchline.cli.store import now, require_store
from batchline.cli.text import format_age, format_count, format_rate, format_size
from batchline.cli.top.keyboard import key_pressed
from batchline.cli.top.metrics import ScrapedUpstream, ServiceState, read_metrics
from batchline.cli.views import bar_text, console, show, table
from batchline.client.client import tls_context
from batchline.client.models import Counts
from batchline.domain.errors import StoreDown
from batchline.domain.records import Batch, Project
from batchline.pipeline.overview import open_batches
from batchline.ports import Store
from batchline.settings import Settings
from batchline.system import SystemClock

_INTERVAL_SECONDS = 2.0
_END_KEY = "q"
_TIMEOUT_SECONDS = 5.0
_LISTED_BATCHES = 200
"""The most batches that are listed, the oldest of those that are open."""


class Snapshot(Struct, frozen=True, kw_only=True):
    """The content of the screen at one moment."""

    url: str | None
    service: ServiceState | None
    """None if no service was reached."""
    batches: list[tuple[Project, Batch]]
    rate: float | None
    """Recorded lines per second since the look before."""


def run_top(flags: Mapping[str, Any], *, url: str | None, once: bool, as_json: bool) -> None:
    """Show the state, once or until the key q or Ctrl-C."""
    settings = load_settings(**flags)
    require_store(settings)
    shown = console()
    redraws = shown.is_terminal and not shown.is_dumb_terminal
    with stop_on_signals(), asyncio.Runner() as runner:
        try:
            if once or as_json or not redraws:
                snapshot = runner.run(_look_once(settings, url))
                show_json(_as_json(snapshot)) if as_json else show(_view(snapshot))
                _require_service(snapshot)
            else:
                runner.run(_look_on(settings, url, shown))
        except (StartupError, StoreDown) as error:
            raise click.ClickException(str(error)) from None


def _require_service(snapshot: Snapshot) -> None:
    """Raise ClickException if the service at an address was not reached. A folder without a service is no failure."""
    if snapshot.url is not None and snapshot.service is None:
        raise click.ClickException(
            f"{snapshot.url} cannot be reached. Is the service running, and is the address right?"
        )


async def _look_once(settings: Settings, url: str | None) -> Snapshot:
    async with open_store(settings) as store:
        return await _look(settings, store, url, before=None, seconds=0)


async def _look_on(settings: Settings, url: str | None, shown: Console) -> None:
    clock, before = SystemClock(), None
    async with open_store(settings) as store:
        with key_pressed(_END_KEY) as ended, Live(console=shown, auto_refresh=False, screen=True) as live:
            looked_at = clock.steady()
            while not ended.is_set():
                seconds = clock.steady() - looked_at
                looked_at = clock.steady()
                snapshot = await _look(settings, store, url, before=before, seconds=seconds)
                live.update(_view(snapshot), refresh=True)
                before = snapshot.service
                with suppress(TimeoutError):
                    async with asyncio.timeout(_INTERVAL_SECONDS):
                        await ended.wait()


async def _look(
    settings: Settings, store: Store, url: str | None, *, before: ServiceState | None, seconds: float
) -> Snapshot:
    holder = find_holder(settings.data_dir) if url is None else None
    address = url or (None if holder is None else holder.url)
    service = None if address is None else await _metrics(address, settings)
    rate = None
    if service is not None and before is not None and seconds > 0:
        rate = max(0, service.recorded_lines - before.recorded_lines) / seconds
    batches = await open_batches(store, limit=_LISTED_BATCHES)
    return Snapshot(url=address, service=service, batches=batches, rate=rate)


async def _metrics(url: str, settings: Settings) -> ServiceState | None:
    token = settings.admin_token
    headers = {} if token is None else {"authorization": f"Bearer {token.get_secret_value()}"}
    try:
        async with httpx.AsyncClient(verify=tls_context(), trust_env=False, timeout=_TIMEOUT_SECONDS) as client:
            answer = await client.get(f"{url.rstrip('/').removesuffix('/v1')}/metrics", headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    if answer.status_code in {401, 403}:
        raise click.ClickException(f"{url}/metrics needs the administrator's token: set BATCHLINE_ADMIN_TOKEN")
    try:
        return read_metrics(answer.text) if answer.is_success else None
    except ValueError:
        raise click.ClickException(f"{url} is not a batchline service: its /metrics cannot be read") from None


def _view(snapshot: Snapshot) -> RenderableType:
    parts: list[RenderableType] = [_head(snapshot), Text()]
    if snapshot.service is not None:
        parts += [_upstream_table(snapshot.service.upstreams), Text()]
    parts.append(_batch_table(snapshot.batches) if snapshot.batches else Text("No batch is open."))
    return Group(*parts)


def _head(snapshot: Snapshot) -> Text:
    service = snapshot.service
    if service is None:
        where = "No service runs on this data folder." if snapshot.url is None else f"{snapshot.url} cannot be reached."
        return Text(where, style="yellow")
    parts = [
        f"batchline {__version__}",
        f"{format_count(service.queued_lines)} queued",
        f"{format_count(service.in_flight)} in flight",
        *([] if snapshot.rate is None else [f"{format_rate(snapshot.rate)} recorded"]),
        f"{format_size(service.held_bytes)} held",
        *(["clock in doubt: nothing expires"] if service.clock_held else []),
    ]
    return Text("  ".join(parts), style="bold")


def _upstream_table(upstreams: list[ScrapedUpstream]) -> Table:
    heads = ("upstream", "in flight", "limit", "rate limit", "waiting", "state")
    return table(heads, [_upstream_row(upstream) for upstream in upstreams], right=heads[1:5])


def _upstream_row(upstream: ScrapedUpstream) -> tuple[Text | str, ...]:
    state = "; ".join(upstream.pauses) or _waits(upstream.waiting) or "ok"
    return (
        upstream.name,
        format_count(upstream.in_flight),
        _bounded(upstream.limit, format_count),
        _bounded(upstream.rate_limit, lambda value: format_rate(float(value))),
        format_count(sum(upstream.waiting.values())),
        Text(state, style="red") if upstream.pauses else state,
    )


def _bounded(value: float, form: Any) -> str:
    return "none" if math.isinf(value) else form(int(value) if value == int(value) else value)


def _waits(waiting: Mapping[str, int]) -> str:
    return ", ".join(f"{format_count(lines)} {reason}" for reason, lines in waiting.items())


def _batch_table(batches: list[tuple[Project, Batch]]) -> Table:
    heads = ("batch", "project", "age", "status", "progress", "left")
    return table(heads, [_batch_row(*each) for each in batches], right=("age", "left"), gap=1)


def _batch_row(project: Project, batch: Batch) -> tuple[Text | str, ...]:
    counts = Counts(total=batch.total, completed=batch.completed, failed=batch.failed)
    age, left = format_age(now() - batch.created_at), format_count(counts.total - counts.done)
    return batch.id, project.name, age, str(batch.status), bar_text(counts, width=8), left


def _as_json(snapshot: Snapshot) -> dict[str, Any]:
    service = snapshot.service
    return {
        "url": snapshot.url,
        "queued_lines": None if service is None else service.queued_lines,
        "in_flight": None if service is None else service.in_flight,
        "upstreams": [] if service is None else [_upstream_json(each) for each in service.upstreams],
        "batches": [
            {
                "batch_id": batch.id,
                "project": project.name,
                "project_id": project.id,
                "status": batch.status,
                "total": batch.total,
                "completed": batch.completed,
                "failed": batch.failed,
                "created_at": batch.created_at,
            }
            for project, batch in snapshot.batches
        ],
    }


def _upstream_json(upstream: ScrapedUpstream) -> dict[str, Any]:
    return {
        "upstream": upstream.name,
        "in_flight": upstream.in_flight,
        "limit": None if math.isinf(upstream.limit) else upstream.limit,
        "rate_limit": None if math.isinf(upstream.rate_limit) else upstream.rate_limit,
        "waiting": upstream.waiting,
        "pauses": upstream.pauses,
    }
