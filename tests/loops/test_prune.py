"""Pruning what rows say is over (B4, B8): the work of ended batches and expired files."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from batchline.domain.errors import ObjectsDown
from tests.support.engine_harness import Bench

_LONG = 1e6
_RETENTION = 200


def test_the_work_of_a_batch_is_kept_for_the_set_time(tmp_path: Path) -> None:
    """An older copy of the database, in which the batch still ran, finds its work file and its segments then."""
    with closing(Bench(tmp_path, work_retention_seconds=_RETENTION)) as bench:

        async def scene() -> None:
            batch = await bench.ended(await bench.batch(["good"]))
            bench.skip(_RETENTION - 80)
            await asyncio.sleep(20)
            assert await bench.objects.names("work") == [batch.id]
            await asyncio.sleep(120)
            assert await bench.objects.names("work") == []
            assert len(await bench.records(batch)) == 1

        bench.play(scene(), seconds=_LONG)


def test_a_batch_that_cannot_be_pruned_is_tried_later_and_holds_up_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The object store may refuse one prefix. There are more such batches than one step takes."""
    with closing(Bench(tmp_path, work_retention_seconds=_RETENTION)) as bench:
        calls: dict[str, int] = {}
        refused: set[str] = set()

        async def refuse(prefix: str) -> None:
            folder, _, batch_id = prefix.partition("/")
            if folder == "work" and batch_id in refused:
                calls[batch_id] = calls.get(batch_id, 0) + 1
                raise ObjectsDown("refused")

        async def scene() -> None:
            batches = [await bench.ended(await bench.batch([f"good {n}"])) for n in range(14)]
            refused.update(batch.id for batch in batches[:12])
            bench.objects.trouble["delete_all"] = refuse
            bench.skip(_RETENTION - 30)
            await asyncio.sleep(60)
            assert set(await bench.objects.names("work")) == refused
            first = dict(calls)
            assert first == dict.fromkeys(refused, 1)
            await asyncio.sleep(300)
            assert set(calls.values()) == {3}, "after 60 seconds, and after 120 more"
            refused.clear()
            await asyncio.sleep(300)
            assert await bench.objects.names("work") == []

        bench.play(scene(), seconds=_LONG)
    assert "failed to delete the work of a batch, going on with the others" in caplog.text


@pytest.mark.rule("B4", "The object of an expired file is removed, also if that fails for another file.")
def test_an_expired_file_that_cannot_be_deleted_holds_up_no_other(tmp_path: Path) -> None:
    """B4: the row of the first file says that it is over, so a sweep removes its object later."""
    with closing(Bench(tmp_path, file_retention_seconds=500)) as bench:
        troubled: list[str] = []

        async def refuse(key: str) -> None:
            if not troubled or key in troubled:
                troubled.append(key)
                raise ObjectsDown("refused")

        async def scene() -> None:
            for n in range(3):
                await bench.batch([f"good {n}"])
            bench.objects.trouble["delete"] = refuse
            bench.skip(480)
            await asyncio.sleep(120)
            assert [f"uploads/{name}" for name in await bench.objects.names("uploads")] == troubled
            del bench.objects.trouble["delete"]
            bench.skip(3600)
            await asyncio.sleep(120)
            assert await bench.objects.names("uploads") == []

        bench.play(scene(), seconds=_LONG)


def test_nothing_is_pruned_from_objects_of_another_database(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Bench(tmp_path, work_retention_seconds=_RETENTION)) as bench:

        async def scene() -> None:
            batch = await bench.ended(await bench.batch(["good"]))
            await bench.objects.put("identity/other-1", b"")
            bench.skip(2 * _RETENTION - 60)
            await asyncio.sleep(60)
            assert await bench.objects.names("work") == [batch.id]
            await bench.objects.delete("identity/other-1")
            await asyncio.sleep(60)
            assert await bench.objects.names("work") == []

        bench.play(scene(), seconds=_LONG)
    assert all("belongs to another database" in record.__dict__["reason"] for record in caplog.records)
