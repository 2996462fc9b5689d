"""``batchline keys``: manages API keys. The service may run meanwhile."""

import json
import os
import re
import shlex
from typing import Any

import click

from batchline.cli.help import Group
from batchline.cli.loading import RUN_VARIABLES
from batchline.cli.new_key import hint as hint_of
from batchline.cli.new_key import new_key, new_secret
from batchline.cli.output import Row, json_flag, moment, say, show_fields, show_json, show_table
from batchline.cli.store import Name, describe_batches, in_store, now, store_options
from batchline.domain import ids
from batchline.domain.records import ALL_SCOPES, Key
from batchline.ports import Store
from batchline.settings import Settings

_BASE_URL = RUN_VARIABLES[0]
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MAX_LIFETIME_SECONDS = 36_500 * 86_400
"""A calendar ends with the year 9999, and a key that expires after it could be listed no more."""


class _Lifetime(click.ParamType[int]):
    """A number of seconds, minutes, hours or days, such as 30d."""

    name = "duration"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", value, re.ASCII)
        if found is None:
            self.fail("expected a number with a unit, such as 12h or 30d", param, ctx)
        seconds = int(found[1]) * _UNIT_SECONDS[found[2]]
        if seconds > _MAX_LIFETIME_SECONDS:
            self.fail("the longest time is 36500d, a hundred years; without the option a key never expires", param, ctx)
        return seconds


@click.group(cls=Group)
def keys() -> None:
    """Create, list, rename, rotate, revoke and delete API keys.

    KEY is a key's id (key_...) or the key itself. Prefer the id: the key would be stored in your shell's history.
    """


@keys.command()
@click.option(
    "--project", type=Name(), default="default", show_default=True, help="Project; created if it does not exist."
)
@click.option(
    "--org",
    type=Name(),
    default="default",
    show_default=True,
    help="Organization of the project; created if it does not exist.",
)
@click.option("--name", type=Name(), help="What to call the key in lists.")
@click.option("--expires-in", type=_Lifetime(), help="Time after which the key is refused, such as 12h or 30d.")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(ALL_SCOPES.split(",")),
    multiple=True,
    help="What the key may be used for; repeat it for several. If not given, everything.",
)
@json_flag
@store_options
def create(
    project: str,
    org: str,
    name: str | None,
    expires_in: int | None,
    scopes: tuple[str, ...],
    as_json: bool,
    **flags: Any,
) -> None:
    """Create a key and print it. It is not shown again.

    A key with the scope read lists and downloads, with batch it uploads, creates, cancels and deletes, and with
    inference it makes synchronous calls.
    """
    secret = new_secret()
    new = new_key(
        secret,
        project=project,
        organization=org,
        name=name or "",
        scopes=",".join(sorted(set(scopes))) or ALL_SCOPES,
        lifetime_seconds=expires_in,
    )
    owner = in_store(flags, lambda store: store.create_key(new), creates=True)
    _show_secret(
        {
            "api_key": secret,
            "project_id": owner.project_id,
            "organization_id": owner.organization_id,
            "key_id": new.key_id,
            **({"name": new.name} if new.name else {}),
            **({"scopes": new.scopes} if new.scopes != ALL_SCOPES else {}),
            **({"expires_at": moment(new.expires_at)} if new.expires_at is not None else {}),
        },
        as_json=as_json,
    )
    if not as_json:
        _show_ready_lines(secret, flags)
    _warn_of_another_service(flags)


@keys.command("list")
@json_flag
@store_options
def list_keys(as_json: bool, **flags: Any) -> None:
    """List all keys, without their secrets."""
    found = in_store(flags, lambda store: store.keys())
    if as_json:
        show_json([_row(key) for key in found])
        return
    heads = (
        *("key_id", "hint", "name", "scopes", "organization", "project", "project_id"),
        *("created_at", "expires_at", "last_used_at", "revoked_at"),
    )
    show_table(heads, [_line(key) for key in found])


@keys.command()
@click.argument("key")
@json_flag
@store_options
def revoke(key: str, as_json: bool, **flags: Any) -> None:
    """Revoke a key. Within 5 s it is refused, and lines of its batches that have not run yet fail.

    KEY is the key_id from `batchline keys list`, or the key itself.
    """

    async def change(store: Store) -> Key:
        found = await _find(store, key)
        await store.revoke_key(found.id, at=now())
        return await _find(store, found.id)

    revoked = in_store(flags, change)
    if as_json:
        show_json(_row(revoked))
    else:
        click.echo(f"{revoked.id} is revoked")


@keys.command()
@click.argument("key")
@json_flag
@store_options
def delete(key: str, as_json: bool, **flags: Any) -> None:
    """Delete a key that has no open batch. It is refused within 5 s and listed no more.

    Its batches and files stay with the project, and what it used stays in the ledger. To end a key at once, revoke it.

    KEY is the key_id from `batchline keys list`, or the key itself.
    """

    async def change(store: Store) -> Key:
        found = await _find(store, key)
        deletion = await store.delete_key(found.id, at=now())
        if deletion.open_batches:
            raise click.ClickException(f"{found.id} has {describe_batches(deletion.open_batches)}")
        return found

    deleted = in_store(flags, change)
    if as_json:
        show_json({"key_id": deleted.id, "deleted": True})
    else:
        click.echo(f"{deleted.id} is deleted")


@keys.command()
@click.argument("key")
@click.argument("name", type=Name())
@json_flag
@store_options
def rename(key: str, name: str, as_json: bool, **flags: Any) -> None:
    """Give a key another name in lists.

    KEY is the key_id from `batchline keys list`, or the key itself.
    """

    async def change(store: Store) -> Key:
        found = await _find(store, key)
        await store.rename_key(found.id, name=name)
        return await _find(store, found.id)

    renamed = in_store(flags, change)
    if as_json:
        show_json(_row(renamed))
    else:
        click.echo(f"{renamed.id} is called {name}")


@keys.command()
@click.argument("key")
@json_flag
@store_options
def rotate(key: str, as_json: bool, **flags: Any) -> None:
    """Give a key a new secret. The old secret is refused from then on; running batches continue.

    KEY is the key_id from `batchline keys list`, or the key itself.
    """
    secret = new_secret()

    async def change(store: Store) -> Key:
        found = await _find(store, key)
        if not await store.rotate_key(found.id, digest=ids.key_digest(secret), hint=hint_of(secret)):
            raise click.ClickException(f"{found.id} is revoked; create a new key with: batchline keys create")
        return found

    found = in_store(flags, change)
    _show_secret(
        {
            "api_key": secret,
            "project_id": found.project_id,
            "organization_id": found.organization_id,
            "key_id": found.id,
        },
        as_json=as_json,
    )


async def _find(store: Store, key: str) -> Key:
    """Find a key by its id, or by its secret: the hint selects candidates and the digest decides."""
    digest, hint = ids.key_digest(key), hint_of(key)
    for known in await store.keys():
        if known.id == key:
            return known
        if known.hint == hint:
            owner = await store.owner_of(digest, known.project_id)
            if owner is not None and owner.key_id == known.id:
                return known
    # The argument may be a secret, so it is not repeated.
    raise click.ClickException("There is no such key. KEY is the key_id from: batchline keys list")


def _show_secret(fields: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        show_json(fields)
        return
    show_fields(fields)
    say("The key is shown only once and is stored only as a hash. Save it now.", err=True)


def _show_ready_lines(secret: str, flags: dict[str, Any]) -> None:
    """Print the lines that give the key to OpenAI clients: one for the shell and one for Python."""
    from batchline.cli.connection.local_service import url_of_folder  # noqa: PLC0415 (imports httpx)

    settings = Settings(**{name: value for name, value in flags.items() if value is not None})
    if not settings.bearer:
        return
    url = os.environ.get(_BASE_URL) or f"{url_of_folder(settings)}/v1"
    click.echo(f"\nShell   export OPENAI_BASE_URL={shlex.quote(url)} OPENAI_API_KEY={secret}")
    click.echo(f"Python  client = OpenAI(base_url={json.dumps(url)}, api_key={json.dumps(secret)})")


def _warn_of_another_service(flags: dict[str, Any]) -> None:
    """Warn if the service that clients would reach uses another data folder, because it does not know the key."""
    from batchline.cli.connection.local_service import url_of_another_folder  # noqa: PLC0415 (imports httpx)

    settings = Settings(**{name: value for name, value in flags.items() if value is not None})
    if (url := url_of_another_folder(settings)) is not None:
        say(
            f"Warning: the service at {url} uses another data folder than {settings.data_dir.resolve()} and does not "
            "know this key. Name its folder with --data-dir.",
            indent=2,
            err=True,
        )


def _row(key: Key) -> Row:
    return {
        "key_id": key.id,
        "hint": key.hint,
        "name": key.name,
        "scopes": key.scopes,
        "organization": key.organization,
        "organization_id": key.organization_id,
        "project": key.project,
        "project_id": key.project_id,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "last_used_at": key.last_used_at,
        "revoked_at": key.revoked_at,
    }


def _line(key: Key) -> tuple[str, ...]:
    return (
        key.id,
        key.hint,
        key.name or "-",
        key.scopes,
        key.organization,
        key.project,
        key.project_id,
        moment(key.created_at),
        moment(key.expires_at, without="never"),
        moment(key.last_used_at, without="never"),
        moment(key.revoked_at),
    )
