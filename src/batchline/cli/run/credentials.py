"""The key of runs that need no server: made once a data folder, and kept in it for nobody but its owner.

It outlives the run, because revoking a key fails what is left of its batches, and a run may be picked up later.
"""

import asyncio
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from msgspec import Struct

from batchline.cli.new_key import new_key, new_secret
from batchline.domain import ids
from batchline.domain.errors import StoreDown
from batchline.ports import Accounts
from batchline.settings import Settings

_PROJECT = "run"
_ORGANIZATION = "default"


class Credentials(Struct, frozen=True, kw_only=True):
    api_key: str
    project_id: str

    @property
    def headers(self) -> dict[str, str]:
        return {"x-api-key": self.api_key, "x-project-id": self.project_id}


def folder_credentials(settings: Settings) -> Credentials:
    """Those of the data folder, also while it is served."""
    from batchline.app import StartupError, open_store  # noqa: PLC0415 (all of the service: not for --help)

    async def find() -> Credentials:
        async with open_store(settings) as store:
            return await _found_or_made(store, settings.data_dir / "run.key")

    try:
        return asyncio.run(find())
    except (StartupError, StoreDown, OSError) as refused:
        raise click.ClickException(str(refused)) from None


async def _found_or_made(accounts: Accounts, path: Path) -> Credentials:
    with _locked(path) as fd:
        secret = os.pread(fd, 1024, 0).decode("ascii", "replace").strip()
        owner = await accounts.owner_of(ids.key_digest(secret), None) if secret else None
        if owner is None:
            secret = new_secret()
            owner = await accounts.create_key(new_key(secret, project=_PROJECT, organization=_ORGANIZATION))
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{secret}\n".encode(), 0)
    return Credentials(api_key=secret, project_id=owner.project_id)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Two runs that begin at once make one key."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)
