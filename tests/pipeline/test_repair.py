"""What happens to a batch whose stored data is damaged: lost lines run again, or fail, and none is missing (C12)."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchline.domain.errors import ObjectsDown
from batchline.domain.records import Batch
from batchline.domain.replies import Answer
from batchline.domain.states import BatchStatus
from batchline.pipeline.validation_pool import ValidationDied
from tests.simulation.virtual import EPOCH, InlineValidator, VirtualClock
from tests.support.damage import batch_with_damaged_work_file
from tests.support.engine_harness import Bench


@pytest.fixture(autouse=True)
def _every_segment_is_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchline.pipeline.record.INLINE_SEGMENT_BYTES", 1)


def _flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def _change(path: Path) -> None:
    """Change a word in the body of one line, which stays valid JSON."""
    data = path.read_bytes()
    assert b"damaged 5" in data
    path.write_bytes(data.replace(b"damaged 5", b"changed 5", 1))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _lose_first_segment(bench: Bench, damage: Callable[[Path], None]) -> Callable[..., Any]:
    """Return trouble that damages an object of a segment when its batch is finalized for the first time."""
    done: set[str] = set()

    async def strike(batch_id: str, **_: Any) -> None:
        for path in sorted((bench.folder / "objects" / "segments" / batch_id).glob("*"))[:1]:
            if batch_id not in done:
                done.add(batch_id)
                damage(path)

    return strike


def _prompts(word: str, lines: int = 64) -> list[str]:
    return [f"{word} {n}" for n in range(lines)]


def _execute(bench: Bench, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(bench.folder / "store.sqlite")) as connection, connection:
        connection.execute(statement, values)


def _damage_count(bench: Bench, what: str) -> float:
    return bench.metrics.registry.get_sample_value("batchline_damage_total", {"what": what}) or 0.0


async def _ledger_requests(bench: Bench, batch: Batch) -> tuple[int, int]:
    """Return the answers and the tokens that a batch was charged for."""
    usage = [each for each in await bench.rows.usage(since=0, until=1 << 40) if each.batch_id == batch.id]
    return sum(each.requests for each in usage), sum(each.output_tokens for each in usage)


@pytest.mark.rule(
    "C12", "Results that were damaged before the files were written are run again, and no line is missing."
)
@pytest.mark.parametrize("damage", [_cut, _flip, _remove])
def test_lines_of_a_damaged_segment_run_again(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """C12: cut off, changed or missing; it is logged once, without its content, and paid for once."""
    with closing(Bench(tmp_path)) as bench:
        bench.store.trouble["segments"] = _lose_first_segment(bench, damage)

        async def scene() -> None:
            batch = await bench.batch(_prompts("good"))
            ended = await bench.ended(batch)
            assert (ended.status, ended.completed) == (BatchStatus.COMPLETED, 64)
            assert await bench.failures(ended) == {}
            assert await _ledger_requests(bench, ended) == (64, ended.output_tokens)
            snapshot = await bench.rows.snapshot(ended.project_id, ended.id)
            assert snapshot is not None
            assert snapshot.errors == []

        bench.play(scene(), seconds=300)
        assert 64 < bench.attempts("good") <= 128
        assert _damage_count(bench, "segment") == 1
        told = [record for record in caplog.records if record.getMessage() == "stored data is damaged or missing"]
        assert len(told) == 1
        assert vars(told[0])["object"].startswith("segments/")
        assert "good" not in caplog.text


class _WithoutUsage:
    """Wraps an upstream, and removes the usage from its answers."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def post(self, path: str, body: bytes) -> Any:
        reply = await self._inner.post(path, body)
        if not isinstance(reply, Answer):
            return reply
        return replace(reply, body=reply.body.replace(b'"usage"', b'"use"'))


def test_a_repaired_batch_still_counts_the_tokens_that_were_estimated(tmp_path: Path) -> None:
    """C12, E2: the lines that stay have the tokens that they were charged for, and those that ran again too."""
    with closing(Bench(tmp_path, upstream=lambda inner, _: _WithoutUsage(inner))) as bench:
        bench.store.trouble["segments"] = _lose_first_segment(bench, _cut)

        async def scene() -> None:
            ended = await bench.ended(await bench.batch(_prompts("good")))
            assert (ended.completed, ended.output_tokens > 0) == (64, True)
            assert await _ledger_requests(bench, ended) == (64, ended.output_tokens)

        bench.play(scene(), seconds=300)
        assert 64 < bench.attempts("good") <= 128


@pytest.mark.rule("C12", "Lines that are lost when the window ends fail with internal_error, and the batch ends.")
def test_lines_that_are_lost_at_the_end_of_the_window_fail(tmp_path: Path) -> None:
    """C12: nothing runs after the window; what was lost is not charged, and the files have every line once."""
    with closing(Bench(tmp_path, completion_window_seconds=60)) as bench:
        strike = _lose_first_segment(bench, _cut)

        async def late(batch_id: str, **_: Any) -> None:
            bench.time.now += 100
            await strike(batch_id)

        bench.store.trouble["segments"] = late

        async def scene() -> None:
            ended = await bench.ended(await bench.batch(_prompts("good")))
            assert ended.status is BatchStatus.COMPLETED
            records = await bench.records(ended)
            lost = [record for record in records.values() if record["error"]]
            assert 0 < len(lost) == ended.failed
            assert {record["error"]["code"] for record in lost} == {"internal_error"}
            assert await _ledger_requests(bench, ended) == (ended.completed, ended.output_tokens)

        bench.play(scene(), seconds=1000)
        assert bench.attempts("good") == 64


@pytest.mark.rule("C12", "The results in the row of a segment have a checksum too.")
def test_lines_of_a_damaged_row_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchline.pipeline.record.INLINE_SEGMENT_BYTES", 1 << 20)
    with closing(Bench(tmp_path)) as bench:

        async def strike(batch_id: str, **_: Any) -> None:
            del bench.store.trouble["segments"]
            _execute(
                bench,
                "UPDATE segments SET data = CAST(replace(data, '\"id\":', '\"ib\":') AS BLOB) WHERE batch_id = ?",
                batch_id,
            )

        bench.store.trouble["segments"] = strike

        async def scene() -> None:
            ended = await bench.ended(await bench.batch(_prompts("good")))
            assert (ended.status, ended.completed) == (BatchStatus.COMPLETED, 64)
            assert await bench.failures(ended) == {}

        bench.play(scene(), seconds=300)
        assert bench.attempts("good") == 128


def test_damage_that_comes_again_and_again_ends_as_failed_lines(tmp_path: Path) -> None:
    """C12: lost lines run again three times and not for ever, because each time costs an answer."""
    with closing(Bench(tmp_path)) as bench:

        async def strike(batch_id: str, **_: Any) -> None:
            for path in (bench.folder / "objects" / "segments" / batch_id).glob("*"):
                _cut(path)

        bench.store.trouble["segments"] = strike

        async def scene() -> None:
            ended = await bench.ended(await bench.batch(_prompts("good")))
            assert (ended.status, ended.completed, ended.failed) == (BatchStatus.COMPLETED, 0, 64)
            assert len(await bench.records(ended)) == 64

        bench.play(scene(), seconds=300)
        assert bench.attempts("good") == 4 * 64


@pytest.mark.rule("C12", "A work file that was damaged is made again from the input file.")
@pytest.mark.parametrize("damage", [_cut, _flip, _change, _remove])
def test_a_damaged_work_file_is_made_again_from_the_input(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            damaged = await batch_with_damaged_work_file(bench, damage, lines=100)
            ended = await bench.ended(damaged)
            assert (ended.status, ended.completed) == (BatchStatus.COMPLETED, 100)
            assert await bench.failures(ended) == {}

        bench.play(scene(), seconds=300)
        assert bench.attempts("damaged") == 100
        assert all(json.loads(body) for body in bench.machine.starts)
        assert _damage_count(bench, "shard") >= 1


@pytest.mark.rule("C12", "A work file that was damaged is made again from the input file.")
def test_a_work_file_of_many_models_is_made_again(tmp_path: Path) -> None:
    """Its lines are divided as before: a configured model has its own shards also behind 64 other models."""
    models = [f"other-{n}" for n in range(70)] + ["zeta"]
    with closing(Bench(tmp_path, models={"zeta": {}})) as bench:

        async def scene() -> None:
            damaged = await batch_with_damaged_work_file(bench, _remove, lines=2 * len(models), models=models)
            ended = await bench.ended(damaged)
            records = await bench.records(ended)
            codes = {record["error"]["code"] for record in records.values() if record["error"]}
            assert codes == {"not_found_error"}, "no line was lost"
            assert ended.completed == 2

        bench.play(scene(), seconds=300)
        assert bench.attempts("damaged 70") == 1
        assert _damage_count(bench, "shard") >= 1


def _lose_input_with_the_next_shard(bench: Bench) -> None:
    """Remove the input file when the first shard is closed, after it was read and before a repair needs it."""

    async def lose(*_: Any, **__: Any) -> None:
        for path in (bench.folder / "objects" / "uploads").glob("*"):
            path.unlink()

    bench.store.trouble["close_shard"] = lose


@pytest.mark.rule("C12", "Lines of a damaged work file fail with internal_error if the input file is gone.")
@pytest.mark.parametrize("damage", [_cut, _flip, _remove])
def test_without_the_input_file_the_lines_of_a_damaged_shard_fail(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """C12: the other shards run, and every line has one result, by its id if its custom_id cannot be read."""
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            _lose_input_with_the_next_shard(bench)
            ended = await bench.ended(await batch_with_damaged_work_file(bench, damage, lines=100))
            assert ended.status is BatchStatus.COMPLETED
            output = await bench.content(ended.project_id, ended.output_file_id) if ended.output_file_id else b""
            errors = await bench.content(ended.project_id, ended.error_file_id)
            records = [json.loads(line) for line in (*output.splitlines(), *errors.splitlines())]
            assert len({record["id"] for record in records}) == len(records) == 100
            failed = [record["error"]["code"] for record in records if record["error"]]
            assert set(failed) == {"internal_error"}
            assert (len(failed), 100 - len(failed)) == (ended.failed, ended.completed)

        bench.play(scene(), seconds=300)


@pytest.mark.rule("C12", "A batch whose counts and results disagree is repaired before its files are written.")
def test_counts_that_disagree_with_the_segments_are_repaired(tmp_path: Path) -> None:
    """C12: as an older version left them: five bits without results, in a batch that was finalizing for ever."""
    with closing(Bench(tmp_path)) as bench:

        async def strike(batch_id: str, **_: Any) -> None:
            del bench.store.trouble["segments"]
            _execute(
                bench,
                "DELETE FROM segments WHERE batch_id = ? AND id = (SELECT min(id) FROM segments WHERE batch_id = ?)",
                batch_id,
                batch_id,
            )

        bench.store.trouble["segments"] = strike

        async def scene() -> None:
            ended = await bench.ended(await bench.batch(f"good {n}" for n in range(40)))
            assert (ended.status, ended.completed) == (BatchStatus.COMPLETED, 40)
            assert await bench.failures(ended) == {}

        bench.play(scene(), seconds=300)


@pytest.mark.rule("C12", "A line that was recorded twice is in the files once.")
def test_a_line_that_is_in_the_segments_twice_is_written_once(tmp_path: Path) -> None:
    """C12: 11 of 8 lines were counted when a worker with a former lease recorded lines of another."""
    with closing(Bench(tmp_path)) as bench:

        async def strike(batch_id: str, **_: Any) -> None:
            del bench.store.trouble["segments"]
            columns = "output_bytes, error_bytes, object_key, data, lines, checksum"
            _execute(
                bench,
                f"INSERT INTO segments (batch_id, {columns}) SELECT batch_id, {columns} FROM segments"
                " WHERE batch_id = ? ORDER BY id LIMIT 1",
                batch_id,
            )
            _execute(bench, "UPDATE shards SET completed = completed + 3 WHERE batch_id = ? AND n = 0", batch_id)

        bench.store.trouble["segments"] = strike

        async def scene() -> None:
            ended = await bench.ended(await bench.batch(f"good {n}" for n in range(8)))
            assert (ended.status, ended.completed, ended.failed) == (BatchStatus.COMPLETED, 8, 0)
            assert len(await bench.records(ended)) == 8

        bench.play(scene(), seconds=300)
        assert bench.attempts("good") == 8


def test_twelve_batches_that_lost_an_object_all_end_and_hold_up_no_other(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, max_concurrency=64)) as bench:
        bench.store.trouble["segments"] = _lose_first_segment(bench, _remove)

        async def scene() -> None:
            batches = [await bench.batch(_prompts(f"batch-{n}", 40)) for n in range(12)]
            other = await bench.ended(await bench.batch(["small"], project="beta"))
            assert other.completed == 1
            for batch in batches:
                ended = await bench.ended(batch)
                assert (ended.status, ended.completed) == (BatchStatus.COMPLETED, 40)
                assert await bench.failures(ended) == {}

        bench.play(scene(), seconds=600)


@pytest.mark.rule("C12", "An object that cannot be read counts as lost at the end of the window, if the store is up.")
def test_an_object_that_stays_unreadable_does_not_keep_a_batch_open(tmp_path: Path) -> None:
    """C12: a bad sector, say. Until the window ends it may come back; after that its lines fail."""
    with closing(Bench(tmp_path, completion_window_seconds=600)) as bench:
        unreadable: list[Path] = []

        async def make_unreadable(batch_id: str, **_: Any) -> None:
            for path in sorted((bench.folder / "objects" / "segments" / batch_id).glob("*"))[:1]:
                if not unreadable:
                    path.unlink()
                    path.symlink_to(path)  # reading it fails with ELOOP, which is not "missing"
                    unreadable.append(path)

        bench.store.trouble["segments"] = make_unreadable

        async def scene() -> None:
            batch = await bench.batch(_prompts("good"))
            ended = await bench.ended(batch)
            assert bench.time.now >= 600
            assert ended.status is BatchStatus.COMPLETED
            assert ended.failed > 0
            assert len(await bench.records(ended)) == 64

        bench.play(scene(), seconds=2000)
        assert bench.attempts("good") == 64


@pytest.mark.rule("C12", "An input file that cannot be read counts as lost at the end of the window, as every object.")
@pytest.mark.parametrize("error", [ObjectsDown("Input/output error"), ValidationDied("Two processes died")])
def test_an_input_file_that_stays_unreadable_does_not_keep_a_batch_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """C12: the work file is damaged, and cannot be made again from the input file."""
    with closing(Bench(tmp_path, completion_window_seconds=600)) as bench:

        async def fail(*_: Any, **__: Any) -> None:
            raise error

        async def scene() -> None:
            batch = await batch_with_damaged_work_file(bench, _remove, lines=100)
            monkeypatch.setattr(InlineValidator, "validate", fail)
            ended = await bench.ended(batch)
            assert bench.time.now >= 600
            assert ended.completed + ended.failed == 100
            assert ended.failed > 0

        bench.play(scene(), seconds=2000)


@pytest.mark.rule("C12", "A short outage of the object store loses no result, also after the window.")
def test_reads_that_fail_for_a_moment_after_the_window_lose_nothing(tmp_path: Path) -> None:
    """C12: the object can be read a second later."""
    with closing(Bench(tmp_path, completion_window_seconds=60)) as bench:
        failures: list[str] = []

        async def pass_the_window(batch_id: str, **_: Any) -> None:
            bench.time.now += 0 if failures else 100

        def fail_twice(read: Callable[..., Any]) -> Callable[..., Any]:
            def fail(key: str, start: int, length: int) -> Any:
                if len(failures) < 2 and key.startswith("segments/"):
                    failures.append(key)
                    raise ObjectsDown("connection reset")
                return read(key, start, length)

            return fail

        bench.store.trouble["segments"] = pass_the_window
        bench.objects.stream, bench.objects.read = fail_twice(bench.objects.stream), fail_twice(bench.objects.read)

        async def scene() -> None:
            ended = await bench.ended(await bench.batch(_prompts("good")))
            assert (ended.completed, ended.failed) == (64, 0)

        bench.play(scene(), seconds=1000)
        assert len(failures) == 2
        assert bench.attempts("good") == 64


@pytest.mark.rule("C12", "A line of a damaged work file has its own custom_id or null, never another one.")
def test_a_custom_id_that_was_damaged_is_not_shown(tmp_path: Path) -> None:
    """One bit was flipped in a name, which stays valid JSON, and the input file is gone."""

    def rename(path: Path) -> None:
        data = path.read_bytes()
        assert b'"line-26"' in data
        path.write_bytes(data.replace(b'"line-26"', b'"line-27"'))

    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            _lose_input_with_the_next_shard(bench)
            ended = await bench.ended(await batch_with_damaged_work_file(bench, rename, lines=64))
            errors = (await bench.content(ended.project_id, ended.error_file_id)).splitlines()
            assert 1 <= len(errors) == ended.failed < 64
            assert {json.loads(line)["custom_id"] for line in errors} == {None}

        bench.play(scene(), seconds=300)


@pytest.mark.rule("C13", "A clock that jumped ahead does not keep a damaged work file from being made again.")
def test_a_work_file_is_made_again_if_the_clock_has_jumped_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C12, C13: the input file has not expired before it is due, however late the clock of the machine shows."""
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            damaged = await batch_with_damaged_work_file(bench, _remove, lines=20)
            monkeypatch.setattr(VirtualClock, "now", lambda clock: EPOCH + clock._time.now + 31 * 86_400)
            monkeypatch.setattr(VirtualClock, "due", lambda _: 0.0)
            ended = await bench.ended(damaged)
            assert (ended.status, ended.completed) == (BatchStatus.COMPLETED, 20)

        bench.play(scene(), seconds=300)


@pytest.mark.rule("C13", "A clock that jumped ahead does not make lost lines fail before their window has ended.")
def test_lost_lines_run_again_if_the_clock_has_jumped_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C12, C13: what is due decides, and not what the clock of the machine shows."""
    with closing(Bench(tmp_path, completion_window_seconds=600)) as bench:
        lose_segment = _lose_first_segment(bench, _cut)

        async def jump(batch_id: str, **_: Any) -> None:
            monkeypatch.setattr(VirtualClock, "now", lambda clock: EPOCH + clock._time.now + 31 * 86_400)
            monkeypatch.setattr(VirtualClock, "due", lambda _: 0.0)
            await lose_segment(batch_id)

        bench.store.trouble["segments"] = jump

        async def scene() -> None:
            ended = await bench.ended(await bench.batch(_prompts("good")))
            assert (ended.status, ended.completed, ended.failed) == (BatchStatus.COMPLETED, 64, 0)

        bench.play(scene(), seconds=500)
        assert bench.attempts("good") > 64


@pytest.mark.parametrize("damage", [None, _cut])
def test_what_a_version_before_checksums_wrote_is_finished(
    tmp_path: Path, damage: Callable[[Path], None] | None
) -> None:
    """Its rows have no checksums and are read without a check; what is cut off is noticed by its length."""
    with closing(Bench(tmp_path)) as bench:
        strike = _lose_first_segment(bench, damage) if damage else None

        async def forget_checksums(batch_id: str, **named: Any) -> None:
            _execute(
                bench, "UPDATE segments SET lines = NULL, checksum = NULL, charges = NULL WHERE batch_id = ?", batch_id
            )
            _execute(bench, "UPDATE shards SET checksum = NULL WHERE batch_id = ?", batch_id)
            if strike is not None:
                await strike(batch_id, **named)

        bench.store.trouble["segments"] = forget_checksums

        async def scene() -> None:
            ended = await bench.ended(await bench.batch([*_prompts("good"), "[[status=400]]"]))
            assert (ended.status, ended.completed, ended.failed) == (BatchStatus.COMPLETED, 64, 1)
            assert len(await bench.records(ended)) == 65

        bench.play(scene(), seconds=300)
