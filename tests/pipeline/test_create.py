"""Creating a batch: one batch for each create, whatever fails on the way (A11, C2)."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.errors import LeaseLost, NotFound, StoreDown
from batchline.pipeline.create import CreateAnswer, CreateRequest
from tests.support.engine_harness import CHAT, Bench

LINE = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"m","messages":[]}}\n'


async def _upload(bench: Bench) -> str:
    owner = await bench.owner("alpha")
    async with bench.engine.api_role.services.upload.begin(owner.project_id) as incoming:
        await incoming.write(LINE)
        return (await incoming.finish(filename=None, expires_after=None)).id


async def _create(
    bench: Bench, file_id: str, *, key: str | None = None, admit: Callable[[], None] = lambda: None
) -> CreateAnswer:
    request = CreateRequest(input_file_id=file_id, endpoint=CHAT, metadata=b"{}")
    return await bench.engine.api_role.services.creator.create(
        await bench.owner("alpha"), request, idempotency_key=key, retried=False, admit=admit
    )


async def _batches(bench: Bench) -> list[str]:
    owner = await bench.owner("alpha")
    return [batch.id for batch in await bench.rows.batches(owner.project_id, after=None, limit=100) or []]


def test_a_second_create_with_the_same_key_waits_for_the_response_of_the_first(tmp_path: Path) -> None:
    """A11: both get the same bytes, and there is one batch. Nothing is asked of the quota for a replay."""
    with closing(Bench(tmp_path)) as bench:

        async def slow(*_: Any, **__: Any) -> None:
            await asyncio.sleep(5)

        def refuse() -> None:
            raise AssertionError("a replay is always admitted")

        async def scene() -> None:
            file_id = await _upload(bench)
            bench.store.trouble["start_batch"] = slow
            first = asyncio.create_task(_create(bench, file_id, key="k"))
            await asyncio.sleep(1)
            second = await _create(bench, file_id, key="k", admit=refuse)
            assert ((await first).body, (await first).replayed) == (second.body, False)
            assert second.replayed
            assert len(await _batches(bench)) == 1

        bench.play(scene())


@pytest.mark.parametrize("error", [StoreDown("away"), KeyError("a bug")])
def test_a_create_that_fails_leaves_no_batch(tmp_path: Path, error: Exception) -> None:
    """C2: the client tries again, and must not find two."""
    with closing(Bench(tmp_path)) as bench:

        async def fail(*_: Any, **__: Any) -> None:
            raise error

        async def scene() -> None:
            file_id = await _upload(bench)
            bench.store.trouble["start_batch"] = fail
            with pytest.raises(type(error)):
                await _create(bench, file_id)
            assert await _batches(bench) == []

        bench.play(scene())


def test_an_input_whose_object_is_missing_is_not_found(tmp_path: Path) -> None:
    """C2: and leaves no batch."""
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            file_id = await _upload(bench)
            (bench.folder / "objects" / "uploads" / file_id).unlink()
            with pytest.raises(NotFound, match="Input file object missing"):
                await _create(bench, file_id)
            assert await _batches(bench) == []

        bench.play(scene())


def test_a_batch_that_is_cancelled_during_validation_is_answered_as_cancelled(tmp_path: Path) -> None:
    """C10: the create has lost its lease, and the row has the response."""
    with closing(Bench(tmp_path)) as bench:

        async def cancel(batch_id: str, **_: Any) -> None:
            owner = await bench.owner("alpha")
            await bench.rows.cancel_batch(owner.project_id, batch_id, at=1)
            raise LeaseLost("cancelled")

        async def scene() -> None:
            file_id = await _upload(bench)
            bench.store.trouble["start_batch"] = cancel
            answer = await _create(bench, file_id)
            assert (answer.status, b'"cancelled"' in answer.body) == (200, True)

        bench.play(scene())
