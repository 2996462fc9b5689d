"""The store that a command works on, also while a service runs on it."""

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


def in_store(flags: dict[str, Any], work: Callable[[Store], Awaitable[T]]) -> T:
    """Do the work on the store that the flags of ``store_options`` name."""
    settings = load_settings(**flags)
    from batchline.app import StartupError, open_store  # noqa: PLC0415 (all of the service: not for --help)

    async def run() -> T:
        async with open_store(settings) as store:
            return await work(store)

    try:
        return asyncio.run(run())
    except (StartupError, StoreDown) as refused:
        raise click.ClickException(str(refused)) from None


async def find_organization(accounts: Accounts, wanted: str) -> Organization:
    """By id or name."""
    for known in await accounts.organizations():
        if wanted in (known.id, known.name):
            return known
    raise click.ClickException(f"There is no organization {wanted!r}. See: batchline orgs list")


async def find_project(accounts: Accounts, wanted: str) -> Project:
    """By id, or by a name that only one organization gave."""
    found = [known for known in await accounts.projects() if wanted in (known.id, known.name)]
    if not found:
        raise click.ClickException(f"There is no project {wanted!r}. See: batchline projects list")
    if len(found) > 1:
        raise click.ClickException(f"Several projects are called {wanted!r}; give an id of: batchline projects list")
    return found[0]


def now() -> int:
    return int(SystemClock().now())
