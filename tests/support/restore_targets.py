"""Runs the commands ``backup`` and ``restore``, and looks into the stores that a backup was restored to."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from click.testing import CliRunner, Result

from batchline.app.backends import open_objects, open_store
from batchline.cli import main
from batchline.cli.loading import load_settings
from batchline.ports import Objects, Store
from batchline.settings import Settings

T = TypeVar("T")
WHOLE = 1 << 40


class Target:
    """A store and objects, named by flags of the command line."""

    def __init__(self, data_dir: Path, **settings: str) -> None:
        self.data_dir = data_dir
        self.settings = {"data_dir": str(data_dir)} | settings

    @property
    def flags(self) -> list[str]:
        return [f"--{name.replace('_', '-')}={value}" for name, value in self.settings.items()]

    def restore(self, archive: Path) -> Result:
        """Run ``restore``."""
        return CliRunner().invoke(main, ["restore", str(archive), *self.flags])

    def refusal(self, archive: Path) -> str:
        """Run ``restore``, which must refuse, and return its message."""
        result = self.restore(archive)
        assert result.exit_code == 1, result.output
        assert result.stdout == ""
        return result.stderr

    def in_store(self, work: Callable[[Store], Awaitable[T]]) -> T:
        async def run() -> T:
            async with open_store(self._loaded()) as store:
                return await work(store)

        return asyncio.run(run())

    def read(self, key: str) -> bytes:
        async def run(objects: Objects) -> bytes:
            return b"".join([chunk async for chunk in objects.stream(key, 0, WHOLE)])

        return self.in_objects(run)

    def in_objects(self, work: Callable[[Objects], Awaitable[T]]) -> T:
        async def run() -> T:
            async with open_objects(self._loaded()) as objects:
                return await work(objects)

        return asyncio.run(run())

    def _loaded(self) -> Settings:
        return load_settings(**self.settings)


def back_up(data_dir: Path, archive: Path, *flags: str) -> str:
    """Take a backup, and return what the command printed."""
    result = try_to_back_up(data_dir, archive, *flags)
    assert result.exit_code == 0, result.output
    return result.stdout


def try_to_back_up(data_dir: Path, archive: Path, *flags: str) -> Result:
    return CliRunner().invoke(main, ["backup", str(archive), f"--data-dir={data_dir}", *flags])
