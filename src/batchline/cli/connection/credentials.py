"""The API key that local runs use: created once per data folder and stored there, readable only by its owner.

It is kept after the run, because revoking a key fails the remaining lines of its batches, and a run may be resumed.
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from msgspec import Struct

from batchline.cli.new_key import new_key, new_secret
from batchline.domain import ids
from batchline.domain.errors import StoreDown
from batchline.locks import lock
from batchline.ports import Accounts
from batchline.settings import Settings

_PROJECT = "run"
_ORGANIZATION = "default"


class Credentials(Struct, frozen=True, kw_only=True):
    """A key and the project that it belongs to."""

    api_key: str
    project_id: str
    """Empty if the key is sent alone, as a bearer token."""

    @property
    def headers(self) -> dict[str, str]:
        """The request headers that carry them."""
        if not self.project_id:
            return {"authorization": f"Bearer {self.api_key}"}
        return {"x-api-key": self.api_key, "x-project-id": self.project_id}


def local_credentials(settings: Settings) -> Credentials:
    """Return the credentials of the data folder; create them if needed. A service may run on the folder."""
    from batchline.app import StartupError, open_store  # noqa: PLC0415 (all of the service: not for --help)

    async def find() -> Credentials:
        async with open_store(settings) as store:
            return await _find_or_create(store, settings.data_dir / "run.key")

    try:
        return asyncio.run(find())
    except (StartupError, StoreDown, OSError) as error:
        raise click.ClickException(str(error)) from None


async def _find_or_create(accounts: Accounts, path: Path) -> Credentials:
    """Return the key in the file, or a new one if there is none or if it was revoked."""
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
    """Open and lock the file, so that two runs that start at once create one key."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock(fd)
        yield fd
    finally:
        os.close(fd)
