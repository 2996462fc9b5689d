"""`kill -9` at the moment a batch completes: no event is lost, and its id stays the same (G10)."""

import json
from functools import partial
from pathlib import Path
from random import Random
from time import sleep

import pytest

from tests.support.service import Mock, await_end, chat_lines, running_mock, running_service, submit, wait_until
from tests.support.webhook_receivers import running_receiver

_LINES = 3
_LATEST_KILL_SECONDS = 0.25
"""After the last answer it takes about a tenth of this to record it, and as long to publish the files."""


@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=pytest.mark.proof)])
@pytest.mark.rule("G10", "No event is lost by a kill at the moment of completion, and its id stays the same.")
def test_no_event_is_lost_by_a_kill_at_the_moment_of_completion(tmp_path: Path, kills: int) -> None:
    random, batches = Random(kills), list[str]()
    with running_receiver() as receiver, running_mock() as mock, running_service(tmp_path, mock.url) as service:
        made = json.loads(service.command("webhooks", "create", receiver.url, "--json"))
        for number in range(kills):
            answered = mock.stats()["requests"]
            batches.append(submit(service.client(), chat_lines(f"{number} {n}" for n in range(_LINES))).id)
            wait_until(partial(_has_answered, mock, answered + _LINES), what="the answers")
            sleep(random.uniform(0, _LATEST_KILL_SECONDS))
            service.kill()
            service.restart()
        for batch_id in batches:
            assert await_end(service.client(), batch_id).status == "completed"
        received = receiver.wait_for(lambda found: {one.event["data"]["id"] for one in found} >= set(batches))
        shown = json.loads(service.command("webhooks", "deliveries", made["id"], "--limit=1000", "--json"))
    ids = {one.event["data"]["id"]: one.headers["webhook-id"] for one in received}
    assert all(one.headers["webhook-id"] == one.event["id"] == ids[one.event["data"]["id"]] for one in received)
    assert len(set(ids.values())) == len(ids) == kills
    assert {one["batch_id"] for one in shown} == set(batches)


def _has_answered(mock: Mock, requests: int) -> bool:
    return bool(mock.stats()["requests"] >= requests)
