"""Creates a batch of the lines of an ended batch that failed.

Its input file is made from the input file of the ended batch or, if that was deleted, from the batch's own copy of its
lines. From then on it is a batch like every other: its input is a file of the project, and is validated.
"""

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

from msgspec import Raw, Struct
from msgspec.json import Decoder
from msgspec.json import encode as encode_json

from batchline.domain.errors import (
    BatchNotFound,
    Conflict,
    Damaged,
    InvalidRequest,
    ObjectMissing,
    ObjectsDown,
    ResultsUnavailable,
    StoreDown,
)
from batchline.domain.lines import Line, lines_of
from batchline.domain.merge_patch import MergePatch
from batchline.domain.records import Batch, File, Owner, Shard
from batchline.domain.result_lines import index_of
from batchline.domain.states import TERMINAL
from batchline.pipeline.create import BatchCreator, CreateAnswer, CreateRequest, RerunOf
from batchline.pipeline.line_reader import read_lines
from batchline.pipeline.upload import Upload
from batchline.ports import Batches, Files, Objects, Results, StoreClock, Work

log = logging.getLogger(__name__)

_BLANK = b" \t\r\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_WRITE_BYTES = 256 * 1024
_WINDOW_BYTES = 32 * 1024 * 1024
"""A work file is not in the order of the input. Its lines are sorted in windows of this size, each in one pass."""

_fields = Decoder(dict[str, Raw]).decode


class _Error(Struct):
    code: str


class _ErrorLine(Struct):
    error: _Error


_error_line = Decoder(_ErrorLine).decode


class _Store(Files, Batches, Results, Protocol):
    pass


class Rerun:
    """Creates batches of the failed lines of others."""

    def __init__(
        self, *, store: _Store, objects: Objects, upload: Upload, creator: BatchCreator, clock: StoreClock
    ) -> None:
        self._store, self._objects, self._clock = store, objects, clock
        self._upload, self._creator = upload, creator

    async def create(
        self,
        owner: Owner,
        parent_id: str,
        *,
        codes: frozenset[str] | None,
        patch: bytes | None,
        metadata: bytes,
        idempotency_key: str | None,
        retried: bool,
        admit: Callable[[], None],
    ) -> CreateAnswer:
        """Create a batch of the lines that failed, with one of the codes if some are given, or replay a response.

        Raise BatchNotFound, Conflict, InvalidRequest or ResultsUnavailable.
        """
        parent = await self._store.batch(owner.project_id, parent_id)
        if parent is None:
            raise BatchNotFound(parent_id)
        merge_patch = None if patch is None else MergePatch.parse(patch)
        rerun = RerunOf(batch_id=parent.id, codes=None if codes is None else sorted(codes), patch=patch)
        made: list[File] = []

        async def make_input() -> File:
            made.append(await self._make_input(parent, codes, merge_patch))
            return made[0]

        try:
            answer = await self._creator.create(
                owner,
                CreateRequest(input_file_id="", endpoint=parent.endpoint, metadata=metadata, rerun=rerun),
                idempotency_key=idempotency_key,
                retried=retried,
                admit=admit,
                make_input=make_input,
            )
        except BaseException:
            await self._delete(made)
            raise
        if answer.replayed:
            await self._delete(made)
        return answer

    async def _delete(self, files: list[File]) -> None:
        """Delete input files that no batch was made of."""
        for file in files:
            try:
                await self._store.delete_file(file.project_id, file.id, at=int(self._clock.due()))
                await self._objects.delete(file.object_key)
            except (StoreDown, ObjectsDown) as error:
                log.warning("failed to delete an unused input file", extra={"file": file.id, "reason": str(error)})

    async def _make_input(self, parent: Batch, codes: frozenset[str] | None, patch: MergePatch | None) -> File:
        if parent.status not in TERMINAL:
            raise Conflict(f"Batch {parent.id} is {parent.status} and has not ended", code="batch_not_terminal")
        failed = await self._failed_lines(parent, codes)
        if not failed:
            raise InvalidRequest(f"Batch {parent.id} has no such line that failed", code="nothing_to_rerun")
        lines = await self._input_lines(parent, failed, patch)
        async with self._upload.begin(parent.project_id) as incoming:
            buffer: list[bytes] = []
            size = 0
            async for line in lines:
                buffer.append(line)
                size += len(line)
                if size >= _WRITE_BYTES:
                    await incoming.write(b"".join(buffer))
                    buffer, size = [], 0
            await incoming.write(b"".join(buffer))
            return await incoming.finish(filename=f"{parent.id}_rerun.jsonl", expires_after=None)

    async def _failed_lines(self, parent: Batch, codes: frozenset[str] | None) -> frozenset[int]:
        """Return which lines failed, with one of the codes."""
        if parent.error_file_id is None:
            return frozenset()
        file = await self._file(parent, parent.error_file_id)
        if file is None:
            raise ResultsUnavailable(parent.id)
        failed: set[int] = set()
        async for lines in read_lines(self._objects, file.object_key, file.bytes):
            failed.update(index_of(line) for line in lines if codes is None or _error_line(line).error.code in codes)
        return frozenset(failed)

    async def _file(self, parent: Batch, file_id: str) -> File | None:
        """Return a file of the batch that still exists, with its object."""
        file = await self._store.file(parent.project_id, file_id, at=int(self._clock.due()))
        if file is None:
            return None
        try:
            await self._objects.read(file.object_key, 0, 1)
        except ObjectMissing:
            return None
        return file

    async def _input_lines(
        self, parent: Batch, wanted: frozenset[int], patch: MergePatch | None
    ) -> AsyncIterator[bytes]:
        file = await self._file(parent, parent.input_file_id)
        if file is not None:
            return _lines_of_input(self._objects, file, wanted, patch)
        work = await self._store.work_of(parent.id)
        try:
            if work is not None:
                sizes = await self._sizes_in_work(work, wanted)
                return self._lines_of_work(work, sizes, patch, url=parent.endpoint)
        except (ObjectMissing, Damaged) as error:
            log.warning("the lines of a batch cannot be read again", extra={"batch": parent.id, "reason": repr(error)})
        raise Conflict(
            f"The input file of batch {parent.id} was deleted, and the batch's own copy of it too",
            code="input_unavailable",
        )

    async def _sizes_in_work(self, work: Work, wanted: frozenset[int]) -> dict[int, int]:
        """Return the size of each wanted line, by its index and in the order of the input."""
        sizes: dict[int, int] = {}
        for shard in _distinct(work.shards):
            sizes |= {
                line.index: len(line.body) for line in await self._read_shard(work, shard) if line.index in wanted
            }
        return dict(sorted(sizes.items()))

    async def _lines_of_work(
        self, work: Work, sizes: dict[int, int], patch: MergePatch | None, *, url: str
    ) -> AsyncIterator[bytes]:
        """Yield lines in the order of the input: all that fit into a window, then those of the next one."""
        for window in _windows(sizes):
            found: dict[int, bytes] = {}
            for shard in _distinct(work.shards):
                for line in await self._read_shard(work, shard):
                    if line.index in window:
                        found[line.index] = _request_of(line, patch, url=url)
            for index in sorted(found):
                yield found[index]

    async def _read_shard(self, work: Work, shard: Shard) -> list[Line]:
        return lines_of(shard, await self._objects.read(work.key, shard.offset, shard.length))


async def _lines_of_input(
    objects: Objects, file: File, wanted: frozenset[int], patch: MergePatch | None
) -> AsyncIterator[bytes]:
    """Yield the wanted lines of an input file. Blank lines do not count (C4)."""
    index, is_first = 0, True
    async for lines in read_lines(objects, file.object_key, file.bytes):
        for piece in lines:
            line = piece.removeprefix(_BYTE_ORDER_MARK) if is_first else piece
            is_first = False
            line = line.strip(_BLANK)
            if not line:
                continue
            if index in wanted:
                yield _patched(line, patch) + b"\n"
            index += 1


def _patched(line: bytes, patch: MergePatch | None) -> bytes:
    if patch is None:
        return line
    fields = _fields(line)
    return encode_json(fields | {"body": Raw(patch.apply(bytes(fields["body"])))})


def _request_of(line: Line, patch: MergePatch | None, *, url: str) -> bytes:
    body = line.body if patch is None else patch.apply(line.body)
    fields = {"custom_id": Raw(line.custom_id), "method": "POST", "url": url, "body": Raw(body)}
    return encode_json(fields) + b"\n"


def _distinct(shards: list[Shard]) -> Iterator[Shard]:
    """Yield each part of the work file once. The pieces of a shard that was split share one."""
    return iter({shard.offset: shard for shard in reversed(shards)}.values())


def _windows(sizes: dict[int, int]) -> Iterator[set[int]]:
    """Yield the lines in groups that fit into a window, in order."""
    window: set[int] = set()
    space = _WINDOW_BYTES
    for index, size in sizes.items():
        if window and size > space:
            yield window
            window, space = set(), _WINDOW_BYTES
        window.add(index)
        space -= size
    if window:
        yield window
