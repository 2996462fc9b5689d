"""`batchline rerun`: the failed lines of a batch as a new one (G3)."""

import json

from click.testing import CliRunner, Result

from batchline.cli import main
from tests.support.run_process import Tenant
from tests.support.scripted_server import Asked, answering, reply
from tests.support.service import await_end, chat_lines, counts_of, submit

_NEW = json.dumps(
    {"id": "batch_2", "status": "in_progress", "request_counts": {"total": 15, "completed": 0, "failed": 0}}
).encode()


def _rerun(*answers: bytes, arguments: tuple[str, ...] = ()) -> tuple[Result, list[Asked]]:
    with answering(*answers) as server:
        environment = {"BATCHLINE_BASE_URL": server.url, "BATCHLINE_API_KEY": "k"}
        result = CliRunner(env=environment).invoke(main, ["rerun", "batch_1", *arguments])
    return result, server.asked


def test_the_new_batch_is_printed() -> None:
    options = ("--code", "internal_error", "--code", "x", "--set", "model=big", "--set", "a.b=3", "--metadata", "k=v")
    result, [asked] = _rerun(reply(200, _NEW), arguments=options)
    assert result.exit_code == 0, result.output
    assert result.stdout == "batch_2\n"
    assert result.stderr == "15 lines of batch_1 run again as batch_2.\n"
    assert asked.head.startswith("POST /v1/batches/batch_1/rerun ")
    assert json.loads(asked.body) == {
        "codes": ["internal_error", "x"],
        "patch": {"model": "big", "a": {"b": 3}},
        "metadata": {"k": "v"},
    }


def test_an_answer_that_was_lost_makes_no_second_batch() -> None:
    """A11: all attempts carry one key."""
    busy = b'{"error": {"message": "Busy", "type": "t", "code": null, "param": null}}'
    result, asked = _rerun(reply(503, busy, retry_after="0"), reply(200, _NEW), arguments=("--json",))
    assert json.loads(result.stdout)["id"] == "batch_2"
    assert asked[0].header("idempotency-key") == asked[1].header("idempotency-key")
    assert json.loads(asked[0].body) == {}


def test_a_refusal_is_told() -> None:
    body = b'{"error": {"message": "No line failed", "type": "t", "code": "nothing_to_rerun", "param": null}}'
    result, _ = _rerun(reply(400, body))
    assert result.exit_code == 1
    assert "says: No line failed." in result.stderr


def test_failed_lines_run_again_and_are_merged(tenant: Tenant) -> None:
    """G3, G4: only lines with the code that is named, and their newest results in the order of the input."""
    client, runner = tenant.service.client(tenant.account), CliRunner(env=tenant.environment())
    prompts = ["fine", "[[status=400 times=1]] a", "[[status=404]] b", "[[status=400 times=1]] c"]
    first = await_end(client, submit(client, chat_lines(prompts)).id)
    result = runner.invoke(main, ["rerun", first.id, "--code", "invalid_request_error", "--metadata", "why=again"])
    assert result.exit_code == 0, result.output
    [new] = result.stdout.split()
    assert result.stderr == f"2 lines of {first.id} run again as {new}.\n"
    second = await_end(client, new)
    assert (counts_of(second), second.metadata) == ((2, 2, 0), {"why": "again"})
    merged = [json.loads(line) for line in runner.invoke(main, ["results", first.id, "--merged"]).stdout.splitlines()]
    assert [line["custom_id"] for line in merged] == ["line-0", "line-1", "line-2", "line-3"]
    assert [line["error"] is None for line in merged] == [True, True, False, True]
    again = runner.invoke(main, ["rerun", second.id])
    assert again.exit_code == 1
    assert "says: " in again.stderr
