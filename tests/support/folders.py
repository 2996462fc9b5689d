"""Opens the objects of a folder, and lists its files."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from batchline.objects.local import LocalObjects
from batchline.system import SystemRandom, ThreadPool


@asynccontextmanager
async def folder(root: Path) -> AsyncIterator[LocalObjects]:
    """Open the objects of a folder."""
    threads = ThreadPool(4, name="objects")
    try:
        yield LocalObjects(root, threads, SystemRandom())
    finally:
        threads.close()


def files_below(root: Path) -> list[str]:
    """Return the relative paths of all files below a folder."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
