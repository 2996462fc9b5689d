"""The search for a custom_id: how much one search reads, and where the next one goes on."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from batchline.domain.errors import ObjectMissing
from batchline.domain.records import BATCH, Batch, File
from batchline.domain.states import BatchStatus
from batchline.pipeline import line_search
from batchline.pipeline.line_search import LineSearch
from tests.support.clocks import SettableClock

pytestmark = pytest.mark.anyio

_CHUNK_BYTES = 7
WANTED = b'{"custom_id":"x"}\n'


class _Stored:
    """Batches with their input files, the newest first, and how many bytes of these were read."""

    def __init__(self, *inputs: bytes | None) -> None:
        self.inputs = {f"file-{number}": data for number, data in enumerate(inputs)}
        self.read = 0

    async def batches(self, _project_id: str, *, after: str | None, limit: int) -> list[Batch] | None:
        found = [_batch(file_id) for file_id in self.inputs]
        first = 0 if after is None else [batch.id for batch in found].index(after) + 1
        return found[first : first + limit]

    async def file(self, _project_id: str, file_id: str, *, at: int) -> File | None:
        return _file(file_id, self.inputs[file_id] or b"gone")

    async def stream(self, key: str, start: int, length: int) -> AsyncIterator[bytes]:
        data = self.inputs[key]
        if data is None:
            raise ObjectMissing(key)
        self.read += len(data)
        for at in range(start, min(start + length, len(data)), _CHUNK_BYTES):
            yield data[at : at + _CHUNK_BYTES]


def _batch(file_id: str) -> Batch:
    fields: dict[str, Any] = dict.fromkeys(Batch.__struct_fields__[: -len(Batch.__struct_defaults__)])
    return Batch(**fields | {"id": f"batch-{file_id}", "input_file_id": file_id, "status": BatchStatus.COMPLETED})


def _file(file_id: str, data: bytes) -> File:
    return File(
        id=file_id,
        project_id="p",
        filename="in",
        purpose=BATCH,
        bytes=len(data),
        created_at=0,
        expires_at=1,
        is_error=False,
        object_key=file_id,
    )


def _search(stored: Any) -> LineSearch:
    return LineSearch(files=stored, batches=stored, objects=stored, clock=SettableClock())


async def test_a_search_reads_so_many_bytes_and_says_where_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_search, "MAX_SEARCHED_BYTES", 100)
    stored = _Stored(b"a" * 500, WANTED, b"c" * 90, WANTED)
    found: list[str] = []
    steps: list[tuple[int, int]] = []
    after: str | None = None
    while True:
        result = await _search(stored).find("p", "x", after=after)
        assert result is not None
        found += [line.batch.id for line in result.lines]
        steps.append((result.batches, result.bytes))
        after = result.next
        if after is None:
            break
    assert found == ["batch-file-1", "batch-file-3"]
    assert steps == [(1, 500), (1, 18), (1, 90), (1, 18)]
    assert stored.read == 662, "a file with the text is read twice"


async def test_a_search_looks_at_so_many_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_search, "MAX_SEARCHED_BATCHES", 2)
    stored = _Stored(None, b"", WANTED)
    first = await _search(stored).find("p", "x", after=None)
    assert first is not None
    assert (first.lines, first.batches, first.deleted, first.next) == ([], 1, 1, "batch-file-1")
    second = await _search(stored).find("p", "x", after=first.next)
    assert second is not None
    assert ([line.number for line in second.lines], second.next) == ([1], None)


async def test_a_project_without_batches_has_no_lines() -> None:
    result = await _search(_Stored()).find("p", "x", after=None)
    assert result is not None
    assert (result.lines, result.next) == ([], None)


async def test_only_a_custom_id_counts_and_only_the_whole_of_it() -> None:
    others = b'\n{"custom_id":"xy","body":"x"}\n{"custom_id":"y","x":"x"}\n"x"\n'
    result = await _search(_Stored(others + b' {"custom_id" : "x"}')).find("p", "x", after=None)
    assert result is not None
    assert [line.number for line in result.lines] == [4]


@pytest.mark.parametrize("beginning", [b"", b"\n", b" \r\n\n"])
async def test_blank_lines_and_a_byte_order_mark_do_not_count(beginning: bytes) -> None:
    """C4: a line has the same number here as in the results."""
    data = b"\xef\xbb\xbf" + beginning + b'{"custom_id":"w"}\n' + WANTED
    result = await _search(_Stored(data)).find("p", "x", after=None)
    assert result is not None
    assert [line.number for line in result.lines] == [2]


@pytest.mark.parametrize(
    ("custom_id", "written"),
    [
        ("caf\u00e9", rb"caf\u00E9"),
        ("caf\u00e9", rb"caf\u00e9"),
        ("caf\u00e9", "caf\u00e9".encode()),
        ("caf\u00e9", rb"\u0063\u0061\u0066\u00E9"),
        ("<a/b>", rb"\u003ca\/b\u003E"),
        ("<a/b>", rb"\u003Ca\u002fb>"),
        ("<a/b>", b"<a/b>"),
        ("\U0001f600", rb"\uD83D\ude00"),
        ("\U0001f600", "\U0001f600".encode()),
        ('"\\', rb"\"\\"),
        ('"\\', rb"\u0022\u005C"),
        ("\t\n\b", rb"\t\u000A\b"),
        ("a.*b", b"a.*b"),
        ("x" * 300, b"x" * 300),
        ("\U0001f600" * 300, rb"\uD83D\uDE00" * 300),
        ("", b""),
    ],
)
async def test_a_custom_id_is_found_however_json_escaped_it(custom_id: str, written: bytes) -> None:
    line = b'{"body":{"a":"\\\\"},"custom_id":"%s"}\n' % written
    assert await _found(line, custom_id) == [1]
    assert await _found(line, f"{custom_id}!") == []
    assert await _found(line, f"!{custom_id}") == []


async def _found(data: bytes, custom_id: str) -> list[int]:
    result = await _search(_Stored(data)).find("p", custom_id, after=None)
    assert result is not None
    return [line.number for line in result.lines]


@pytest.mark.parametrize("custom_id", ["\ud83d", "a" * 8192, "\x00"])
async def test_any_text_can_be_looked_for(custom_id: str) -> None:
    assert await _found(WANTED, custom_id) == []


@pytest.mark.rule("D8", "A search for lines does not wait behind many searches of another project.")
async def test_projects_take_turns() -> None:
    stored, ended = _Stalled(b"", b""), list[str]()
    search = _search(stored)

    async def find(project_id: str) -> None:
        await search.find(project_id, "x", after=None)
        ended.append(project_id)

    async with asyncio.TaskGroup() as group:
        for project_id in ("many",) * 6 + ("few",):
            group.create_task(find(project_id))
        await asyncio.sleep(0)
        stored.is_open.set()
    assert ended.index("few") <= 3


class _Stalled(_Stored):
    """Files that can be read only when ``is_open`` is set."""

    def __init__(self, *inputs: bytes) -> None:
        super().__init__(*inputs)
        self.is_open = asyncio.Event()

    async def file(self, project_id: str, file_id: str, *, at: int) -> File | None:
        await self.is_open.wait()
        return await super().file(project_id, file_id, at=at)
