"""Two API nodes and two workers at work, joined and left by others: SPEC F1, F2, F5, C7 to C12, D5.

All tests here meet the same fleet, and leave it as they found it.
"""

import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Batch

from tests.support.fleet import Fleet, metric, progress_of, running_fleet
from tests.support.postgres_server import Postgres
from tests.support.s3_server import Seaweed
from tests.support.service import (
    CHAT,
    FORM,
    Mock,
    Service,
    await_end,
    chat_lines,
    counts_of,
    read_reply,
    results_of,
    running_mock,
    submit,
    upload_form,
    wait_until,
)

_CAP = 24
_RESCUED = "took over from a dead process"


@pytest.fixture(scope="module")
def mock() -> Iterator[Mock]:
    with running_mock() as running:
        yield running


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, postgres: Postgres, seaweed: Seaweed, mock: Mock
) -> Iterator[Fleet]:
    with running_fleet(
        tmp_path_factory.mktemp("fleet"),
        *("api", "api", "worker", "worker"),
        postgres=postgres,
        seaweed=seaweed,
        upstream_url=mock.url,
        max_concurrency=_CAP,
        lease_seconds=6,
    ) as running:
        yield running


def test_any_node_serves_what_any_other_took_in(fleet: Fleet, mock: Mock) -> None:
    """F1: upload, create, poll, download and delete, each on the node that did not do the step before; every worker
    runs some of the lines, and no line runs twice."""
    first, second = fleet.client(0), fleet.client(1)
    lines = chat_lines("[[status=400]]" if n == 7 else f"[[delay=0.2]] trip {n}" for n in range(400))
    before = mock.stats()["requests"]
    ran = [metric(worker, "batchline_lines_total") for worker in fleet.workers]
    uploaded = first.files.create(file=lines, purpose="batch")
    assert second.files.retrieve(uploaded.id) == uploaded
    created = second.batches.create(input_file_id=uploaded.id, endpoint=CHAT, completion_window="24h")
    batch = await_end(first, created.id)
    assert batch.status == "completed"
    assert counts_of(batch) == (400, 399, 1)
    records = results_of(second, batch, lines)
    assert [name for name, record in records.items() if record["error"]] == ["line-7"]
    assert results_of(first, batch, lines) == records
    assert mock.stats()["requests"] - before == 400
    assert all(
        metric(worker, "batchline_lines_total") > so_far for worker, so_far in zip(fleet.workers, ran, strict=True)
    )
    assert first.files.delete(uploaded.id).deleted
    with pytest.raises(openai.NotFoundError):
        second.files.content(uploaded.id)


def test_a_cancel_reaches_the_workers(fleet: Fleet, mock: Mock) -> None:
    """C10: lines in flight finish and count, all others fail as cancelled."""
    first, second = fleet.client(0), fleet.client(1)
    lines = chat_lines(f"[[delay=1]] cancelled {n}" for n in range(1000))
    before = mock.stats()["requests"]
    batch = submit(first, lines)
    wait_until(lambda: bool(mock.stats()["requests"] > before), what="the first lines in flight")
    assert second.batches.cancel(batch.id).status == "cancelling"
    ended = await_end(first, batch.id)
    assert ended.status == "cancelled"
    failed = [record["error"] for record in results_of(second, ended, lines).values() if record["error"]]
    assert {error["code"] for error in failed} == {"batch_cancelled"}
    assert mock.stats()["requests"] - before == counts_of(ended)[1] == 1000 - len(failed)


def test_an_api_node_reports_what_workers_do(fleet: Fleet, mock: Mock) -> None:
    """F1: in_flight, concurrency and waiting_for are those of the workers, summed; the node itself runs nothing."""
    client = fleet.client()
    batch = submit(client, chat_lines(f"[[delay=0.1]] progress {n}" for n in range(5000)))

    def worker_state() -> dict[str, Any]:
        progress = progress_of(fleet.apis[1], batch.id)
        return {name: progress[name] for name in ("in_flight", "concurrency", "waiting_for")}

    def is_busy() -> bool:
        now = worker_state()
        wait = now["waiting_for"]
        return 0 < now["in_flight"] <= now["concurrency"] <= _CAP and wait is not None and wait["reason"] == "slots"

    wait_until(is_busy, what="lines in flight")
    mock.follow(status={503: 100})
    wait_until(lambda: bool(worker_state()["waiting_for"]["reason"] == "upstream_paused"), what="the pause")
    assert worker_state()["waiting_for"]["upstream"] == "default"
    mock.follow()
    wait_until(is_busy, what="the end of the pause")
    client.batches.cancel(batch.id)
    assert await_end(client, batch.id).status == "cancelled"


@pytest.mark.proof
def test_a_cap_holds_over_the_fleet(fleet: Fleet, mock: Mock, postgres: Postgres) -> None:
    """F2: never more lines in flight than the cap, while a worker joins, gets its share and is killed; then its share
    goes back to those that live."""
    mock.follow()  # What was in flight before is not counted.
    client = fleet.client()
    batch = submit(client, chat_lines(f"[[delay=0.1]] cap {n}" for n in range(5000)))
    _await_shares(postgres, fleet, of=2)
    joined = fleet.add("worker")
    _await_shares(postgres, fleet, of=3)
    joined.kill()
    fleet.remove(joined)
    _await_shares(postgres, fleet, of=2)
    client.batches.cancel(batch.id)
    await_end(client, batch.id)
    assert 0 < mock.stats()["peak_in_flight"] <= _CAP


@pytest.mark.proof
def test_a_worker_and_an_api_node_end_in_order(fleet: Fleet, mock: Mock, postgres: Postgres) -> None:
    """F5: at SIGTERM the worker's lines in flight finish and are recorded, and its leases are handed back: others run
    the rest, nobody takes anything over, and no line runs twice. The API node takes the whole of an upload under way.
    Both end with 0."""
    lines = chat_lines(f"[[delay=0.3]] drained {n}" for n in range(400))
    rescues = [worker.log.count(_RESCUED) for worker in fleet.workers]
    before = mock.stats()
    client, staying = fleet.client(), list(fleet.workers)
    stopping = [fleet.begin("worker"), fleet.begin("api")]
    for node in stopping:
        node.await_ready()
    _await_shares(postgres, fleet, of=3)
    batch = submit(client, lines)
    wait_until(lambda: metric(stopping[0], "batchline_lines_in_flight") > 0, what="lines in flight")
    uploaded = _upload_through_sigterm(stopping)
    assert [node.program.wait() for node in stopping] == [0, 0]
    assert client.files.content(uploaded).content == b"x" * 4_000_000
    ended = await_end(client, batch.id)
    assert not any(record["error"] for record in results_of(client, ended, lines).values())
    after = mock.stats()
    assert after["requests"] - before["requests"] == after["distinct"] - before["distinct"] == 400
    assert [worker.log.count(_RESCUED) for worker in staying] == rescues
    for node in stopping:
        fleet.remove(node)


def _upload_through_sigterm(stopping: list[Service]) -> str:
    """Upload to the last of the nodes while they stop, and return the id of the file."""
    api = stopping[-1]
    body = upload_form(b"x" * 4_000_000)
    with api.connect() as connection:
        connection.sendall(api.head("/v1/files", length=len(body), headers=FORM) + body[: len(body) // 2])
        for node in stopping:
            node.program.send(signal.SIGTERM)
            node.program.wait_for_log("(stopping)")
        connection.sendall(body[len(body) // 2 :])
        reply = read_reply(connection)
    assert reply.status == 200
    return str(reply.json["id"])


@pytest.mark.proof
def test_late_answers_count_nowhere(fleet: Fleet, postgres: Postgres) -> None:
    """D5, C11, C12: while a worker stands still, its leases expire; of its three batches one is finished by another
    worker, one is cancelled, and one runs on. What it brings when it wakes changes the first two in nothing, is not in
    the files of the third a second time, and it goes on working."""
    (api, _), (stopped, _) = fleet.apis, fleet.workers
    sizes = {"finished": 1000, "cancelled": 1000, "running": 6000}
    lines = {name: chat_lines(f"[[delay=0.2]] {name} {n}" for n in range(size)) for name, size in sizes.items()}
    clients = {name: api.client(api.new_account(name)) for name in sizes}
    batches = {name: submit(client, lines[name]).id for name, client in clients.items()}
    for batch_id in batches.values():
        wait_until(partial(_has_two_holders, postgres, fleet, batch_id), what="both workers on it")
    # With these it knocks at the database as soon as it wakes.
    wait_until(lambda: metric(stopped, "batchline_held_bytes") > 0, what="answers that are not recorded yet")
    stopped.program.send(signal.SIGSTOP)
    clients["cancelled"].batches.cancel(batches["cancelled"])
    ended = {name: await_end(clients[name], batches[name]) for name in ("finished", "cancelled")}
    assert [batch.status for batch in ended.values()] == ["completed", "cancelled"]
    files = {name: _read_all(clients[name], batch) for name, batch in ended.items()}

    stopped.program.send(signal.SIGCONT)
    stopped.program.wait_for_log(r"(leases lost)")
    assert clients["running"].batches.retrieve(batches["running"]).status == "in_progress"
    ended["running"] = await_end(clients["running"], batches["running"])
    for name, batch in ended.items():
        assert clients[name].batches.retrieve(batch.id) == batch
        results_of(clients[name], batch, lines[name])
    assert files == {name: _read_all(clients[name], ended[name]) for name in files}
    _await_work_of(stopped, fleet.client())


def _await_work_of(worker: Service, client: OpenAI) -> None:
    ran = metric(worker, "batchline_lines_total")
    batch = submit(client, chat_lines(f"[[delay=0.1]] afterwards {n}" for n in range(3000)))
    wait_until(lambda: metric(worker, "batchline_lines_total") > ran, what="lines of the worker that woke")
    client.batches.cancel(batch.id)
    await_end(client, batch.id)


def _await_shares(postgres: Postgres, fleet: Fleet, *, of: int) -> None:
    """Until each of so many workers has its even share of the cap."""
    share = f"convert_from(reserved, 'UTF8')::json ->> 'default' = '{_CAP // of}'"
    sql = f"SELECT owner FROM processes WHERE lease_until > clock_timestamp() AND {share}"
    wait_until(lambda: _rows(postgres, fleet, sql) == of, what=f"even shares of {of}")


def _has_two_holders(postgres: Postgres, fleet: Fleet, batch_id: str) -> bool:
    sql = f"SELECT DISTINCT owner FROM shards WHERE batch_id = '{batch_id}' AND state = 'leased'"
    return _rows(postgres, fleet, sql) == 2


def _rows(postgres: Postgres, fleet: Fleet, sql: str) -> int:
    database = str(fleet.settings["database_url"]).rpartition("/")[2]
    return int(postgres.execute(sql, database=database).split()[1])


def _read_all(client: OpenAI, batch: Batch) -> list[bytes]:
    ids = [file_id for file_id in (batch.output_file_id, batch.error_file_id) if file_id is not None]
    return [client.files.content(file_id).content for file_id in ids]
