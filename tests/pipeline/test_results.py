"""A reader of results gets every line once, in an order that never changes, whatever happens to the batch (G2)."""

import json
import sqlite3
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.errors import FileDamaged, InvalidRequest, ResultsUnavailable
from batchline.domain.records import Batch
from batchline.domain.result_order import START, Cursor
from batchline.domain.states import TERMINAL
from batchline.pipeline.results import LineStatus, PlacedResult
from batchline.upstream.mock.script import Plan
from tests.support.engine_harness import Bench

_MIXED = Plan(status={400: 30})


@pytest.fixture(params=["rows", "objects"], autouse=True)
def _where_segments_are(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small segments are in their rows, large ones are objects: both are read alike."""
    if request.param == "objects":
        monkeypatch.setattr("batchline.pipeline.record.INLINE_SEGMENT_BYTES", 1)


class Reader:
    """A client that pages through the results of a batch, a few lines at a time."""

    def __init__(self, bench: Bench, batch: Batch, *, limit: int = 7, status: LineStatus | None = None) -> None:
        self._bench, self._batch, self._limit, self._status = bench, batch, limit, status
        self.cursor = START
        self.lines: list[bytes] = []

    async def page(self) -> bool:
        """Read a page, and return whether the results are at their end."""
        stream = await self._bench.engine.api_role.services.results.open(
            self._batch.project_id, self._batch.id, after=self.cursor, status=self._status
        )
        shown = (await stream.read())[: self._limit]
        self._take(shown)
        return stream.ended

    def _take(self, shown: list[PlacedResult]) -> None:
        self.lines += [result.line for result in shown]
        if shown:
            text = str(shown[-1].cursor)
            self.cursor = Cursor.parse(text) or START
            assert str(self.cursor) == text

    async def read_all(self) -> list[bytes]:
        while not await self.page():
            pass
        return self.lines

    @property
    def ids(self) -> list[str]:
        return [json.loads(line)["custom_id"] for line in self.lines]


def _prompts(lines: int = 64) -> list[str]:
    return [f"good {n}" for n in range(lines)]


async def _all(bench: Bench, batch: Batch, **options: Any) -> list[bytes]:
    return await Reader(bench, batch, **options).read_all()


async def _lines_of_files(bench: Bench, batch: Batch) -> list[bytes]:
    files = [await bench.content(batch.project_id, id_) for id_ in (batch.output_file_id, batch.error_file_id)]
    return sorted(b"".join(files).splitlines(keepends=True))


async def _follow(bench: Bench, batch: Batch, reader: Reader) -> Batch:
    """Page through the results while the batch runs, to their end."""
    while not await reader.page():
        await bench.engine.api_role.services.clock.sleep(0.05)
    return await bench.seen(batch.id)


def _prune(bench: Bench) -> None:
    """Delete the work of ended batches, as the service does a day after their end."""
    bench.skip(2 * 86_400)


def _play(bench: Bench, scene: Coroutine[Any, Any, Any], *, seconds: float = 400) -> Any:
    return bench.play(scene, seconds=seconds)


@pytest.mark.rule("G2", "Results are read while the batch runs, each line once and as it is in the files later.")
def test_a_reader_that_follows_gets_every_line_once(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, plan=_MIXED, latency=0.2, max_concurrency=4)) as bench:

        async def scene() -> None:
            batch = await bench.batch(_prompts())
            reader, seen_running = Reader(bench, batch), 0
            while not await reader.page():
                if (await bench.seen(batch.id)).status not in TERMINAL:
                    seen_running = len(reader.lines)
                await bench.engine.api_role.services.clock.sleep(0.05)
            ended = await bench.seen(batch.id)
            assert seen_running > 0
            assert 0 < ended.failed < 64
            assert sorted(reader.lines) == await _lines_of_files(bench, ended)
            assert await _all(bench, batch, limit=1) == reader.lines

        _play(bench, scene())


@pytest.mark.rule("G2", "The order is the same for every reader, while the batch runs, after its end and much later.")
def test_the_order_stays_when_the_work_of_a_batch_is_deleted(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, plan=_MIXED, latency=0.2, max_concurrency=4)) as bench:

        async def scene() -> None:
            batch = await bench.batch(_prompts())
            follower = Reader(bench, batch)
            await _follow(bench, batch, follower)
            half = Reader(bench, batch, limit=5)
            while len(half.lines) < 30:
                await half.page()
            _prune(bench)
            while await bench.rows.work_of(batch.id) is not None:
                await bench.engine.api_role.services.clock.sleep(1)
            assert await bench.rows.segments(batch.id, after=0, limit=9) == []
            assert await half.read_all() == follower.lines
            assert await _all(bench, batch) == follower.lines

        _play(bench, scene(), seconds=200_000)


@pytest.mark.rule("G2", "With status, a page has the lines of one file, in the same order.")
@pytest.mark.parametrize("status", LineStatus)
def test_a_filter_leaves_out_the_lines_of_the_other_file(tmp_path: Path, status: LineStatus) -> None:
    with closing(Bench(tmp_path, plan=_MIXED, latency=0.2, max_concurrency=4)) as bench:

        async def scene() -> None:
            batch = await bench.batch(_prompts())
            follower = Reader(bench, batch, status=status)
            ended = await _follow(bench, batch, follower)
            whole = await _all(bench, batch)
            failed = status is LineStatus.FAILED
            assert follower.lines == [line for line in whole if (json.loads(line)["error"] is not None) is failed]
            assert len(follower.lines) == (ended.failed if failed else ended.completed)
            assert await _all(bench, batch, status=status, limit=2) == follower.lines

        _play(bench, scene())


@pytest.mark.rule("G2", "Lines that never ran come after the others, once.")
def test_lines_that_never_ran_come_last(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, latency=5, max_concurrency=4)) as bench:

        async def scene() -> None:
            batch = await bench.batch(_prompts())
            await bench.until(batch, lambda seen: seen.completed >= 8)
            early = Reader(bench, batch)
            await early.page()
            cancellation = bench.engine.api_role.services.cancellation
            await cancellation.cancel(batch.project_id, batch.id)
            ended = await bench.ended(batch)
            await early.read_all()
            assert 8 <= ended.completed < 64
            assert sorted(early.lines) == await _lines_of_files(bench, ended)
            codes = [(json.loads(line)["error"] or {}).get("code") for line in early.lines]
            assert codes == [None] * ended.completed + ["batch_cancelled"] * ended.failed

        _play(bench, scene())


@pytest.mark.rule(
    "G2", "A service that is killed and started again goes on in the same order, and no line comes twice."
)
def test_a_killed_service_goes_on_in_the_same_order(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, plan=_MIXED, latency=0.3, max_concurrency=4)) as bench:
        batch = _play(bench, bench.batch(_prompts(128)))
        reader = Reader(bench, batch)
        for lines in (10, 30, 60):

            async def scene(lines: int = lines) -> None:
                while len(reader.lines) < lines:
                    assert not await reader.page()
                    await bench.engine.api_role.services.clock.sleep(0.05)

            _play(bench, scene())
            bench.kill()
            bench.start()

        async def rest() -> None:
            ended = await _follow(bench, batch, reader)
            assert sorted(reader.lines) == await _lines_of_files(bench, ended)
            assert await _all(bench, batch) == reader.lines

        _play(bench, rest())


def _damage_segments(bench: Bench, which: slice) -> None:
    """Damage segments of the only batch: objects if there are any, else rows."""
    paths = sorted((bench.folder / "objects" / "segments").glob("*/*"), key=lambda path: path.stat().st_mtime_ns)
    for path in paths[which]:
        path.write_bytes(b"?" + path.read_bytes()[1:])
    if not paths:
        with closing(sqlite3.connect(bench.folder / "store.sqlite")) as connection, connection:
            rows = [id_ for (id_,) in connection.execute("SELECT id FROM segments ORDER BY id")][which]
            connection.executemany(
                "UPDATE segments SET data = CAST('?' || substr(data, 2) AS BLOB) WHERE id = ?", [(id_,) for id_ in rows]
            )


@pytest.mark.rule(
    "G2", "If damage makes lines run again, no reader gets a line twice or misses one, and they keep their place."
)
@pytest.mark.parametrize("read_before", [0, 11, 20, 56])
def test_lines_that_are_run_again_keep_their_place(tmp_path: Path, read_before: int) -> None:
    """A reader may be before the damaged segments, in the middle of one, between them, or past them."""
    with closing(Bench(tmp_path, plan=_MIXED, latency=1.1, max_concurrency=8)) as bench:

        async def scene() -> None:
            batch = await bench.batch(_prompts())
            await bench.until(batch, lambda seen: seen.completed + seen.failed >= 56)
            witness, reader = Reader(bench, batch, limit=1000), Reader(bench, batch, limit=1)
            while len(witness.lines) < 56:
                await witness.page()
            while len(reader.lines) < read_before:
                await reader.page()
            _damage_segments(bench, slice(1, 6, 2))
            ended = await bench.ended(batch)
            assert bench.attempts("good") > 64
            await witness.read_all()
            await reader.read_all()
            late = Reader(bench, batch)
            await late.read_all()
            names = [f"line-{n}" for n in range(64)]
            assert sorted(witness.ids) == sorted(reader.ids) == sorted(late.ids) == sorted(names)
            assert witness.ids == reader.ids == late.ids
            assert sorted(late.lines) == await _lines_of_files(bench, ended)
            _prune(bench)
            while await bench.rows.work_of(batch.id) is not None:
                await bench.engine.api_role.services.clock.sleep(1)
            assert await _all(bench, batch) == late.lines

        _play(bench, scene(), seconds=200_000)


def test_a_reader_waits_at_damage_until_it_is_repaired(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, latency=1.1, max_concurrency=8)) as bench:

        async def scene() -> None:
            batch = await bench.batch(_prompts())
            await bench.until(batch, lambda seen: seen.completed >= 32)
            _damage_segments(bench, slice(0, 1))
            reader = Reader(bench, batch)
            assert not await reader.page()
            assert reader.lines == []
            await bench.ended(batch)
            await reader.read_all()
            assert sorted(reader.ids) == sorted(f"line-{n}" for n in range(64))

        _play(bench, scene())


@pytest.mark.rule("G2", "Once a file that holds the lines was deleted, the answer is 410 results_unavailable.")
def test_results_end_with_the_file_that_holds_them(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, plan=_MIXED)) as bench:

        async def scene() -> None:
            ended = await bench.ended(await bench.batch(_prompts()))
            await bench.rows.delete_file(ended.project_id, ended.output_file_id or "", at=0)
            for status in (None, LineStatus.SUCCEEDED):
                with pytest.raises(ResultsUnavailable):
                    await _all(bench, ended, status=status)
            assert len(await _all(bench, ended, status=LineStatus.FAILED)) == ended.failed

        _play(bench, scene())


def test_a_batch_that_an_earlier_version_ended_has_an_order_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files have no order: the output file comes first. From the first page on this order is kept."""
    monkeypatch.setattr("batchline.pipeline.results._PART_BYTES", 500)
    with closing(Bench(tmp_path, plan=_MIXED)) as bench:

        async def scene() -> None:
            ended = await bench.ended(await bench.batch(_prompts()))
            with closing(sqlite3.connect(bench.folder / "store.sqlite")) as connection, connection:
                connection.execute("DELETE FROM result_orders")
            failed = await _all(bench, ended, status=LineStatus.FAILED)
            whole = await _all(bench, ended)
            assert sorted(whole) == await _lines_of_files(bench, ended)
            assert whole[ended.completed :] == failed
            assert await _all(bench, ended, limit=1) == whole

        _play(bench, scene())


def _flip(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


@pytest.mark.parametrize("damage", [_flip, lambda data: data[:-1]])
def test_a_damaged_file_is_not_shown(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            ended = await bench.ended(await bench.batch(_prompts()))
            (path,) = (bench.folder / "objects" / "results").glob("*/*-output")
            path.write_bytes(damage(path.read_bytes()))
            with pytest.raises(FileDamaged):
                await _all(bench, ended)

        _play(bench, scene())


def test_a_cursor_that_was_never_given_out_is_refused(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            ended = await bench.ended(await bench.batch(_prompts()))
            reader = Reader(bench, ended)
            for cursor in (Cursor(1, 3), Cursor(1, 1 << 40), Cursor(999, 0)):
                reader.cursor = cursor
                with pytest.raises(InvalidRequest, match="after"):
                    await reader.page()

        _play(bench, scene())
