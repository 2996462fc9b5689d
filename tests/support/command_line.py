"""The command line on one data folder, as an operator has it."""

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
        """The exit code and what was told beside the output, of which there is none."""
        result = self.call(*arguments)
        assert result.exit_code != 0
        assert result.stdout == ""
        return result.exit_code, result.stderr

    def in_store(self, work: Callable[[Store], Awaitable[T]]) -> T:
        """What the service would do."""

        async def run() -> T:
            async with open_store(load_settings(data_dir=str(self.folder))) as store:
                return await work(store)

        return asyncio.run(run())

    def owner(self, secret: str, project_id: str) -> Owner | None:
        """Whom the service would take a request with this key for."""
        return self.in_store(lambda store: store.owner_of(ids.key_digest(secret), project_id))


def cells(table: str) -> list[list[str]]:
    """Of a table that was printed; no cell of the tests holds a space."""
    return [line.split() for line in table.splitlines()]
