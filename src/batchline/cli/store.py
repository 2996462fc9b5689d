"""Opens the store that a command uses. The service may run meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import click
from pydantic import TypeAdapter, ValidationError

from batchline.cli.loading import load_settings
from batchline.cli.options import settings_options
from batchline.domain.errors import StoreDown
from batchline.domain.money import nano
from batchline.domain.records import Organization, Project
from batchline.ports import Accounts, Store
from batchline.settings import Amount, Settings
from batchline.system import SystemClock

T = TypeVar("T")

_amount = TypeAdapter(Amount)

store_options = settings_options("data_dir", "database_url", "database_pooler", "config")


class Name(click.ParamType[str]):
    """A name of printable characters."""

    name = "name"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value.strip() or not value.isprintable():
            self.fail("expected a name of printable characters", param, ctx)
        return value


class Money(click.ParamType[int]):
    """An amount that is written in units and converted to nano-units."""

    name = "amount"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return nano(_amount.validate_python(value))
        except ValidationError:
            self.fail(f"{value!r} is not an amount from 0 to 999999999 with at most nine decimals", param, ctx)


def in_store(flags: dict[str, Any], action: Callable[[Store], Awaitable[T]], *, creates: bool = False) -> T:
    """Run an action on the store that the flags of ``store_options`` name.

    A store that does not exist is an error, unless the action ``creates`` something: then it is created, and a
    message says so.
    """
    settings = load_settings(**flags)
    from batchline.app import StartupError, has_database, open_store  # noqa: PLC0415 (all of the service: not for --help)

    if not creates:
        require_store(settings)
    elif not has_database(settings):
        click.echo(f"A new data folder is made: {settings.data_dir.resolve()}", err=True)

    async def run() -> T:
        async with open_store(settings) as store:
            return await action(store)

    try:
        return asyncio.run(run())
    except (StartupError, StoreDown) as error:
        raise click.ClickException(str(error)) from None


def require_store(settings: Settings) -> None:
    """Raise ClickException if there is no database where the settings say, so that a command makes no empty one."""
    from batchline.app import has_database  # noqa: PLC0415 (all of the service: not for --help)
    from batchline.cli.connection.local_service import url_of_another_folder  # noqa: PLC0415 (imports httpx)

    if has_database(settings):
        return
    url = url_of_another_folder(settings)
    other = f" The service at {url} uses another folder." if url else ""
    raise click.ClickException(
        f"There is no data of a service in {settings.data_dir.resolve()}.{other} Name the folder with --data-dir or "
        "BATCHLINE_DATA_DIR."
    )


async def find_organization(accounts: Accounts, wanted: str) -> Organization:
    """Find an organization by its id or name."""
    for known in await accounts.organizations():
        if wanted in (known.id, known.name):
            return known
    raise click.ClickException(f"There is no organization {wanted!r}. List all with: batchline orgs list")


async def find_project(accounts: Accounts, wanted: str) -> Project:
    """Find a project by its id, or by a name that only one organization uses."""
    found = [known for known in await accounts.projects() if wanted in (known.id, known.name)]
    if not found:
        raise click.ClickException(f"There is no project {wanted!r}. List all with: batchline projects list")
    if len(found) > 1:
        raise click.ClickException(f"Several projects are called {wanted!r}. Use an id from: batchline projects list")
    return found[0]


def describe_batches(batch_ids: Sequence[str]) -> str:
    """Return which open batches stand in the way of a deletion, and what to do about them."""
    shown = "a batch that has" if len(batch_ids) == 1 else "batches that have"
    named = ", ".join(batch_ids)
    return f"{shown} not ended: {named}. Wait until they end, or cancel each: batchline batches cancel BATCH"


def now() -> int:
    """Return the current time in whole seconds."""
    return int(SystemClock().now())
