"""One machine whose clock jumps: nothing expires and nothing is deleted until it is back or accepted (B4, C13)."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from openai.types import Batch

from tests.support.service import (
    Service,
    await_end,
    chat_lines,
    results_of,
    running_mock,
    running_service,
    submit,
    wait_until,
)
from tests.support.wrong_clock import WrongClock

_MONTH = 31 * 86_400.0
_BREAK_AN_UPLOAD = """
INSERT INTO files
    (id, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key, state, owner, lease_until)
SELECT 'file-broken', project_id, '', 'batch', 0, created_at, expires_at, FALSE, 'uploads/file-broken', 'uploading',
    'a dead process', 0
FROM files WHERE id = ?
"""


@pytest.mark.rule("C13", "A machine that is a month ahead for a while expires no batch.")
@pytest.mark.rule("B4", "A machine that is a month ahead for a while deletes no file.")
def test_a_jump_ends_nothing_until_an_operator_accepts_it(tmp_path: Path) -> None:
    clock = WrongClock(tmp_path / "clock")
    slow, quick = chat_lines(f"[[delay=0.2]] {n}" for n in range(60)), chat_lines(["quick"])
    with (
        running_mock() as mock,
        running_service(
            tmp_path, mock.url, command=clock.command("serve"), max_concurrency=2, worker_processes=1
        ) as service,
    ):
        client = service.client()
        batch = submit(client, slow)
        clock.set(_MONTH)
        _await_clock(service, "days ahead of the expected time; nothing expires and nothing is deleted")
        wait_until(lambda: '"held": true' in service.command("clock", "show", "--json"), what="the hold in the file")
        _let_prune_step(service, await_end(client, submit(client, quick).id))
        ended = await_end(client, batch.id)
        assert ended.status == "completed"
        assert len(results_of(client, ended, slow)) == 60
        assert client.files.content(batch.input_file_id).content == slow
        clock.set(0.0)
        _await_clock(service, "ok")
        assert client.files.content(batch.input_file_id).content == slow

        clock.set(_MONTH)
        _await_clock(service, "nothing expires")
        service.command("clock", "accept")
        _await_clock(service, "ok")
        wait_until(lambda: service.call("GET", f"/v1/files/{batch.input_file_id}").status == 404, what="expiry")
        wait_until(lambda: not (service.data_dir / "objects/uploads" / batch.input_file_id).exists(), what="deletion")


def test_a_machine_that_starts_with_a_wrong_clock_ends_nothing(tmp_path: Path) -> None:
    """The clock is set by NTP a few seconds after the service has started."""
    clock = WrongClock(tmp_path / "clock")
    lines, quick = chat_lines(f"[[delay=0.2]] {n}" for n in range(60)), chat_lines(["quick"])
    with (
        running_mock() as mock,
        running_service(
            tmp_path, mock.url, command=clock.command("serve"), max_concurrency=2, worker_processes=1
        ) as service,
    ):
        batch = submit(service.client(), lines)
        service.terminate()
        clock.set(_MONTH)
        service.restart()
        _await_clock(service, "nothing expires and nothing is deleted for an hour")
        _let_prune_step(service, await_end(service.client(), submit(service.client(), quick).id))
        clock.set(0.0)
        _await_clock(service, "ok")
        ended = await_end(service.client(), batch.id)
        assert ended.status == "completed"
        assert len(results_of(service.client(), ended, lines)) == 60
        assert service.client().files.content(batch.input_file_id).content == lines


def _await_clock(service: Service, said: str) -> None:
    wait_until(lambda: said in service.call("GET", "/readyz").json["clock"], what=f"a clock that is {said}")


def _let_prune_step(service: Service, ended: Batch) -> None:
    """Wait until the pruner has dropped an upload of a dead process: it looks for expired files in the same step."""
    with closing(sqlite3.connect(service.data_dir / "batchline.sqlite", isolation_level=None)) as database:
        database.execute(_BREAK_AN_UPLOAD, (ended.input_file_id,))
        state = "SELECT state FROM files WHERE id = 'file-broken'"
        wait_until(lambda: database.execute(state).fetchone() == ("abandoned",), what="a step of the pruner")
        database.execute("DELETE FROM files WHERE id = 'file-broken'")
    assert (service.data_dir / "objects/work" / ended.id).exists(), "the work of a batch is kept for a day"
