"""``batchline keys``: who may use the service. Works beside a running one."""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from batchline.cli.options import load_settings, settings_options
from batchline.domain import ids
from batchline.domain.errors import StoreDown
from batchline.domain.records import Key
from batchline.ports import Store
from batchline.system import SystemClock, SystemRandom

T = TypeVar("T")

_random = SystemRandom()
_json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_where = settings_options("data_dir", "config")


@click.group()
def keys() -> None:
    """Make, list, revoke and rotate API keys.

    KEY is a key's id (key_...) or the key itself; the id does not end up as a secret in your shell's history.
    """


@keys.command()
@click.option("--project", metavar="NAME", default="default", show_default=True, help="Project; made if there is none.")
@_json_flag
@_where
def create(project: str, as_json: bool, **flags: Any) -> None:
    """Make a key and print it, once."""
    if not project.strip() or not project.isprintable():
        raise click.BadParameter("a name is needed, of printable characters", param_hint="--project")
    secret = _new_secret()
    key_id = "key_" + _random.bytes(12).hex()
    owner = _in_store(
        flags,
        lambda store: store.create_key(
            key_id=key_id,
            digest=ids.key_digest(secret),
            hint=_hint(secret),
            project=project,
            project_id=_new_uuid(),
            organization_id=_new_uuid(),
            at=_now(),
        ),
    )
    _show_secret(
        {
            "api_key": secret,
            "project_id": owner.project_id,
            "organization_id": owner.organization_id,
            "key_id": key_id,
        },
        as_json=as_json,
    )


@keys.command("list")
@_json_flag
@_where
def list_keys(as_json: bool, **flags: Any) -> None:
    """Show every key, without its secret."""
    rows = [_row(key) for key in _in_store(flags, lambda store: store.keys())]
    click.echo(json.dumps(rows, indent=2) if as_json else _table(rows))


@keys.command()
@click.argument("key")
@_where
def revoke(key: str, **flags: Any) -> None:
    """End a key: within 5 s it opens nothing any more, and lines of its batches that have not run yet fail."""

    async def work(store: Store) -> Key:
        found = await _find(store, key)
        await store.revoke_key(found.id, at=_now())
        return found

    click.echo(f"{_in_store(flags, work).id} is revoked")


@keys.command()
@click.argument("key")
@_json_flag
@_where
def rotate(key: str, as_json: bool, **flags: Any) -> None:
    """Give a key a new secret; the old one ends, running batches go on."""
    secret = _new_secret()

    async def work(store: Store) -> Key:
        found = await _find(store, key)
        if not await store.rotate_key(found.id, digest=ids.key_digest(secret), hint=_hint(secret)):
            raise click.ClickException(f"{found.id} is revoked; make a new key with: batchline keys create")
        return found

    found = _in_store(flags, work)
    _show_secret(
        {
            "api_key": secret,
            "project_id": found.project_id,
            "organization_id": found.organization_id,
            "key_id": found.id,
        },
        as_json=as_json,
    )


def _in_store(flags: dict[str, Any], work: Callable[[Store], Awaitable[T]]) -> T:
    settings = load_settings(**flags)
    from batchline.app import StartupError, open_store  # noqa: PLC0415 (all of the service: not for --help)

    async def run() -> T:
        async with open_store(settings) as store:
            return await work(store)

    try:
        return asyncio.run(run())
    except (StartupError, StoreDown) as refused:
        raise click.ClickException(str(refused)) from None


async def _find(store: Store, key: str) -> Key:
    """By id, or by the secret: its hint narrows the keys down, its digest decides."""
    digest, hint = ids.key_digest(key), _hint(key)
    for known in await store.keys():
        if known.id == key:
            return known
        if known.hint == hint:
            owner = await store.owner_of(digest, known.project_id)
            if owner is not None and owner.key_id == known.id:
                return known
    # What was typed may be a secret, so it is not repeated.
    raise click.ClickException("There is no such key. See: batchline keys list")


def _new_secret() -> str:
    return ids.api_key(_random.bytes(24))


def _new_uuid() -> str:
    return str(uuid.UUID(bytes=_random.bytes(16), version=4))


def _hint(secret: str) -> str:
    """Enough to tell keys apart, too little to guess one."""
    return f"{secret[:7]}...{secret[-4:]}"


def _now() -> int:
    return int(SystemClock().now())


def _show_secret(fields: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(fields, indent=2))
        return
    width = max(map(len, fields))
    for name, value in fields.items():
        click.echo(f"{name:<{width}}  {value}")
    click.echo("The key is shown this once and stored only as a hash: keep it now.", err=True)


def _row(key: Key) -> dict[str, str | int | None]:
    return {
        "key_id": key.id,
        "hint": key.hint,
        "project": key.project,
        "project_id": key.project_id,
        "organization_id": key.organization_id,
        "created_at": key.created_at,
        "revoked_at": key.revoked_at,
    }


def _table(rows: list[dict[str, str | int | None]]) -> str:
    names = ("key_id", "hint", "project", "project_id", "created_at", "revoked_at")
    lines = [names, *(tuple(_cell(row[name]) for name in names) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _cell(value: str | int | None) -> str:
    if isinstance(value, int):
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return value or "-"
