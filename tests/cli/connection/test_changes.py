"""The same change to several objects of a server: what ends the command, and what does not."""

import json

import pytest
from click.testing import CliRunner, Result

from batchline.cli import main
from tests.support.scripted_server import ScriptedServer, answering, reply

_CHANGED = reply(200, json.dumps({"id": "batch_1", "status": "cancelling"}).encode())


def _cancel(server: ScriptedServer, *arguments: str) -> Result:
    runner = CliRunner(env={"BATCHLINE_BASE_URL": server.url, "BATCHLINE_API_KEY": "k"})
    return runner.invoke(main, ["batches", "cancel", *arguments])


@pytest.mark.parametrize("status", [400, 404, 409])
def test_a_refusal_of_one_object_does_not_concern_the_others(status: int) -> None:
    with answering(reply(status, b"{}"), _CHANGED) as server:
        result = _cancel(server, "batch_0", "batch_1")
    refused, changed = result.stderr.splitlines()
    assert refused == f"Error: batch_0: {server.url} says: the server answered {status} Word."
    assert changed == "batch_1 is cancelling"
    assert result.exit_code == 1


@pytest.mark.parametrize("status", [401, 403])
def test_wrong_credentials_concern_all_objects(status: int) -> None:
    """What was changed before is printed all the same."""
    with answering(_CHANGED, reply(status, b"{}"), _CHANGED) as server:
        result = _cancel(server, "batch_1", "batch_2", "batch_3", "--json")
        asked = len(server.asked)
    assert result.exit_code == 4
    assert [batch["id"] for batch in json.loads(result.stdout)] == ["batch_1"]
    assert asked == 2


def test_a_server_that_is_not_there_concerns_all_objects() -> None:
    with answering() as server:
        pass
    result = _cancel(server, "batch_1", "batch_2")
    assert result.exit_code == 1
    assert result.stderr.count("cannot be reached") == 1
