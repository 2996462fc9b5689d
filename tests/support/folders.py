"""A folder of objects, opened and looked into."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from batchline.objects.local import LocalObjects
from batchline.system import SystemRandom, ThreadPool


@asynccontextmanager
async def folder(root: Path) -> AsyncIterator[LocalObjects]:
    threads = ThreadPool(4, name="objects")
    try:
        yield LocalObjects(root, threads, SystemRandom())
    finally:
        threads.close()


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
