"""An upload becomes a file as a whole, or leaves nothing behind (B2)."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from batchline.domain.errors import FileNotFound, InvalidRequest, LeaseLost, StorageFailed
from tests.support.engine_harness import Bench


async def _objects(bench: Bench) -> list[str]:
    return [key async for page in bench.objects.keys("uploads") for key in page]


async def _files(bench: Bench) -> list[str]:
    owner = await bench.owner("alpha")
    files = await bench.rows.files(
        owner.project_id, purpose=None, ascending=True, after=None, limit=10, at=int(bench.time.now)
    )
    return [file.id for file in files or []]


def test_a_file_is_visible_when_it_is_finished_and_not_before(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            services, owner = bench.engine.api_role.services, await bench.owner("alpha")
            async with services.upload.begin(owner.project_id) as incoming:
                await incoming.write(b"ab")
                await incoming.write(b"")
                await incoming.write(b"c")
                assert await _files(bench) == []
                file = await incoming.finish(filename="x.jsonl", expires_after=None)
            assert (file.bytes, await _files(bench), len(await _objects(bench))) == (3, [file.id], 1)
            assert (await services.download.find(owner.project_id, file.id)).filename == "x.jsonl"

        bench.play(scene())


@pytest.mark.parametrize("end", ["leave", "fail", "cancel"])
def test_an_upload_that_is_not_finished_leaves_nothing(tmp_path: Path, end: str) -> None:
    """B2: in whatever way the body ends."""
    with closing(Bench(tmp_path)) as bench:

        async def upload() -> None:
            owner = await bench.owner("alpha")
            async with bench.engine.api_role.services.upload.begin(owner.project_id) as incoming:
                await incoming.write(b"half")
                if end == "fail":
                    raise FileNotFound("file-1")
                await asyncio.sleep(100 if end == "cancel" else 0)

        async def scene() -> None:
            task = asyncio.create_task(upload())
            await asyncio.sleep(1)
            task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            expected = {"leave": type(None), "fail": FileNotFound, "cancel": asyncio.CancelledError}
            assert isinstance(result, expected[end])
            assert (await _files(bench), await _objects(bench)) == ([], [])

        bench.play(scene())


def test_an_upload_that_loses_its_lease_ends_with_a_storage_error(tmp_path: Path) -> None:
    """B2: at the next renewal, even while the client sends nothing."""
    with closing(Bench(tmp_path, lease_seconds=30)) as bench:

        async def lose(*_: object, **__: object) -> None:
            raise LeaseLost("taken over")

        bench.store.trouble["renew_upload"] = lose

        async def upload() -> None:
            owner = await bench.owner("alpha")
            async with bench.engine.api_role.services.upload.begin(owner.project_id) as incoming:
                await incoming.write(b"half")
                await asyncio.sleep(1000)

        async def scene() -> None:
            with pytest.raises(StorageFailed):
                await upload()
            assert bench.time.now == pytest.approx(10, abs=0.1)
            assert await _objects(bench) == []

        bench.play(scene())


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            owner = await bench.owner("alpha")
            with pytest.raises(InvalidRequest, match="empty"):
                async with bench.engine.api_role.services.upload.begin(owner.project_id) as incoming:
                    await incoming.finish(filename=None, expires_after=None)

        bench.play(scene())
