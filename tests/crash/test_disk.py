"""A disk that takes nothing more, and a database that is locked: the service says so, loses nothing, and goes on."""

import resource
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest

from serving import (
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

_STUCK = "answers cannot be recorded; they are kept and no more are asked for"


@pytest.fixture
def mock() -> Iterator[Mock]:
    with running_mock(delay=0.1) as running:
        yield running


@pytest.fixture
def service(tmp_path: Path, mock: Mock) -> Iterator[Service]:
    with running_service(tmp_path, mock.url, max_concurrency=8) as running:
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
_outages = pytest.mark.parametrize("outage", [_full_disk, _locked_database])


@_outages
def test_a_batch_waits_for_the_disk_and_then_finishes(service: Service, mock: Mock, outage: _Outage) -> None:
    """C12, D5, F5: no answer is lost, no line runs twice, no strike is given, and nobody has to restart anything."""
    client = service.client()
    lines = chat_lines(f"line {n}" for n in range(240))
    spare = client.files.create(file=chat_lines(["spare"]), purpose="batch")
    batch = submit(client, lines)
    wait_until(lambda: counts_of(client.batches.retrieve(batch.id))[1] > 0, what="the first record")

    with outage(service):
        service.program.told(f"({_STUCK})")
        assert service.call("GET", "/healthz").status == 200
        assert service.call("GET", "/readyz").status == 503
        _assert_unavailable(_upload(service, chat_lines(["refused"])))
        _assert_unavailable(_create(service, spare.id))
        assert client.batches.retrieve(batch.id).status == "in_progress"
        wait_until(lambda: mock.stats()["in_flight"] == 0, what="what is in flight to come back")
        asked = mock.stats()["requests"]
        assert asked < 240

    ended = await_end(client, batch.id)
    assert ended.status == "completed"
    assert not any(record["error"] for record in results_of(client, ended, lines).values())
    assert mock.stats()["requests"] == mock.stats()["distinct"] == 240
    wait_until(service.is_ready, what="/readyz")
    assert [file.id for file in client.files.list(purpose="batch")] == [spare.id, batch.input_file_id][::-1]
    assert [listed.id for listed in client.batches.list()] == [batch.id]
    assert _upload(service, chat_lines(["taken"])).status == 200


@_outages
def test_an_upload_that_meets_a_full_disk_leaves_nothing(service: Service, outage: _Outage) -> None:
    """B2: 500 in the envelope; nothing is half-written, and the next one is taken."""
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
    return [path.name for path in (service.data_dir / "objects").rglob("*") if path.is_file()]


def _assert_unavailable(reply: Reply) -> None:
    assert reply.status in {500, 503}
    assert reply.error["type"] == "internal_error"


def _create(service: Service, file_id: str) -> Reply:
    body = f'{{"input_file_id": "{file_id}", "endpoint": "{CHAT}"}}'.encode()
    return service.call("POST", "/v1/batches", body=body)


def _upload(service: Service, data: bytes) -> Reply:
    return service.call("POST", "/v1/files", body=upload_form(data), headers=FORM)
