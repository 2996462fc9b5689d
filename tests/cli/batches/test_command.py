"""`batchline batches` on a server."""

import json

from click.testing import CliRunner, Result

from batchline.cli import main
from batchline.domain.states import BatchStatus
from tests.support.run_process import Tenant
from tests.support.scripted_server import answering, reply
from tests.support.service import CHAT, await_end, chat_lines, counts_of, submit, wait_until

_UNKNOWN = "batch_00000000000000000000000000"


def _call(tenant: Tenant, *arguments: str) -> Result:
    return CliRunner(env=tenant.environment()).invoke(main, ["batches", *arguments])


def test_batches_are_listed_and_shown(tenant: Tenant) -> None:
    client = tenant.service.client(tenant.account)
    done = await_end(client, submit(client, chat_lines(["fine", "[[status=400]]"])).id)
    heads, row = _call(tenant, "list").stdout.splitlines()
    assert heads.split()[:6] == ["batch", "age", "status", "progress", "failed", "left"]
    assert row.split()[0] == done.id
    assert "completed" in row
    assert "100 %" in row
    shown = _call(tenant, "show", done.id).stdout
    assert f"batch     {done.id}\n" in shown
    assert "lines     2: 1 succeeded, 1 failed\n" in shown
    assert "invalid_request_error: 1 line\n" in shown
    assert f"output    {done.output_file_id}\n" in shown
    [listed] = json.loads(_call(tenant, "list", "--json").stdout)
    assert listed["id"] == done.id
    found = json.loads(_call(tenant, "show", done.id, "--json").stdout)
    assert (found["batch"]["id"], found["progress"]["object"]) == (done.id, "batch.progress")


def test_batches_are_listed_by_their_state(tenant: Tenant) -> None:
    client = tenant.service.client(tenant.account)
    done = await_end(client, submit(client, chat_lines(["fine"])).id)
    for status in BatchStatus:
        result = _call(tenant, "list", "--status", status.value, "--json")
        assert result.exit_code == 0, result.output
        assert [batch["id"] for batch in json.loads(result.stdout)] == ([done.id] if status == "completed" else [])
    unknown = _call(tenant, "list", "--status", "done")
    assert unknown.exit_code == 2
    assert "'validating', 'in_progress'" in unknown.stderr


def test_a_batch_is_cancelled(tenant: Tenant) -> None:
    client = tenant.service.client(tenant.account)
    running = submit(client, chat_lines(f"[[delay=5]] {n}" for n in range(20)))
    result = _call(tenant, "cancel", running.id)
    assert result.exit_code == 0
    assert result.stderr.startswith(f"{running.id} is cancel")
    again = _call(tenant, "cancel", _UNKNOWN)
    assert again.exit_code == 1
    assert "says: " in again.stderr


def test_a_held_batch_is_released() -> None:
    """G6."""
    body = json.dumps({"id": "batch_1", "status": "in_progress"}).encode()
    with answering(reply(200, body)) as server:
        runner = CliRunner(env={"BATCHLINE_BASE_URL": server.url, "BATCHLINE_API_KEY": "k"})
        result = runner.invoke(main, ["batches", "release", "batch_1"])
    assert result.stderr == "batch_1 is in_progress\n"
    assert server.asked[0].head.startswith("POST /v1/batches/batch_1/release ")


def test_every_batch_is_tried_although_one_is_refused(tenant: Tenant) -> None:
    client = tenant.service.client(tenant.account)
    first, last = (submit(client, chat_lines(f"[[delay=5]] {n}" for n in range(20))).id for _ in range(2))
    result = _call(tenant, "cancel", first, _UNKNOWN, last)
    assert result.exit_code == 1
    told = result.stderr.splitlines()
    assert [line.split(" is cancel")[0] for line in told[::2]] == [first, last]
    assert told[1].startswith(f"Error: {_UNKNOWN}: ")
    assert " says: " in told[1]
    assert len(told) == 3
    refused = _call(tenant, "release", _UNKNOWN, _UNKNOWN)
    assert (refused.exit_code, refused.stderr.count(f"Error: {_UNKNOWN}: ")) == (1, 2)


def test_several_batches_are_one_json_document(tenant: Tenant) -> None:
    client = tenant.service.client(tenant.account)
    first, second, third = (submit(client, chat_lines(f"[[delay=5]] {n}" for n in range(20))).id for _ in range(3))
    assert json.loads(_call(tenant, "cancel", first, "--json").stdout)["id"] == first
    result = _call(tenant, "cancel", second, _UNKNOWN, third, "--json")
    assert result.exit_code == 1
    assert [batch["id"] for batch in json.loads(result.stdout)] == [second, third]
    assert _call(tenant, "cancel", _UNKNOWN, "--json").stdout == ""


def test_a_service_holds_a_batch_and_releases_it(tenant: Tenant) -> None:
    """G6."""
    client = tenant.service.client(tenant.account)
    uploaded = client.files.create(file=chat_lines(f"[[status=400]] {n}" for n in range(300)), purpose="batch")
    batch = client.batches.create(
        input_file_id=uploaded.id,
        endpoint=CHAT,
        completion_window="24h",
        extra_body={"batchline": {"hold": True}},
    )
    wait_until(lambda: "held since" in _call(tenant, "show", batch.id).stdout, what="the hold")
    released = _call(tenant, "release", batch.id)
    assert (released.exit_code, released.stderr) == (0, f"{batch.id} is in_progress\n")
    assert counts_of(await_end(client, batch.id)) == (300, 0, 300)
    late = _call(tenant, "release", batch.id)
    assert (late.exit_code, "says: " in late.stderr) == (1, True)


def test_watching_ends_with_the_batch_and_its_exit_code(tenant: Tenant) -> None:
    client = tenant.service.client(tenant.account)
    batch = submit(client, chat_lines(["[[delay=0.3]] fine", "[[status=400]]"]))
    result = _call(tenant, "watch", batch.id)
    assert result.exit_code == 3, result.output
    last = result.stdout.splitlines()[-1]
    assert last.split()[:3] == [batch.id, "completed", "2/2"]
    assert "1 failed" in last
    told = _call(tenant, "watch", batch.id, "--json")
    assert json.loads(told.stdout.splitlines()[-1])["status"] == "completed"
