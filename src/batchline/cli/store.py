"""Opens the store that a command uses. The service may run meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click

from batchline.cli.loading import load_settings
from batchline.cli.options import settings_options
from batchline.domain.errors import StoreDown
from batchline.domain.records import Organization, Project
from batchline.ports import Accounts, Store
from batchline.system import SystemClock

T = TypeVar("T")

store_options = settings_options("data_dir", "database_url", "database_pooler", "config")


def in_store(flags: dict[str, Any], action: Callable[[Store], Awaitable[T]]) -> T:
    """Run an action on the store that the flags of ``store_options`` name."""
    settings = load_settings(**flags)
    from batchline.app import StartupError, open_store  # noqa: PLC0415 (all of the service: not for --help)

    async def run() -> T:
        async with open_store(settings) as store:
            return await action(store)

    try:
        return asyncio.run(run())
    except (StartupError, StoreDown) as error:
        raise click.ClickException(str(error)) from None


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


def now() -> int:
    """Return the current time in whole seconds."""
    return int(SystemClock().now())
