"""An object that cannot be read is damage; an object store that cannot be used is not."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.errors import ObjectsDown
from batchline.fsck.findings import Checked
from batchline.fsck.reading import ObjectReader, Unreadable
from batchline.objects.local import LocalObjects
from batchline.system import SystemRandom, ThreadPool

pytestmark = pytest.mark.anyio


class BadSector(LocalObjects):
    """A disk that cannot read one object. ``works`` says whether everything else can be used."""

    works = True

    async def stream(self, key: str, start: int, length: int) -> AsyncIterator[bytes]:
        yield b"half"
        raise ObjectsDown("Input/output error")

    async def check(self) -> None:
        if not self.works:
            raise ObjectsDown("no such device")


@pytest.fixture
def threads() -> Any:
    pool = ThreadPool(1, name="disk")
    yield pool
    pool.close()


async def test_one_object_that_cannot_be_read_is_damage(tmp_path: Path, threads: ThreadPool) -> None:
    objects = BadSector(tmp_path, threads, SystemRandom())
    reader = ObjectReader(objects, Checked())
    with pytest.raises(Unreadable, match="cannot be read: Input/output error"):
        await reader.read("uploads/x", 0, 10)
    with pytest.raises(Unreadable):
        _ = [line async for line in reader.lines("uploads/x", 10)]
    objects.works = False
    with pytest.raises(ObjectsDown):
        await reader.read("uploads/x", 0, 10)


async def test_lines_are_split_wherever_chunks_end(tmp_path: Path, threads: ThreadPool) -> None:
    objects = LocalObjects(tmp_path, threads, SystemRandom())
    data = b"a" * 300_000 + b"\n\n" + b"b" * 600_000 + b"\nrest"
    await objects.put("uploads/x", data)
    checked = Checked()
    lines = [line async for line in ObjectReader(objects, checked).lines("uploads/x", len(data) + 1)]
    assert lines == [b"a" * 300_000 + b"\n", b"\n", b"b" * 600_000 + b"\n", b"rest"]
    assert checked.bytes == len(data)


@pytest.mark.parametrize(("size", "problem"), [(3, "longer"), (5, "shorter"), (9, "shorter")])
async def test_the_size_of_an_object_is_compared(tmp_path: Path, threads: ThreadPool, size: int, problem: str) -> None:
    objects = LocalObjects(tmp_path, threads, SystemRandom())
    await objects.put("uploads/x", b"four")
    reader = ObjectReader(objects, Checked())
    await reader.require_size("uploads/x", 4)
    with pytest.raises(Unreadable, match=problem):
        await reader.require_size("uploads/x", size)
    with pytest.raises(Unreadable, match="is missing"):
        await reader.require_size("uploads/y", size)
