"""When outcomes are recorded, in what pieces, and what happens while storage is unavailable (C12, D5)."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.errors import LeaseLost, ObjectsDown, StoreDown
from batchline.domain.held_bytes import HeldBytes
from batchline.domain.records import Balances, Segment
from batchline.domain.usage import Usage
from batchline.pipeline.budget import Budget
from batchline.pipeline.job import HeldBatch, HeldShard, Job
from batchline.pipeline.record import Recorder, SegmentBuilder
from batchline.telemetry.metrics import Metrics
from tests.support.earlier_copies import bring_back, copy_of
from tests.support.engine_harness import Bench
from tests.support.jobs import make_jobs
from tests.support.virtual_loop import VirtualLoop

MiB = 1024 * 1024
LINE = b'{"custom_id":"a"}\n'
OBJECT_LINE = bytes(64 * 1024)
"""A segment with this line is written as an object."""
USAGE = Usage(input_tokens=1, output_tokens=2)


class StorageStub:
    """Takes the place of the store, the objects and the claims; raises ``errors`` in turn."""

    def __init__(self, virtual: VirtualLoop) -> None:
        self._virtual = virtual
        self.errors: list[Exception] = []
        self.records: list[tuple[float, int]] = []
        """When a segment was recorded, and how many lines it had."""
        self.objects: list[str] = []
        self.objects_down = False
        self.put_allowed = asyncio.Event()
        """Each write of an object waits for this."""
        self.put_allowed.set()
        self.forgotten: list[HeldShard] = []
        self.lose: list[HeldShard] = []
        self.compared: list[HeldBatch] = []
        """The batches whose shards were compared with the store."""

    async def record(self, batch_id: str, *, progress: Any, segment: Segment, **_: Any) -> Balances:
        if self.errors:
            raise self.errors.pop(0)
        self.records.append((self._virtual.now, sum(each.completed + each.failed for each in progress)))
        return Balances(funds=0)

    async def put(self, key: str, data: bytes) -> None:
        await self.put_allowed.wait()
        if self.objects_down:
            raise ObjectsDown("no bucket")
        self.objects.append(key)

    async def find_lost(self, batch: HeldBatch) -> list[HeldShard]:
        self.compared.append(batch)
        for shard in self.lose:
            shard.lost = True
        return self.lose

    def forget(self, shard: HeldShard) -> None:
        self.forgotten.append(shard)


class Harness(VirtualLoop):
    def __init__(self) -> None:
        super().__init__()
        self.storage = StorageStub(self)
        storage: Any = self.storage
        self.batches_left = self.flushes_reported = 0
        self.held_bytes = HeldBytes(MiB)
        self.recorder = Recorder(
            store=storage,
            objects=storage,
            claims=storage,
            clock=self.clock,
            owner="me",
            held_bytes=self.held_bytes,
            metrics=Metrics(),
            on_recorded=self._count_flush,
            on_batch_left=self._count_left,
        )
        self.running = self.loop.create_task(self.recorder.run())
        self.advance(0)

    def _count_flush(self) -> None:
        self.flushes_reported += 1

    def _count_left(self) -> None:
        self.batches_left += 1

    def add(self, jobs: list[Job], *, line: bytes = LINE, pending: int = 1) -> None:
        """End jobs with an outcome, while so many other lines of their batch are pending."""
        jobs[0].batch.pending_lines = pending
        for job in jobs:
            self.recorder.add(job, line, usage=USAGE)
        self.advance(0)


@pytest.fixture
def harness() -> Iterator[Harness]:
    with closing(Harness()) as harness:
        yield harness


def test_outcomes_are_recorded_a_second_after_the_first(harness: Harness) -> None:
    jobs = make_jobs(10)
    harness.add(jobs[:1])
    harness.advance(0.6)
    harness.add(jobs[1:3])
    harness.advance(0.6)
    assert harness.storage.records == [(1.0, 3)]


def test_many_lines_are_recorded_after_50_milliseconds(harness: Harness) -> None:
    """A flush costs as much as hundreds of lines, so a fast upstream causes no more than 20 per second."""
    jobs = make_jobs(400)
    harness.add(jobs[:255])
    harness.advance(0.02)
    assert harness.storage.records == []
    harness.add(jobs[255:300])
    harness.advance(0.1)
    ((recorded_at, lines),) = harness.storage.records
    assert (recorded_at, lines) == (0.05, 300)


def test_the_last_lines_of_a_batch_are_recorded_at_once(harness: Harness) -> None:
    harness.add(make_jobs(2), pending=0)
    assert harness.storage.records == [(0.0, 2)]


def test_a_mebibyte_is_recorded_at_once_and_as_an_object(harness: Harness) -> None:
    """Only small segments are kept in the store."""
    harness.add(make_jobs(9)[:1], line=bytes(MiB))
    assert (len(harness.storage.records), len(harness.storage.objects)) == (1, 1)
    harness.add(make_jobs(9)[:1], line=bytes(1000))
    harness.advance(2)
    assert (len(harness.storage.records), len(harness.storage.objects)) == (2, 1)


def test_a_shard_that_has_no_line_left_is_forgotten(harness: Harness) -> None:
    jobs = make_jobs(3)
    harness.add(jobs[:2])
    harness.advance(2)
    assert (harness.storage.forgotten, harness.batches_left) == ([], 0)
    harness.add(jobs[2:], pending=0)
    assert (harness.storage.forgotten, harness.batches_left) == ([jobs[0].shard], 1)


def test_a_batch_is_left_when_its_last_shard_that_is_held_has_ended(harness: Harness) -> None:
    """Before that it cannot be finalized, and to look for it would cost a transaction for each shard."""
    jobs = make_jobs(2)
    batch = jobs[0].batch
    batch.shards[1] = make_jobs(1)[0].shard
    harness.add(jobs)
    harness.advance(2)
    assert (harness.storage.forgotten, harness.batches_left) == ([jobs[0].shard], 0)


def test_while_storage_is_unavailable_outcomes_are_kept_and_nothing_starts(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """D5: one log line for the outage, a retry every second, and no outcome is lost."""
    harness.storage.errors = [StoreDown("disk full")] * 3
    harness.add(make_jobs(2), pending=0)
    assert harness.recorder.full
    harness.advance(2.5)
    assert (harness.storage.records, harness.held_bytes.total) == ([], 2 * len(LINE))
    harness.advance(1)
    assert harness.storage.records == [(3.0, 2)]
    assert (harness.recorder.full, harness.held_bytes.total) == (False, 0)
    assert [record.getMessage() for record in caplog.records] == [
        "storage unavailable: buffering results, dispatch paused"
    ]
    assert vars(caplog.records[0])["reason"] == "disk full"


def test_nothing_starts_while_one_batch_cannot_be_recorded(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """D5: small segments need no object store, so those of other batches do not show that storage is available."""
    harness.storage.objects_down = True
    harness.add(make_jobs(2)[:1], line=OBJECT_LINE, pending=0)
    for second in range(3):
        harness.add(make_jobs(2), pending=0)
        assert harness.storage.records[second:] == [(float(second), 2)]
        assert harness.recorder.full
        harness.advance(1)
    harness.storage.objects_down = False
    harness.advance(1)
    assert harness.storage.records[3:] == [(4.0, 1)]
    assert not harness.recorder.full
    assert len(caplog.records) == 1, "one outage was logged more than once"


def test_lines_start_again_when_the_lines_that_could_not_be_recorded_are_lost(harness: Harness) -> None:
    """D5, C12: another worker runs them."""
    jobs = make_jobs(2)
    harness.storage.objects_down = True
    harness.add(jobs, line=OBJECT_LINE, pending=0)
    assert harness.recorder.full
    jobs[0].shard.lost = True
    harness.advance(1)
    assert (harness.recorder.full, harness.recorder.unrecorded, harness.flushes_reported) == (False, {}, 1)


def test_a_batch_whose_object_takes_long_delays_no_other(harness: Harness) -> None:
    slow, other = make_jobs(4), make_jobs(4)
    harness.storage.put_allowed.clear()
    harness.add(slow[:1], line=OBJECT_LINE, pending=0)
    harness.add(other[:1])
    harness.advance(1)
    harness.add(other[1:2], pending=0)
    assert harness.storage.records == [(1.0, 1), (1.0, 1)]
    assert harness.flushes_reported == 2, "the dispatchers did not learn that lines were recorded"


def test_a_batch_has_one_segment_at_a_time_on_its_way(harness: Harness) -> None:
    """C12: a later segment is recorded on top of the lines of the earlier one."""
    jobs = make_jobs(4)
    harness.storage.put_allowed.clear()
    harness.add(jobs[:1], line=OBJECT_LINE, pending=0)
    harness.add(jobs[1:3], pending=0)
    harness.advance(5)
    assert harness.storage.records == []
    harness.call(harness.storage.put_allowed.set)
    assert harness.storage.records == [(5.0, 1), (5.0, 2)]


def test_batches_that_are_recorded_together_are_reported_once(harness: Harness) -> None:
    """The dispatchers look for lines to start after each report, which costs time."""
    for jobs in (make_jobs(2), make_jobs(2), make_jobs(2)):
        harness.add(jobs)
    harness.advance(2)
    assert (len(harness.storage.records), harness.flushes_reported) == (3, 1)


def test_lines_of_a_lost_shard_are_left_out_and_the_others_recorded(harness: Harness) -> None:
    """C12: another worker records them. Their cost is no longer counted here."""
    lost, held = make_jobs(2), make_jobs(3)
    for job in held:
        job.batch = job.shard.batch = lost[0].batch
    harness.storage.errors, harness.storage.lose = [LeaseLost("taken over")], [lost[0].shard]
    lost[0].batch.pending_lines = 1
    for job in lost + held:
        harness.recorder.add(job, LINE, usage=USAGE, cost=10)
    harness.advance(2)
    assert harness.storage.records == [(1.0, 3)]
    assert isinstance(lost[0].batch.budget, Budget)
    assert lost[0].batch.budget.unrecorded_cost == 0


def test_a_batch_that_is_claimed_again_is_recorded_apart_from_what_was_lost(harness: Harness) -> None:
    """C12, G8: lines that were lost are still buffered. The new ones are compared with the shards that are held now."""
    lost, held = make_jobs(2), make_jobs(3)
    held[0].batch.id = lost[0].batch.id
    lost[0].batch.pending_lines = held[0].batch.pending_lines = 1
    for job in lost + held:
        harness.recorder.add(job, LINE, usage=USAGE, cost=10)
    lost[0].shard.lost = True
    assert harness.recorder.unrecorded == {held[0].batch.id: 5}
    harness.storage.errors = [LeaseLost("taken over")]
    harness.advance(2)
    assert harness.storage.compared == [held[0].batch]
    for batch in (lost[0].batch, held[0].batch):
        assert isinstance(batch.budget, Budget)
        assert batch.budget.unrecorded_cost == 0
    assert harness.recorder.unrecorded == {}


def test_while_only_the_database_is_unavailable_a_segment_is_stored_once(harness: Harness) -> None:
    """D5: an outage of hours does not fill the storage."""
    harness.storage.errors = [StoreDown("away")] * 20
    harness.add(make_jobs(9)[:1], line=bytes(MiB))
    harness.advance(30)
    assert (len(harness.storage.records), len(harness.storage.objects)) == (1, 1)


def test_a_segment_without_its_lost_lines_is_another_object(harness: Harness) -> None:
    """C12: the object has exactly the lines that are recorded."""
    lost, held = make_jobs(2), make_jobs(3)
    for job in held:
        job.batch = job.shard.batch = lost[0].batch
    harness.storage.errors, harness.storage.lose = [LeaseLost("taken over")], [lost[0].shard]
    harness.add(lost + held, line=bytes(MiB))
    harness.advance(2)
    assert [lines for _, lines in harness.storage.records] == [3]
    assert len(set(harness.storage.objects)) == 2


def test_unrecorded_lines_are_counted_by_batch_until_they_are_recorded(harness: Harness) -> None:
    """D11: they do not wait. A segment that is being recorded counts too, and so do lines that come meanwhile."""
    first, second = make_jobs(10), make_jobs(10)
    harness.storage.errors = [StoreDown("away")]
    harness.add(first[:3])
    harness.add(second[:1])
    assert harness.recorder.unrecorded == {first[0].batch.id: 3, second[0].batch.id: 1}
    harness.advance(1.5)
    harness.add(first[3:5])
    assert harness.recorder.unrecorded == {first[0].batch.id: 5}
    harness.advance(5)
    assert harness.recorder.unrecorded == {}


def test_too_many_unrecorded_bytes_stop_the_start_of_lines(harness: Harness) -> None:
    harness.storage.errors = [StoreDown("away")] * 100
    jobs = make_jobs(2)
    jobs[0].batch.pending_lines = 9
    harness.recorder.add(jobs[0], bytes(MiB - 1), usage=None)
    assert not harness.recorder.full
    harness.recorder.add(jobs[1], b"x", usage=None)
    assert harness.recorder.full


def test_a_recorder_that_is_closed_records_what_is_left_and_ends(harness: Harness) -> None:
    """F5."""
    harness.add(make_jobs(2))
    harness.call(harness.recorder.close)
    assert harness.storage.records == [(0.0, 2)]
    assert harness.running.done()


def test_a_recorder_that_is_closed_waits_for_the_segments_on_their_way(harness: Harness) -> None:
    """F5: also for the lines of a batch that follow them."""
    slow = make_jobs(4)
    harness.storage.put_allowed.clear()
    harness.add(slow[:1], line=OBJECT_LINE, pending=0)
    harness.add(slow[1:2])
    harness.add(make_jobs(2))
    harness.call(harness.recorder.close)
    assert (harness.storage.records, harness.running.done()) == ([(0.0, 2)], False)
    harness.call(harness.storage.put_allowed.set)
    assert (len(harness.storage.records), harness.running.done()) == (3, True)


def test_a_segment_counts_usage_and_cost_by_model_and_failed_lines_for_nothing() -> None:
    segment, jobs = SegmentBuilder(since=0.0), make_jobs(3)
    segment.add(jobs[0], LINE, usage=USAGE, cost=7)
    segment.add(jobs[1], LINE, usage=USAGE, cost=8)
    segment.add(jobs[2], b'{"error":{"code":"x"}}\n', usage=None, cost=0)
    (charge,) = segment.charges
    assert (charge.requests, charge.usage.output_tokens, charge.cost) == (2, 4, 15)
    (progress,) = segment.progress
    assert (progress.completed, progress.failed, progress.settled, progress.done) == (2, 1, b"\x07", True)


def test_a_long_outage_of_the_disk_makes_no_giant_segment(tmp_path: Path) -> None:
    """C12: what was answered meanwhile is recorded in pieces of 8 MiB and a line, all of it, once."""
    answer, sizes = 300_000, []

    async def measure(_: str, *, segment: Segment, **__: Any) -> None:
        sizes.append(segment.output_bytes + segment.error_bytes)

    with closing(Bench(tmp_path, latency=0.5, max_concurrency=64)) as bench:
        bench.store.trouble["record"] = measure

        async def scene() -> None:
            batch = await bench.batch(f"line {n} [[huge={answer}]]" for n in range(100))
            bench.take_disk_away(40)
            assert await bench.failures(await bench.ended(batch)) == {}

        bench.play(scene(), seconds=120)
    assert max(sizes) < 8 * MiB + 2 * answer
    assert max(sizes) > 8 * MiB, "the outage made none that had to be cut"


@pytest.mark.rule("C12", "A database that goes back to an earlier state loses no line and doubles none.")
@pytest.mark.parametrize("remember_at", [0, 8, 40])
def test_a_database_that_goes_back_loses_no_line(tmp_path: Path, remember_at: int) -> None:
    """C12, D5: before the claim, between claim and record, and after some records, while the workers go on."""
    with closing(Bench(tmp_path, latency=0.7, max_concurrency=16)) as bench:
        database = tmp_path / "store.sqlite"

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(100))
            await bench.until(batch, lambda seen: seen.completed >= remember_at)
            earlier = copy_of(database)
            await bench.until(batch, lambda seen: seen.completed > remember_at + 16)
            bring_back(earlier, database)
            ended = await bench.ended(batch)
            assert (ended.status, ended.completed) == ("completed", 100)
            assert await bench.failures(ended) == {}
            usage = [each for each in await bench.rows.usage(since=0, until=1 << 40) if each.batch_id == batch.id]
            assert sum(each.requests for each in usage) == 100

        bench.play(scene(), seconds=300)
