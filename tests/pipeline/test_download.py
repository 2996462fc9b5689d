"""A file is found by either form of its id, and a missing object is known before the first byte is sent (B6, B7)."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from batchline.domain.checksum import checksum_of
from batchline.domain.errors import Damaged, FileDamaged, FileNotFound, ObjectMissing
from batchline.domain.records import BATCH, File
from batchline.pipeline.damage import DamageLog
from batchline.pipeline.download import Download
from batchline.telemetry.metrics import Metrics
from tests.support.clocks import SettableClock

pytestmark = pytest.mark.anyio

FILE = File(
    id="file-1",
    project_id="p",
    filename="a.jsonl",
    purpose=BATCH,
    bytes=6,
    created_at=0,
    expires_at=10**10,
    is_error=False,
    object_key="uploads/file-1",
)


class Files:
    async def file(self, project_id: str, file_id: str, *, at: int) -> File | None:
        return FILE if (project_id, file_id) == ("p", "file-1") else None


class Objects:
    def __init__(self, *chunks: bytes, missing: bool = False) -> None:
        self._chunks, self._missing = chunks, missing
        self.closed = False

    async def stream(self, key: str, start: int, length: int) -> AsyncIterator[bytes]:
        if self._missing:
            raise ObjectMissing(key)
        try:
            for chunk in self._chunks:
                yield chunk
        finally:
            self.closed = True


def download(objects: Any) -> Download:
    files: Any = Files()
    return Download(files=files, objects=objects, clock=SettableClock(), damage_log=DamageLog(Metrics()))


async def test_a_file_is_found_by_its_id_and_its_legacy_id() -> None:
    assert await download(Objects()).find("p", "file-1") is FILE
    assert await download(Objects()).find("p", "file_1") is FILE


@pytest.mark.parametrize(("project_id", "file_id"), [("q", "file-1"), ("p", "file-2")])
async def test_a_file_of_another_project_or_of_none_is_not_found(project_id: str, file_id: str) -> None:
    with pytest.raises(FileNotFound):
        await download(Objects()).find(project_id, file_id)


async def test_all_chunks_come_in_their_order() -> None:
    chunks = await download(Objects(b"ab", b"cd", b"ef")).open(FILE, start=0, length=6)
    assert [chunk async for chunk in chunks] == [b"ab", b"cd", b"ef"]


async def test_an_empty_part_is_no_error() -> None:
    chunks = await download(Objects()).open(FILE, start=0, length=0)
    assert b"".join([chunk async for chunk in chunks]) == b""


async def test_a_missing_object_is_known_before_the_first_byte() -> None:
    """B7: so it is a 404, and not a response that breaks off."""
    with pytest.raises(FileNotFound):
        await download(Objects(missing=True)).open(FILE, start=0, length=6)


async def test_a_client_that_leaves_closes_the_object() -> None:
    objects = Objects(b"ab", b"cd")
    chunks = await download(objects).open(FILE, start=0, length=4)
    assert await anext(chunks) == b"ab"
    await chunks.aclose()
    assert objects.closed


GOOD = replace(FILE, checksum=checksum_of(b"abcdef"))


async def test_a_whole_file_that_is_as_it_was_written_is_sent_whole() -> None:
    chunks = await download(Objects(b"ab", b"cdef")).open(GOOD, start=0, length=6)
    assert b"".join([chunk async for chunk in chunks]) == b"abcdef"


@pytest.mark.rule("B7", "A damaged file is never sent whole: the transfer breaks off before its last bytes.")
@pytest.mark.parametrize("pieces", [(b"ab", b"cdeX"), (b"Xb", b"cd", b"ef"), (b"ab", b"cd")])
async def test_a_damaged_file_breaks_off(pieces: tuple[bytes, ...]) -> None:
    """Changed or cut off: the client sees fewer bytes than were announced."""
    chunks = await download(Objects(*pieces)).open(GOOD, start=0, length=6)
    sent = [await anext(chunks) for _ in pieces[1:]]
    with pytest.raises(Damaged):
        await anext(chunks)
    assert len(b"".join(sent)) < 6


@pytest.mark.rule("B7", "A damaged file that is small is answered with 500 storage_error.")
async def test_a_small_damaged_file_is_known_before_the_first_byte() -> None:
    with pytest.raises(FileDamaged) as failed:
        await download(Objects(b"abcdeX")).open(GOOD, start=0, length=6)
    assert (failed.value.status, failed.value.code) == (500, "storage_error")


async def test_a_part_of_a_file_is_sent_as_it_is() -> None:
    """A checksum is of the whole file, so what is left of a damaged one can be read in parts."""
    chunks = await download(Objects(b"bX")).open(GOOD, start=1, length=2)
    assert b"".join([chunk async for chunk in chunks]) == b"bX"
