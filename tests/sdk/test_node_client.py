"""The official Node client: file before purpose, chunked, without a Content-Length (B2), and its own paging (C9b)."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.service import chat_lines, running_mock, running_service, submit
from tests.support.webhook_receivers import running_receiver

_NODE = Path(__file__).parents[1] / "node"


@pytest.mark.node
def test_the_node_client_makes_the_whole_trip(tmp_path: Path) -> None:
    """B1, B5 to B8, C7 to C10, C12: upload, create, poll, list, download both files, cancel, delete."""
    with running_mock() as mock, running_service(tmp_path, mock.url) as service:
        trip = subprocess.run(
            ["node", "trip.mjs", service.base_url, *service.credentials.values()],
            cwd=_NODE,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert trip.returncode == 0, trip.stderr
    assert trip.stdout == "the trip is complete\n"


@pytest.mark.node
@pytest.mark.rule("G10", "unwrap() of the official Node client accepts a delivery.")
def test_an_event_is_unwrapped(tmp_path: Path) -> None:
    with running_receiver() as receiver, running_mock() as mock, running_service(tmp_path, mock.url) as service:
        made = json.loads(service.command("webhooks", "create", receiver.url, "--json"))
        batch = submit(service.client(), chat_lines(["one"]))
        received = receiver.wait_for(bool)[0]
    given = {"secret": made["secret"], "headers": received.headers, "body": received.body.decode()}
    unwrapped = subprocess.run(
        ["node", "unwrap.mjs"],
        cwd=_NODE,
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert unwrapped.returncode == 0, unwrapped.stderr
    assert unwrapped.stdout == f"batch.completed {batch.id}\n"
