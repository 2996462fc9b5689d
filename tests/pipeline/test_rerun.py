"""The failed lines of a batch are run again as a batch of their own (G3)."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.records import Batch
from batchline.domain.states import BatchStatus
from tests.support.asgi import Call, Client
from tests.support.engine_harness import CHAT, Bench

_BODY = {"model": "m", "seed": 12345678901234567890, "temperature": 1.50, "stop": ["x"]}


def _said(n: int, directive: str = "") -> dict[str, Any]:
    return _BODY | {"messages": [{"role": "user", "content": f"prompt {n} {directive}"}]}


def _bodies(lines: int = 20) -> list[dict[str, Any]]:
    """Every fourth line fails for its body, every fourth for its size."""
    directives = {1: "[[status=400]]", 3: "[[status=413]]"}
    return [_said(n, directives.get(n % 4, "")) for n in range(lines)]


async def _ended(bench: Bench, lines: int = 20) -> Batch:
    ended = await bench.ended(await bench.batch_of(_bodies(lines)))
    assert (ended.completed, ended.failed) == (lines // 2, lines // 2)
    return ended


async def _input(bench: Bench, answer: Call) -> list[dict[str, Any]]:
    """Return the lines of the input file of the new batch, as any client downloads them."""
    assert answer.status == 200, answer.body
    batch = await bench.seen(answer.json["id"])
    data = await bench.content(batch.project_id, batch.input_file_id)
    return [json.loads(line) for line in data.splitlines()]


def _rerun(batch: Batch) -> str:
    return f"/v1/batches/{batch.id}/rerun"


@pytest.mark.rule("G3", "A new batch of the lines that failed, in input order, with their custom_id and body.")
def test_the_lines_that_failed_run_again(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            client = Client(bench)
            parent = await _ended(bench)
            answer = await client.post(_rerun(parent), {"metadata": {"try": 2}})
            lines = await _input(bench, answer)
            assert [line["custom_id"] for line in lines] == [f"line-{n}" for n in range(1, 20, 2)]
            assert [line["body"] for line in lines] == [_bodies()[n] for n in range(1, 20, 2)]
            assert (answer.json["status"], answer.json["request_counts"]["total"]) == ("in_progress", 10)
            assert answer.json["metadata"] == {"try": 2}
            assert answer.json["endpoint"] == CHAT
            child = await bench.ended(await bench.seen(answer.json["id"]))
            assert (child.status, child.failed) == (BatchStatus.COMPLETED, 10)
            listed = (await client.get("/v1/files?purpose=batch")).json["data"]
            assert child.input_file_id in [file["id"] for file in listed]

        bench.play(scene())


@pytest.mark.rule("G3", "With codes, only lines that failed with one of them.")
def test_codes_choose_lines(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            client = Client(bench)
            parent = await _ended(bench)
            answer = await client.post(_rerun(parent), {"codes": ["request_too_large", "internal_error"]})
            assert [line["custom_id"] for line in await _input(bench, answer)] == [f"line-{n}" for n in range(3, 20, 4)]
            none = await client.post(_rerun(parent), {"codes": ["internal_error"]})
            assert (none.status, none.code) == (400, "nothing_to_rerun")
            none = await client.post(_rerun(parent), {"codes": []})
            assert (none.status, none.code) == (400, "nothing_to_rerun")

        bench.play(scene())


@pytest.mark.rule("G3", "The patch is merged into each body, and what it does not name keeps its bytes.")
@pytest.mark.parametrize("source", ["input", "work"])
def test_a_patch_changes_each_body(tmp_path: Path, source: str) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            client = Client(bench)
            parent = await _ended(bench)
            if source == "work":
                await bench.rows.delete_file(parent.project_id, parent.input_file_id, at=0)
            patch = {"model": "larger", "stop": None, "options": {"deep": 1, "gone": None}}
            answer = await client.post(_rerun(parent), {"patch": patch})
            lines = await _input(bench, answer)
            batch = await bench.seen(answer.json["id"])
            assert b"12345678901234567890" in await bench.content(batch.project_id, batch.input_file_id)
            assert [line["custom_id"] for line in lines] == [f"line-{n}" for n in range(1, 20, 2)]
            for n, line in zip(range(1, 20, 2), lines, strict=True):
                expected = _bodies()[n] | {"model": "larger", "options": {"deep": 1}}
                del expected["stop"]
                assert line["body"] == expected
                assert (line["method"], line["url"]) == ("POST", CHAT)

        bench.play(scene())


@pytest.mark.rule("G3", "If the input file was deleted, the lines come from the batch's own copy, in input order.")
def test_a_deleted_input_file_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines are not in the order of the input, and are sorted in windows."""
    monkeypatch.setattr("batchline.pipeline.rerun._WINDOW_BYTES", 700)
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            client = Client(bench)
            bodies = [body | {"model": f"m{n % 3}"} for n, body in enumerate(_bodies(40))]
            parent = await bench.ended(await bench.batch_of(bodies))
            kept = await _input(bench, await client.post(_rerun(parent), {}))
            await bench.rows.delete_file(parent.project_id, parent.input_file_id, at=0)
            copied = await _input(bench, await client.post(_rerun(parent), {}))
            assert copied == kept
            assert len(copied) == 20
            with closing(sqlite3.connect(bench.folder / "store.sqlite")) as connection, connection:
                connection.execute("UPDATE batches SET work_key = NULL WHERE id = ?", (parent.id,))
            gone = await client.post(_rerun(parent), {})
            assert (gone.status, gone.code) == (409, "input_unavailable")

        bench.play(scene())


@pytest.mark.parametrize("beginning", [b"", b"\n", b" \r\n\n"])
def test_blank_lines_and_a_byte_order_mark_do_not_count(tmp_path: Path, beginning: bytes) -> None:
    """G3, C4: a line is found by its number among those that are not blank."""
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            client = Client(bench)
            lines = [
                json.dumps({"custom_id": f"line-{n}", "method": "POST", "url": CHAT, "body": body}).encode()
                for n, body in enumerate(_bodies(8))
            ]
            data = b"\xef\xbb\xbf" + beginning + lines[0] + b"\r\n\n \t\r\n" + b"\n\r\n".join(lines[1:])
            owner = await bench.owner("alpha")
            async with bench.engine.api_role.services.upload.begin(owner.project_id) as incoming:
                await incoming.write(data)
                file = await incoming.finish(filename=None, expires_after=None)
            created = await client.post("/v1/batches", {"input_file_id": file.id, "endpoint": CHAT})
            parent = await bench.ended(await bench.seen(created.json["id"]))
            answer = await client.post(_rerun(parent))
            assert [line["custom_id"] for line in await _input(bench, answer)] == [
                "line-1",
                "line-3",
                "line-5",
                "line-7",
            ]

        bench.play(scene())


@pytest.mark.rule("G3", "A batch that is not terminal is 409 batch_not_terminal; one without failed lines is 400.")
def test_what_cannot_be_run_again_says_why(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, latency=20)) as bench:

        async def scene() -> None:
            client = Client(bench)
            batch = await bench.batch_of([_said(1)])
            early = await client.post(_rerun(batch), {})
            assert (early.status, early.code) == (409, "batch_not_terminal")
            assert early.headers["x-should-retry"] == "false"
            await bench.ended(batch)
            good = await client.post(_rerun(batch), {})
            assert (good.status, good.code) == (400, "nothing_to_rerun")
            unknown = await client.post("/v1/batches/batch_x/rerun", {})
            assert (unknown.status, unknown.code) == (404, "batch_not_found")
            failed = await bench.ended(await bench.batch_of([_said(1, "[[status=400]]")]))
            await bench.rows.delete_file(failed.project_id, failed.error_file_id or "", at=0)
            gone = await client.post(_rerun(failed), {})
            assert (gone.status, gone.code) == (410, "results_unavailable")

        bench.play(scene())


@pytest.mark.rule("G3", "A body that is not as described is 400 and names the field.")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"codes": "x"}, "codes"),
        ({"codes": [1]}, "codes"),
        ({"patch": []}, "patch"),
        ({"patch": "x"}, "patch"),
        ({"metadata": []}, "metadata"),
        ([], None),
    ],
)
def test_what_is_wrong_with_a_request_is_named(tmp_path: Path, body: object, param: str | None) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            answer = await Client(bench).post("/v1/batches/batch_x/rerun", body)
            assert (answer.status, answer.json["error"]["param"]) == (400, param)

        bench.play(scene())


@pytest.mark.rule("G3", "A patch that makes a line invalid is refused as C3 says, and the failed batch is kept.")
def test_a_patched_input_is_validated(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            client = Client(bench)
            parent = await _ended(bench)
            answer = await client.post(_rerun(parent), {"patch": {"stream": True}})
            assert (answer.status, answer.json["error"]["line"]) == (400, 1)
            failed = await bench.seen(answer.headers["x-batch-id"])
            assert (failed.status, failed.parent_batch_id) == (BatchStatus.FAILED, parent.id)

        bench.play(scene())


@pytest.mark.rule("G3", "Idempotency-Key works as in A11: one batch and one input file, and the first answer again.")
def test_a_repeated_rerun_makes_one_batch(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            client = Client(bench)
            parent, files = await _ended(bench), "/v1/files?purpose=batch"
            before = len((await client.get(files)).json["data"])
            calls = [
                await client.call("POST", _rerun(parent), headers={"idempotency-key": "k"}, body={"codes": None})
                for _ in range(4)
            ]
            answers = [await call.end() for call in calls]
            answers.append(await client.post(_rerun(parent), {}, idempotency_key="k"))
            assert {answer.status for answer in answers} == {200}
            assert len({answer.body for answer in answers}) == 1
            assert [answer.headers.get("x-batchline-replayed") for answer in answers].count("true") == 4
            assert len((await client.get(files)).json["data"]) == before + 1
            other = await client.post(_rerun(parent), {"patch": {"a": 1}}, idempotency_key="k")
            assert (other.status, other.code) == (409, "idempotency_key_reused")

        bench.play(scene())


@pytest.mark.rule("G3", "The progress object has parent_batch_id and child_batch_ids; children may have children.")
def test_the_progress_names_parent_and_children(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            client = Client(bench)
            root = await _ended(bench)
            ids = []
            for _ in range(2):
                answer = await client.post(_rerun(root), {})
                ids.append(answer.json["id"])
                await bench.ended(await bench.seen(answer.json["id"]))
            grandchild = (await client.post(f"/v1/batches/{ids[0]}/rerun", {})).json["id"]
            expected = {root.id: (None, ids), ids[0]: (root.id, [grandchild]), grandchild: (ids[0], [])}
            for batch_id, family in expected.items():
                progress = (await client.get(f"/v1/batches/{batch_id}/progress")).json
                assert (progress["parent_batch_id"], progress["child_batch_ids"]) == family

        bench.play(scene())


def test_a_rerun_needs_the_scope_batch(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            parent = await _ended(bench)
            reader = Client(bench, key="bl-reader", scopes="read")
            assert (await reader.post(_rerun(parent), {})).status == 403

        bench.play(scene())


def test_a_rerun_stores_nothing_of_a_project_that_is_full(tmp_path: Path) -> None:
    """G3, B2: the input of a rerun is a file like every other."""
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> Batch:
            return await _ended(bench)

        parent = bench.play(scene())
        bench.kill()
        bench._settings = bench._settings.model_copy(update={"project_storage_bytes": 10})
        bench.start()

        async def full() -> None:
            answer = await Client(bench).post(_rerun(parent), {})
            assert (answer.status, answer.code) == (413, "storage_quota_exceeded")

        bench.play(full())


def _only(bench: Bench, pattern: str) -> Path:
    (path,) = (bench.folder / "objects").glob(pattern)
    return path


def _without_last_line(data: bytes) -> bytes:
    return data[: data[:-1].rindex(b"\n") + 1]


_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut inside a line": lambda data: data[:-20],
    "without its last line": _without_last_line,
    "another code": lambda data: data.replace(b"request_too_large", b"request_too_lArge"),
    "no JSON": lambda data: data.replace(b'"code":', b'"code";'),
    "no id": lambda data: data.replace(b"batch_req_", b"batch-req-"),
}


@pytest.mark.rule("G3", "A damaged file is an error: a rerun never has fewer lines than failed.")
@pytest.mark.parametrize(
    ("damage", "has_checksum"),
    [*((damage, True) for damage in _DAMAGE), ("cut inside a line", False), ("without its last line", False)],
)
def test_a_damaged_error_file_is_not_run_again(tmp_path: Path, damage: str, has_checksum: bool) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            client = Client(bench)
            parent = await _ended(bench)
            path = _only(bench, "results/*/*-error")
            path.write_bytes(_DAMAGE[damage](path.read_bytes()))
            if not has_checksum:
                _forget_checksums(bench)
            await _assert_refused(bench, client, parent, parent.error_file_id)
            path.unlink()
            await _assert_refused(bench, client, parent, parent.error_file_id)

        bench.play(scene())


@pytest.mark.rule("G3", "A damaged file is an error: a rerun never has fewer lines than failed.")
@pytest.mark.parametrize(
    "change",
    [_without_last_line, lambda data: data.replace(b"\n", b" ", 1), lambda data: data.replace(b'"body"', b'"bo', 3)],
    ids=["without its last line", "two lines joined", "no JSON"],
)
def test_a_damaged_input_file_is_not_run_again(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            client = Client(bench)
            parent = await _ended(bench)
            path = _only(bench, "uploads/*")
            path.write_bytes(change(path.read_bytes()))
            await _assert_refused(bench, client, parent, parent.input_file_id)

        bench.play(scene())


def test_a_copy_of_the_input_that_is_damaged_while_it_is_read_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G3: the copy is read once for the sizes of the lines, and then once for each window."""
    monkeypatch.setattr("batchline.pipeline.rerun._WINDOW_BYTES", 1)
    monkeypatch.setattr("batchline.pipeline.rerun._WRITE_BYTES", 1)
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            parent = await _ended(bench)
            await bench.rows.delete_file(parent.project_id, parent.input_file_id, at=0)
            path = _only(bench, "work/*/*")

            async def damage(*_: Any, **__: Any) -> None:
                path.write_bytes(path.read_bytes().replace(b"prompt", b"pRompt"))

            bench.objects.trouble["create"] = damage
            client = Client(bench)
            refused = await client.post(_rerun(parent), {})
            assert (refused.status, refused.code) == (409, "input_unavailable")
            assert (await client.get("/v1/files?purpose=batch")).json["data"] == []

        bench.play(scene())


def _forget_checksums(bench: Bench) -> None:
    """Leave the rows as versions without checksums wrote them."""
    with closing(sqlite3.connect(bench.folder / "store.sqlite")) as connection, connection:
        connection.execute("UPDATE files SET checksum = NULL")


async def _assert_refused(bench: Bench, client: Client, parent: Batch, file_id: str | None) -> None:
    """Run the failed lines again: the answer names the damaged file, and neither a batch nor a file is left."""
    before = (await client.get("/v1/files?purpose=batch")).json["data"]
    for body in ({"patch": {"model": "other"}}, {"codes": ["request_too_large"]}):
        refused = await client.post(_rerun(parent), body)
        assert (refused.status, refused.code) == (500, "storage_error"), refused.body
        assert str(file_id) in refused.json["error"]["message"]
    assert (await client.get("/v1/files?purpose=batch")).json["data"] == before
    assert (await client.get(f"/v1/batches/{parent.id}/progress")).json["child_batch_ids"] == []
    assert bench.metrics.registry.get_sample_value("batchline_damage_total", {"what": "file"}) == 1
