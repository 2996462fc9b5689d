"""Calls the command line on one data folder, as an operator would."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from click.testing import CliRunner, Result

from batchline.app import open_store
from batchline.cli import main
from batchline.cli.loading import load_settings
from batchline.domain import ids
from batchline.domain.records import Owner
from batchline.ports import Store

T = TypeVar("T")


class Shell:
    """The command line with one data folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def call(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, [*arguments, "--data-dir", str(self.folder)])

    def text(self, *arguments: str) -> str:
        result = self.call(*arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.text(*arguments, "--json"))

    def refusal(self, *arguments: str) -> tuple[int, str]:
        """Return the exit code and stderr of a command that must fail and print nothing to stdout."""
        result = self.call(*arguments)
        assert result.exit_code != 0
        assert result.stdout == ""
        return result.exit_code, result.stderr

    def in_store(self, action: Callable[[Store], Awaitable[T]]) -> T:
        """Run an action on the store of the folder."""

        async def run() -> T:
            async with open_store(load_settings(data_dir=str(self.folder))) as store:
                return await action(store)

        return asyncio.run(run())

    def owner(self, secret: str, project_id: str) -> Owner | None:
        """Return the owner that the service would find for a request with this key."""
        return self.in_store(lambda store: store.owner_of(ids.key_digest(secret), project_id))


def cells(table: str) -> list[list[str]]:
    """Return the cells of a printed table. No cell of the tests contains a space."""
    return [line.split() for line in table.splitlines()]
