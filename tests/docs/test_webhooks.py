"""The receiver of docs/webhooks.md works: it is run, and gets the event of a real batch."""

import json
import re
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.service import Program, await_end, chat_lines, running_mock, running_service, submit, wait_until

_PAGE = Path(__file__).parents[2] / "docs" / "webhooks.md"


@pytest.mark.rule("G10", "unwrap() of the official Python client accepts a delivery of a real service.")
def test_the_receiver_of_the_page_gets_the_event_of_a_batch(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with running_mock() as mock, running_service(tmp_path, mock.url) as service:
        made = json.loads(service.command("webhooks", "create", f"http://127.0.0.1:{port}/", "--json"))
        environment = {
            "OPENAI_WEBHOOK_SECRET": made["secret"],
            "OPENAI_BASE_URL": service.base_url,
            "OPENAI_API_KEY": service.account["api_key"],
            "PORT": str(port),
        }
        receiver = Program("-c", code, environment=environment)
        try:
            wait_until(lambda: _accepts(port) or receiver.exit_code is not None, what="the receiver")
            batch = await_end(service.client(), submit(service.client(), chat_lines(["a", "b"])).id)
            wait_until(lambda: batch.id in receiver.log or receiver.exit_code is not None, what="the event")
        finally:
            receiver.end()
    assert f"evt_{batch.id.removeprefix('batch_')} {batch.id} 2\n" in receiver.log


def _accepts(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False
