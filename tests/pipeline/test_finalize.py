"""The result files of a batch are assembled and published once, or not at all (C12, D5)."""

import asyncio
import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.errors import FileNotFound, LeaseLost
from batchline.domain.lines import decode_lines
from batchline.domain.states import BatchStatus
from tests.support.damage import batch_with_damaged_work_file
from tests.support.engine_harness import Bench


async def _results(bench: Bench) -> set[str]:
    return {key async for page in bench.objects.keys("results") for key in page}


def test_a_batch_has_only_the_files_that_have_lines(tmp_path: Path) -> None:
    """C12: output without errors, errors without output, or both."""
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> list[tuple[bool, bool]]:
            prompts = (["good"], ["[[status=400]]"], ["good", "[[status=400]]"])
            ends = [await bench.ended(await bench.batch(each)) for each in prompts]
            for batch in ends:
                await bench.records(batch)
            return [(batch.output_file_id is not None, batch.error_file_id is not None) for batch in ends]

        assert bench.play(scene()) == [(True, False), (False, True), (True, True)]


def test_results_that_another_process_publishes_are_removed_here(tmp_path: Path) -> None:
    """C12, D5: a finalizer that lost its lease leaves no object, and the next try publishes under a new epoch."""
    with closing(Bench(tmp_path)) as bench:
        before_publish: list[set[str]] = []

        async def lose_the_lease(*_: Any, **__: Any) -> None:
            before_publish.append(await _results(bench))
            if len(before_publish) == 1:
                raise LeaseLost("taken over")
            assert not before_publish[0] & before_publish[1], "the objects of the first try are removed"

        bench.store.trouble["publish"] = lose_the_lease

        async def scene() -> None:
            batch = await bench.batch(["good", "[[status=400]]"])
            ended = await bench.until(batch, lambda seen: seen.completed == 1 and len(before_publish) > 0)
            await asyncio.sleep(100)
            ended = await bench.ended(ended)
            assert len(await bench.records(ended)) == 2
            assert len(await _results(bench)) == 2

        bench.play(scene())
        assert [len(keys) for keys in before_publish] == [2, 2]


def test_lines_that_never_ran_get_the_reason_of_the_stop(tmp_path: Path) -> None:
    """C11, D2."""
    with closing(Bench(tmp_path, latency=10, max_concurrency=1)) as bench:

        async def scene() -> None:
            batch = await bench.batch(["a", "b", "c"])
            await asyncio.sleep(1)
            await bench.engine.api_role.services.cancellation.cancel(batch.project_id, batch.id)
            ended = await bench.ended(batch)
            records = (await bench.records(ended)).values()
            codes = sorted(record["error"]["code"] if record["error"] else "" for record in records)
            assert codes == ["", "batch_cancelled", "batch_cancelled"]

        bench.play(scene())


@pytest.mark.parametrize("left", [0, 5, 14])
@pytest.mark.parametrize("input_is_kept", [True, False])
def test_a_cancelled_batch_whose_work_file_is_cut_off_has_every_line(
    tmp_path: Path, left: int, input_is_kept: bool
) -> None:
    """C12: from the input file, or as far as its lines can be read; no line is missing from the files."""

    def cut_off(work: Path) -> None:
        data = work.read_bytes()
        *_, last = decode_lines(data)
        work.write_bytes(data[: len(data) - 12 - len(last.custom_id) - len(last.body) + left])

    with closing(Bench(tmp_path)) as bench:

        async def hold_up(*_: Any, **__: Any) -> None:
            await asyncio.sleep(5)

        async def scene() -> None:
            bench.store.trouble["claim"] = hold_up
            damaged = await batch_with_damaged_work_file(bench, cut_off, lines=20)
            if not input_is_kept:
                await bench.rows.delete_file(damaged.project_id, damaged.input_file_id, at=int(damaged.created_at))
            await bench.engine.api_role.services.cancellation.cancel(damaged.project_id, damaged.id)
            ended = await bench.ended(damaged)
            assert (ended.status, ended.failed) == (BatchStatus.CANCELLED, 20)
            output = await bench.content(ended.project_id, ended.error_file_id)
            records = [json.loads(line) for line in output.splitlines()]
            assert len({record["id"] for record in records}) == 20
            codes = Counter(record["error"]["code"] for record in records)
            if input_is_kept:
                assert codes == {"batch_cancelled": 20}
                assert len({record["custom_id"] for record in records}) == 20
            else:
                assert set(codes) == {"batch_cancelled", "internal_error"}
                assert sum(record["custom_id"] is None for record in records) <= 8

        bench.play(scene(), seconds=300)


@pytest.mark.rule("C12", "A batch that cannot be finalized is tried again later, and others go first.")
def test_batches_that_fail_to_be_finalized_do_not_hold_up_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However many there are: each is tried less and less often, and a healthy batch is always next."""
    with closing(Bench(tmp_path)) as bench:

        async def fail(batch_id: str, **named: Any) -> None:
            if named["files"][0].project_id == (await bench.owner("alpha")).project_id:
                raise ValueError("a fault of this batch")

        async def scene() -> None:
            bench.store.trouble["publish"] = fail
            batches = [await bench.batch([f"broken {n}"]) for n in range(30)]
            await asyncio.sleep(300)
            tried = sum("failed to finalize" in record.getMessage() for record in caplog.records)
            healthy = await bench.batch(["healthy"], project="beta")
            began = bench.time.now
            await bench.ended(healthy)
            assert bench.time.now - began < 5
            assert 30 * 5 <= tried <= 30 * 12
            del bench.store.trouble["publish"]
            for batch in batches:
                assert (await bench.ended(batch)).completed == 1

        bench.play(scene(), seconds=1000)


def test_a_batch_that_failed_to_be_finalized_very_often_is_tried_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once a minute: an object store that is unavailable for a day causes more than a thousand failures."""
    with closing(Bench(tmp_path)) as bench:

        async def fail(*_: Any, **__: Any) -> None:
            with closing(sqlite3.connect(tmp_path / "store.sqlite")) as rows, rows:
                rows.execute("UPDATE batches SET failures = 2000")
            raise ValueError("a fault of this batch")

        async def scene() -> None:
            bench.store.trouble["publish"] = fail
            batch = await bench.batch(["broken"])
            await asyncio.sleep(100)
            retries = [vars(record)["retry_in"] for record in caplog.records if "finalize" in record.getMessage()]
            assert retries == [1, 60, 60]
            del bench.store.trouble["publish"]
            assert (await bench.ended(batch)).completed == 1

        bench.play(scene(), seconds=1000)


@pytest.mark.rule("G11", "Both result files expire so many seconds after they were written.")
def test_result_files_expire_when_the_create_said(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            prompts = ["good", "[[status=400]]"]
            batch = await bench.ended(await bench.batch(prompts, output_lifetime=100))
            usual = await bench.ended(await bench.batch([f"{prompt} again" for prompt in prompts]))
            download = bench.engine.api_role.services.download
            for file_id in (batch.output_file_id, batch.error_file_id):
                file = await download.find(batch.project_id, file_id or "")
                assert file.expires_at == file.created_at + 100
            kept = await download.find(usual.project_id, usual.output_file_id or "")
            assert kept.expires_at == kept.created_at + 30 * 86_400
            later = bench.time.now + 120
            await bench.until(batch, lambda _: bench.time.now > later)
            assert not [key async for keys in bench.objects.keys(f"results/{batch.id}") for key in keys]
            with pytest.raises(FileNotFound):
                await download.find(batch.project_id, batch.output_file_id or "")

        bench.play(scene())
