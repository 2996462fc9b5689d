"""F3: an operator ends a batch that cannot end by itself, while the service runs and while it does not."""

from pathlib import Path

import pytest

from tests.support.busy_folder import world_on
from tests.support.command_line import Shell, cells
from tests.support.service import await_end, chat_lines, results_of, running_mock, running_service, submit
from tests.support.stores import NOW


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "data")


@pytest.mark.rule("F3", "batches fail ends a batch: lines without a result fail, and recorded results are kept.")
def test_a_batch_that_hangs_is_ended_by_hand(tmp_path: Path) -> None:
    """C12: what is in flight gets its answer; the lines that wait for a slow upstream end with internal_error."""
    lines = chat_lines(f"[[delay=1]] {n}" for n in range(100))
    with running_mock() as mock, running_service(tmp_path, mock.url, max_concurrency=2) as service:
        client = service.client()
        batch_id = submit(client, lines).id
        told = Shell(tmp_path / "data").json("batches", "fail", batch_id)
        assert (told["batch_id"], told["total"]) == (batch_id, 100)
        batch = await_end(client, batch_id)
        records = results_of(client, batch, lines)
    assert batch.status == "completed"
    failed = [record["error"] for record in records.values() if record["error"]]
    assert len(failed) >= 90
    assert {error["code"] for error in failed} == {"internal_error"}
    assert all(error["message"].startswith("[legacy:batch_failed] ") for error in failed)


def test_what_cannot_be_failed_is_refused(shell: Shell) -> None:
    made = shell.json("keys", "create")
    owner = shell.owner(made["api_key"], made["project_id"])
    validating = shell.in_store(lambda store: world_on(store).validating(owner))
    assert shell.refusal("batches", "fail", validating.id) == (
        1,
        f"Error: {validating.id} is being validated; it ends by itself, or can be cancelled\n",
    )
    shell.in_store(lambda store: store.cancel_batch(validating.project_id, validating.id, at=NOW))
    assert shell.refusal("batches", "fail", validating.id)[1] == f"Error: {validating.id} is cancelled already\n"
    assert shell.refusal("batches", "fail", "batch_x")[1] == "Error: There is no batch 'batch_x'\n"


def test_the_text_says_what_the_json_says(shell: Shell) -> None:
    made = shell.json("keys", "create")
    owner = shell.owner(made["api_key"], made["project_id"])
    batch = shell.in_store(lambda store: world_on(store).running(owner, shards=[3, 2]))
    told = shell.json("batches", "fail", batch.id)
    assert told == {
        "batch_id": batch.id,
        "status": "in_progress",
        "total": 5,
        "completed": 0,
        "failed": 0,
        "without_result": 5,
    }
    assert cells(shell.text("batches", "fail", batch.id)) == [[name, str(value)] for name, value in told.items()]
