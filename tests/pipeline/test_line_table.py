"""The table of the lines of a batch: each request stands beside its own result."""

import json
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.errors import ObjectsDown
from batchline.domain.records import Batch
from batchline.pipeline.line_table import LineFilter, LinePage
from tests.support.asgi import Client
from tests.support.engine_harness import CHAT, Bench
from tests.support.input_files import BOM

_LINES = 5


def _line(n: int) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": f"question {n}"}]}
    return json.dumps({"custom_id": f"line-{n}", "method": "POST", "url": CHAT, "body": body}).encode()


async def _ended(bench: Bench, data: bytes) -> Batch:
    owner = await bench.owner("alpha")
    async with bench.engine.api_role.services.upload.begin(owner.project_id) as incoming:
        await incoming.write(data)
        file = await incoming.finish(filename=None, expires_after=None)
    created = await Client(bench).post("/v1/batches", {"input_file_id": file.id, "endpoint": CHAT})
    return await bench.ended(await bench.seen(created.json["id"]))


async def _page(bench: Bench, batch: Batch) -> LinePage:
    table = bench.engine.api_role.services.line_table
    return await table.page(batch.project_id, batch.id, LineFilter(), page=1, size=100)


def _assert_paired(page: LinePage) -> None:
    """Check that each line has its own request and its own result."""
    assert [line.custom_id for line in page.lines] == [f"line-{n}" for n in range(_LINES)]
    assert [line.request for line in page.lines] == [_line(n) for n in range(_LINES)]
    assert [json.loads(line.result or b"{}")["custom_id"] for line in page.lines] == [
        f"line-{n}" for n in range(_LINES)
    ]


@pytest.mark.parametrize("beginning", [b"", b"\n", b" \r\n\n", BOM, BOM + b"\n", BOM + b" \r\n\n"])
def test_blank_lines_and_a_byte_order_mark_do_not_count(tmp_path: Path, beginning: bytes) -> None:
    """C4."""
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            batch = await _ended(bench, beginning + b" \r\n\n".join(map(_line, range(_LINES))))
            _assert_paired(await _page(bench, batch))

        bench.play(scene())


def test_a_read_that_breaks_off_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F7: after an error in the middle of the input, the next page is whole."""
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            data = b"\n".join(map(_line, range(_LINES)))
            batch = await _ended(bench, data)
            stream = bench.objects.stream

            async def break_off(key: str, start: int, length: int) -> AsyncIterator[bytes]:
                yield data[: len(data) // 2]
                raise ObjectsDown("away")

            table: Any = bench.engine.api_role.services.line_table
            monkeypatch.setattr(table._objects, "stream", break_off, raising=False)
            with pytest.raises(ObjectsDown):
                await _page(bench, batch)
            monkeypatch.setattr(table._objects, "stream", stream, raising=False)
            _assert_paired(await _page(bench, batch))

        bench.play(scene())
