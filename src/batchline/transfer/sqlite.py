"""The rows of a backup as the database of a data folder."""

import os
from pathlib import Path

from batchline.transfer.contents import TransferError
from batchline.transfer.workspace import sync_folder

_OWN = {"lock", "objects", "scratch", "transfer"}
"""What a folder has that was only prepared, or that a restore which died has left."""


class SqliteRows:
    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir

    async def require_empty(self) -> None:
        found = {entry.name for entry in self._folder.iterdir()} - _OWN
        if found:
            raise TransferError(
                f"The data folder {self._folder} holds {min(found)} already. "
                "Restore into a folder that is empty or not there yet."
            )

    async def take(self, database: Path) -> None:
        _publish(database, self._folder)


def _publish(database: Path, folder: Path) -> None:
    with database.open("rb") as file:
        os.fsync(file.fileno())
    database.replace(folder / "batchline.sqlite")
    sync_folder(folder)
