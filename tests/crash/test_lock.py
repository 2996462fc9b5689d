"""One service a folder; keys beside it, made and ended while it runs."""

import json
from pathlib import Path

import openai
import pytest

from tests.support.service import (
    Program,
    await_end,
    chat_lines,
    results_of,
    running_mock,
    running_service,
    submit,
    wait_until,
)


@pytest.mark.rule("F1", "One service a folder: a second one refuses.")
@pytest.mark.rule("F1", "A second service says which process serves the folder.")
def test_a_second_service_on_a_folder_refuses_and_names_it(tmp_path: Path) -> None:
    """F1: it ends with 1, says who serves the folder, and the first goes on as if nothing had been."""
    with running_mock() as mock, running_service(tmp_path, mock.url) as service:
        second = Program(
            "-m", "batchline", "serve", "--port=0", f"--data-dir={service.data_dir}", f"--upstream-url={mock.url}"
        )
        try:
            assert second.wait() == 75
        finally:
            second.end()
        assert "Traceback" not in second.log
        assert f"The data folder {service.data_dir} is served by another process (pid {service.pid})" in second.log

        lines = chat_lines(["still here"])
        client = service.client()
        results_of(client, await_end(client, submit(client, lines).id), lines)


def test_a_key_revoked_beside_the_service_ends_its_batches(tmp_path: Path) -> None:
    """A2, D2, F3: refused from then on; lines in flight finish and count, the others fail with the reason."""
    lines = chat_lines(f"[[delay=0.5]] {n}" for n in range(60))
    with running_mock() as mock, running_service(tmp_path, mock.url, max_concurrency=4) as service:
        doomed = service.new_account("default")
        batch_id = submit(service.client(doomed), lines).id
        wait_until(lambda: mock.stats()["in_flight"] == 4, what="lines in flight")
        service.keys("revoke", doomed["key_id"])
        wait_until(lambda: _is_refused(service.client(doomed)), what="the end of the key")

        client = service.client()
        batch = await_end(client, batch_id)
        assert batch.status == "completed"
        records = results_of(client, batch, lines)
        errors = [record["error"] for record in records.values() if record["error"]]
        assert 0 < len(errors) == len(lines.splitlines()) - mock.stats()["requests"]
        for error in errors:
            assert error["code"] == "authentication_error"
            assert error["message"].startswith("[legacy:api_key_unavailable] ")


def test_a_rotated_key_lets_its_batches_go_on(tmp_path: Path) -> None:
    """F3: the old secret is refused, the new one opens the same project, and the batch does not notice."""
    lines = chat_lines(f"[[delay=0.5]] {n}" for n in range(8))
    with running_mock() as mock, running_service(tmp_path, mock.url, max_concurrency=4) as service:
        batch_id = submit(service.client(), lines).id
        old = service.account
        service.account = json.loads(service.keys("rotate", old["key_id"], "--json"))
        wait_until(lambda: _is_refused(service.client(old)), what="the end of the old secret")
        client = service.client()
        records = results_of(client, await_end(client, batch_id), lines)
        assert not any(record["error"] for record in records.values())


def _is_refused(client: openai.OpenAI) -> bool:
    """The contract gives a running service 5 s to hear of it; never hearing is the failure, not the seconds."""
    try:
        client.batches.list()
    except openai.PermissionDeniedError:
        return True
    return False
