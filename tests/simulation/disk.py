"""The disk of a simulated world: at a crash it forgets what was not synced, and it may damage what it holds."""

import os
import random
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

_DAMAGED_FOLDERS = ("work", "segments", "results")
_KINDS = ("flip", "cut", "lose")


class Disk:
    """The folder of a world. What SQLite writes is left alone: it syncs by itself, where Python cannot see it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._objects = folder, folder / "objects"
        self._synced_sizes: dict[int, int] = {}
        """The size of each file at its last sync, by its inode."""
        self._synced_names: dict[int, dict[str, int]] = {}
        """The names in each folder at its last sync with their inodes, by the inode of the folder."""
        self.originals: dict[str, bytes] = {}
        """The bytes of objects that were damaged, by key."""

    @contextmanager
    def watching_syncs(self) -> Iterator[None]:
        """Note what is synced. Nothing is lost by a crash without it."""
        with mock.patch.object(os, "fsync", self._on_sync):
            yield

    def forget_unsynced(self, source: random.Random) -> None:
        """Forget what was not synced: all of it, or each name and each end of a file by chance."""
        self._forget_in(self._folder, source, chance=source.choice([0.5, 1.0]))

    def damage(self, source: random.Random) -> bool:
        """Flip a bit of an object, cut it, or lose it. Return False if there is no object."""
        paths = sorted(
            path
            for name in _DAMAGED_FOLDERS
            for path in (self._objects / name).rglob("*")
            if path.is_file() and path.stat().st_size
        )
        if not paths:
            return False
        path = source.choice(paths)
        data = bytearray(path.read_bytes())
        self.originals.setdefault(path.relative_to(self._objects).as_posix(), bytes(data))
        kind = source.choice(_KINDS)
        if kind == "lose":
            path.unlink()
            return True
        position = source.randrange(len(data))
        if kind == "flip":
            data[position] ^= 1 << source.randrange(8)
        path.write_bytes(data if kind == "flip" else data[:position])
        return True

    def _on_sync(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            with os.scandir(descriptor) as entries:
                self._synced_names[found.st_ino] = {entry.name: entry.inode() for entry in entries}
        else:
            self._synced_sizes[found.st_ino] = found.st_size

    def _forget_in(self, folder: Path, source: random.Random, *, chance: float) -> None:
        synced = self._synced_names.get(folder.stat().st_ino, {})
        with os.scandir(folder) as entries:
            found = sorted((entry.name, entry.inode(), entry.is_dir()) for entry in entries)
        for name, inode, is_folder in found:
            path = folder / name
            if ".sqlite" in name:
                continue
            if synced.get(name) != inode and source.random() < chance:
                _remove(path)
            elif is_folder:
                self._forget_in(path, source, chance=chance)
            elif path.stat().st_size > (size := self._synced_sizes.get(inode, 0)) and source.random() < chance:
                os.truncate(path, size)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
