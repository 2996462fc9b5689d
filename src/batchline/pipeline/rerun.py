"""Creates a batch of the lines of an ended batch that failed.

Its input file is made from the input file of the ended batch or, if that was deleted, from the batch's own copy of its
lines. From then on it is a batch like every other: its input is a file of the project, and is validated.
"""

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder
from msgspec.json import encode as encode_json

from batchline.domain.errors import (
    BatchNotFound,
    Conflict,
    Damaged,
    FileDamaged,
    InvalidRequest,
    ObjectMissing,
    ObjectsDown,
    ResultsUnavailable,
    StoreDown,
)
from batchline.domain.input_lines import InputLines
from batchline.domain.lines import Line, lines_of
from batchline.domain.merge_patch import MergePatch
from batchline.domain.records import Batch, File, Owner, Shard
from batchline.domain.result_lines import index_of
from batchline.domain.states import TERMINAL
from batchline.pipeline.create import BatchCreator, CreateAnswer, CreateRequest, RerunOf
from batchline.pipeline.damage import DamageLog
from batchline.pipeline.line_reader import read_intact_lines
from batchline.pipeline.upload import Upload
from batchline.ports import Batches, Files, Objects, Results, StoreClock, Work

log = logging.getLogger(__name__)

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
        self,
        *,
        store: _Store,
        objects: Objects,
        upload: Upload,
        creator: BatchCreator,
        clock: StoreClock,
        damage_log: DamageLog,
    ) -> None:
        self._store, self._objects, self._clock, self._damage_log = store, objects, clock, damage_log
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

        Raise BatchNotFound, Conflict, InvalidRequest, ResultsUnavailable or FileDamaged.
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
            which = "" if codes is None else " with these codes"
            raise InvalidRequest(f"Batch {parent.id} has no failed line{which}", code="nothing_to_rerun")
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
        """Return the indexes of lines that failed with one of the codes. Raise ResultsUnavailable or FileDamaged."""
        if parent.error_file_id is None:
            return frozenset()
        file = await self._store.file(parent.project_id, parent.error_file_id, at=int(self._clock.due()))
        if file is None:
            raise ResultsUnavailable(parent.id)
        failed: set[int] = set()
        try:
            async for lines in read_intact_lines(self._objects, file):
                failed.update(index_of(line) for line in lines if codes is None or _code_of(line) in codes)
        except (Damaged, ObjectMissing) as error:
            raise self._damaged(file) from error
        return frozenset(failed)

    def _damaged(self, file: File) -> FileDamaged:
        """Report a damaged file, and return the error that names it."""
        self._damage_log.report("file", key=file.object_key, file_id=file.id)
        return FileDamaged(file.id)

    async def _input_file(self, parent: Batch) -> File | None:
        """Return the input file of the batch, or None if the file or its object does not exist any more."""
        file = await self._store.file(parent.project_id, parent.input_file_id, at=int(self._clock.due()))
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
        file = await self._input_file(parent)
        if file is not None:
            return self._lines_of_input(file, wanted, patch)
        work = await self._store.work_of(parent.id)
        if work is None:
            raise _input_unavailable(parent)
        return self._lines_of_work(parent, work, wanted, patch)

    async def _lines_of_input(
        self, file: File, wanted: frozenset[int], patch: MergePatch | None
    ) -> AsyncIterator[bytes]:
        """Yield the wanted lines of an input file. Blank lines do not count (C4). Raise FileDamaged."""
        counted, found = InputLines(), 0
        try:
            async for lines in read_intact_lines(self._objects, file):
                for line in lines:
                    text = counted.take(line)
                    if text is not None and counted.count - 1 in wanted:
                        found += 1
                        yield _patched(text, patch) + b"\n"
        except (Damaged, ObjectMissing) as error:
            raise self._damaged(file) from error
        if found != len(wanted):
            raise self._damaged(file)

    async def _lines_of_work(
        self, parent: Batch, work: Work, wanted: frozenset[int], patch: MergePatch | None
    ) -> AsyncIterator[bytes]:
        """Yield the wanted lines from the batch's own copy, in the order of the input. Raise Conflict."""
        try:
            sizes = await self._sizes_in_work(work, wanted)
            async for line in self._sorted_lines(work, sizes, patch, url=parent.endpoint):
                yield line
        except (ObjectMissing, Damaged) as error:
            log.warning("the lines of a batch cannot be read again", extra={"batch": parent.id, "reason": repr(error)})
            raise _input_unavailable(parent) from error

    async def _sizes_in_work(self, work: Work, wanted: frozenset[int]) -> dict[int, int]:
        """Return the size of each wanted line, by its index and in the order of the input. Raise Damaged."""
        sizes: dict[int, int] = {}
        for shard in _distinct(work.shards):
            sizes |= {
                line.index: len(line.body) for line in await self._read_shard(work, shard) if line.index in wanted
            }
        if len(sizes) != len(wanted):
            raise Damaged(work.key)
        return dict(sorted(sizes.items()))

    async def _sorted_lines(
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


def _code_of(line: bytes) -> str:
    """Return the code of a line of an error file. Raise Damaged."""
    try:
        return _error_line(line).error.code
    except (DecodeError, UnicodeDecodeError) as error:
        raise Damaged("a line without an error") from error


def _input_unavailable(parent: Batch) -> Conflict:
    return Conflict(
        f"The input file of batch {parent.id} was deleted, and the batch's own copy of it too",
        code="input_unavailable",
    )


def _patched(line: bytes, patch: MergePatch | None) -> bytes:
    """Return a line of an input file with a patched body. Raise Damaged if it is not as it was validated."""
    if patch is None:
        return line
    try:
        fields = _fields(line)
        return encode_json(fields | {"body": Raw(patch.apply(bytes(fields["body"])))})
    except (DecodeError, UnicodeDecodeError, KeyError) as error:
        raise Damaged("a line without a body") from error


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
