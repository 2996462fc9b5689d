"""A disk that takes nothing more, and a database that is locked: the service says so, loses nothing, and goes on."""

import resource
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest

from tests.support.service import (
    CHAT,
    FORM,
    Mock,
    Reply,
    Service,
    await_end,
    chat_lines,
    counts_of,
    read_reply,
    results_of,
    running_mock,
    running_service,
    submit,
    upload_form,
    wait_until,
)

_LINES = 60
_STUCK = "storage unavailable: buffering results, dispatch paused"


@pytest.fixture
def mock() -> Iterator[Mock]:
    with running_mock(delay=0.15) as running:
        yield running


@contextmanager
def _full_disk(service: Service) -> Iterator[None]:
    """No process of the service can make a file any longer; its log goes to a pipe and is spared."""
    pids = [member.pid for member in service.program.family()]
    soft, hard = resource.prlimit(service.pid, resource.RLIMIT_FSIZE)
    _limit_files(pids, (0, hard))
    try:
        yield
    finally:
        _limit_files(pids, (soft, hard))


def _limit_files(pids: list[int], limits: tuple[int, int]) -> None:
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


@contextmanager
def _locked_database(service: Service) -> Iterator[None]:
    """Somebody else writes, and does not come to an end."""
    database = sqlite3.connect(service.data_dir / "batchline.sqlite", isolation_level=None, timeout=60)
    with closing(database):
        database.execute("BEGIN EXCLUSIVE")
        yield
        database.execute("ROLLBACK")


_Outage = Callable[[Service], AbstractContextManager[None]]


@pytest.mark.parametrize("outage", [_full_disk, pytest.param(_locked_database, marks=pytest.mark.proof)])
def test_a_batch_waits_for_the_disk_and_then_finishes(tmp_path: Path, mock: Mock, outage: _Outage) -> None:
    """C12, D5, F5: no answer is lost, no line runs twice, and nobody has to restart anything."""
    # However long the outage takes here, it shall not outlast the lease.
    with running_service(tmp_path, mock.url, max_concurrency=2, lease_seconds=600) as service:
        _check_a_batch(service, mock, outage)


def _check_a_batch(service: Service, mock: Mock, outage: _Outage) -> None:
    client = service.client()
    # Answers so large that each is recorded at once: the outage is noticed while there is much left to ask.
    lines = chat_lines(f"[[huge=600000]] {n}" for n in range(_LINES))
    spare = client.files.create(file=chat_lines(["spare"]), purpose="batch")
    batch = submit(client, lines)
    wait_until(lambda: counts_of(client.batches.retrieve(batch.id))[1] > 0, what="the first record")

    with outage(service):
        service.program.wait_for_log(f"({_STUCK})")
        asked = mock.stats()["requests"]
        _check_answers(service, spare.id)
        assert client.batches.retrieve(batch.id).status == "in_progress"
        wait_until(lambda: mock.stats()["in_flight"] == 0, what="what is in flight to come back")
        assert mock.stats()["requests"] == asked < _LINES

    ended = await_end(client, batch.id)
    assert ended.status == "completed"
    assert not any(record["error"] for record in results_of(client, ended, lines).values())
    assert mock.stats()["requests"] == mock.stats()["distinct"] == _LINES
    wait_until(service.is_ready, what="/readyz")
    assert [file.id for file in client.files.list(purpose="batch")] == [batch.input_file_id, spare.id]
    assert [listed.id for listed in client.batches.list()] == [batch.id]
    assert _upload(service, chat_lines(["taken"])).status == 200


def _check_answers(service: Service, file_id: str) -> None:
    """A6, F5: what cannot be stored is refused in the envelope; the process lives and says that it is not ready."""
    with ThreadPoolExecutor() as clients:
        alive = clients.submit(service.call, "GET", "/healthz")
        uploaded = clients.submit(_upload, service, chat_lines(["refused"]))
        created = clients.submit(_create, service, file_id)
    assert alive.result().status == 200
    wait_until(lambda: not service.is_ready(), what="/readyz saying what failed")
    for refused in (uploaded, created):
        assert refused.result().status in {500, 503}
        assert refused.result().error["type"] == "internal_error"


# What is left when the database does not answer waits for the sweep, which comes round slowly.
@pytest.mark.parametrize("outage", [_full_disk, pytest.param(_locked_database, marks=pytest.mark.proof)])
def test_an_upload_that_meets_an_outage_leaves_nothing(tmp_path: Path, mock: Mock, outage: _Outage) -> None:
    """B2: 500 in the envelope; nothing is half-written, and the next one is taken."""
    with running_service(tmp_path, mock.url, lease_seconds=3) as service:
        _check_an_upload(service, outage)


def _check_an_upload(service: Service, outage: _Outage) -> None:
    body = upload_form(chat_lines(f"line {n}" for n in range(20_000)))
    with service.connect() as connection:
        connection.sendall(service.head("/v1/files", length=len(body), headers=FORM) + body[: len(body) // 2])
        wait_until(lambda: bool(_written(service)), what="the first bytes on the disk")
        with outage(service):
            connection.sendall(body[len(body) // 2 :])
            reply = read_reply(connection)
    assert reply.status == 500
    assert (reply.error["type"], reply.error["code"]) == ("internal_error", "storage_error")
    wait_until(lambda: not _written(service), what="the remains to go")
    client = service.client()
    assert client.files.list().data == []
    taken = client.files.create(file=chat_lines(["taken"]), purpose="batch")
    assert _written(service) == [taken.id]


def _written(service: Service) -> list[str]:
    found = (service.data_dir / "objects").rglob("*")
    return [path.name for path in found if path.is_file() and path.parent.name != "identity"]


def _create(service: Service, file_id: str) -> Reply:
    body = f'{{"input_file_id": "{file_id}", "endpoint": "{CHAT}"}}'.encode()
    return service.call("POST", "/v1/batches", body=body)


def _upload(service: Service, data: bytes) -> Reply:
    return service.call("POST", "/v1/files", body=upload_form(data), headers=FORM)
