"""More connections than the process has file descriptors for: a running batch does not notice them."""

import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.service import await_end, chat_lines, counts_of, running_mock, running_service, submit, wait_until

_DESCRIPTORS = 256
_LIMITED = f"""
import resource
from batchline.cli import main
resource.setrlimit(resource.RLIMIT_NOFILE, (64, {_DESCRIPTORS}))
main()
"""


@pytest.mark.rule("A14", "A running batch does not lack descriptors, however many clients connect.")
def test_a_batch_runs_on_while_strangers_take_every_connection(tmp_path: Path) -> None:
    with (
        running_mock(delay=0.05) as mock,
        running_service(
            tmp_path, mock.url, command=("-c", _LIMITED, "serve"), worker_processes=1, max_concurrency=32
        ) as service,
        ExitStack() as strangers,
    ):
        client = service.client(max_retries=20)
        batch = submit(client, chat_lines(f"prompt {n}" for n in range(600)))
        for _ in range(300):
            strangers.enter_context(service.connect())
        assert counts_of(await_end(client, batch.id)) == (600, 600, 0)
        strangers.close()
        wait_until(service.is_ready, what="a free connection")
        metrics = service.call("GET", "/metrics").body.decode()
        refused = re.findall(r'refusals_total\{bound="(?:idle_)?connections"\} (\S+)', metrics)
        assert sum(map(float, refused)) > 0
        assert "Too many open files" not in service.log
