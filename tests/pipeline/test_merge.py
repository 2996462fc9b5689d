"""The results of a batch and its reruns, merged in the order of the input (G4)."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.records import Batch
from tests.support.asgi import Client
from tests.support.engine_harness import Bench


def _said(n: int, directive: str = "") -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": f"prompt {n} {directive}"}]}


def _bodies(lines: int = 24) -> list[dict[str, Any]]:
    return [_said(n, "[[status=400]]" if n % 3 else "") for n in range(lines)]


async def _rerun(bench: Bench, client: Client, batch_id: str, content: str) -> Batch:
    """Run failed lines again with another prompt, and wait for the end."""
    messages = [{"role": "user", "content": content}]
    answer = await client.post(f"/v1/batches/{batch_id}/rerun", {"patch": {"messages": messages}})
    assert answer.status == 200, answer.body
    return await bench.ended(await bench.seen(answer.json["id"]))


async def _merged(client: Client, batch: Batch) -> list[Any]:
    reply = await client.get(f"/v1/batches/{batch.id}/merged")
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "application/jsonl"
    assert reply.headers["content-disposition"] == f'attachment; filename="{batch.id}_merged.jsonl"'
    return [json.loads(line) for line in reply.body.splitlines()]


@pytest.mark.rule(
    "G4", "One line for each line of the input, in its order: the newest success, else the newest failure."
)
@pytest.mark.parametrize("window", [1, 900, 1 << 20])
def test_the_newest_success_counts_or_else_the_newest_failure(
    tmp_path: Path, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchline.pipeline.merge._WINDOW_BYTES", window)
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            client = Client(bench)
            root = await bench.ended(await bench.batch_of(_bodies()))
            alone = await _merged(client, root)
            assert [line["custom_id"] for line in alone] == [f"line-{n}" for n in range(24)]
            worse = await _rerun(bench, client, root.id, "[[status=413]]")
            better = await _rerun(bench, client, root.id, "fine")
            worst = await _rerun(bench, client, root.id, "[[status=404]]")
            assert (worse.failed, better.completed, worst.failed) == (16, 16, 16)
            merged = await _merged(client, root)
            assert [line["custom_id"] for line in merged] == [f"line-{n}" for n in range(24)]
            token = better.id.removeprefix("batch_")
            for n, (line, former) in enumerate(zip(merged, alone, strict=True)):
                assert line["error"] is None
                assert (token in line["id"]) if n % 3 else line == former

        bench.play(scene())


@pytest.mark.rule("G4", "A failure is replaced by a newer failure, over children of children.")
def test_a_newer_failure_replaces_an_older_one(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            client = Client(bench)
            root = await bench.ended(await bench.batch_of(_bodies()))
            child = await _rerun(bench, client, root.id, "[[status=413]]")
            await _rerun(bench, client, child.id, "[[status=404]]")
            merged = await _merged(client, root)
            codes = [(line["error"] or {}).get("code") for line in merged]
            assert codes == [None if n % 3 == 0 else "not_found_error" for n in range(24)]

        bench.play(scene())


@pytest.mark.rule(
    "G4", "A batch of the lineage that is not terminal is 409; so is one that is not a root; a file gone is 410."
)
def test_what_cannot_be_merged_says_why(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, latency=30)) as bench:

        async def scene() -> None:
            client = Client(bench)
            root = await bench.batch_of(_bodies(3))
            early = await client.get(f"/v1/batches/{root.id}/merged")
            assert (early.status, early.code) == (409, "batch_not_terminal")
            await bench.ended(root)
            answer = await client.post(f"/v1/batches/{root.id}/rerun", {})
            running = await client.get(f"/v1/batches/{root.id}/merged")
            assert (running.status, running.code) == (409, "batch_not_terminal")
            child = await bench.ended(await bench.seen(answer.json["id"]))
            not_root = await client.get(f"/v1/batches/{child.id}/merged")
            assert (not_root.status, not_root.code) == (409, "not_a_root_batch")
            assert len(await _merged(client, root)) == 3
            await bench.rows.delete_file(child.project_id, child.error_file_id or "", at=0)
            gone = await client.get(f"/v1/batches/{root.id}/merged")
            assert (gone.status, gone.code) == (410, "results_unavailable")
            unknown = await client.get("/v1/batches/batch_x/merged")
            assert (unknown.status, unknown.code) == (404, "batch_not_found")

        bench.play(scene())


def test_a_damaged_file_is_not_merged(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            root = await bench.ended(await bench.batch_of(_bodies(6)))
            (path,) = (bench.folder / "objects" / "results").glob("*/*-output")
            data = path.read_bytes()
            path.write_bytes(data.replace(b"choices", b"chOices"))
            reply = await Client(bench).get(f"/v1/batches/{root.id}/merged")
            assert (reply.status, reply.code) == (500, "storage_error")

        bench.play(scene())


def test_a_child_that_failed_validation_changes_nothing(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            client = Client(bench)
            root = await bench.ended(await bench.batch_of(_bodies(6)))
            before = await _merged(client, root)
            refused = await client.post(f"/v1/batches/{root.id}/rerun", {"patch": {"stream": True}})
            assert refused.status == 400
            assert await _merged(client, root) == before

        bench.play(scene())
