"""What a transaction and a line cost PostgreSQL, in processor time of all its processes, and what a pooler adds.

Workers commit by time, so four that share two cores make more and smaller transactions than one does. A line therefore
costs PostgreSQL more with each worker on the same machine, while a transaction must not.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]
import pytest

from tests.support.fleet import Fleet, running_fleet
from tests.support.pgbouncer import Pooler, running_pooler
from tests.support.postgres_server import Postgres, running_postgres
from tests.support.s3_server import Seaweed
from tests.support.service import Mock, await_end, chat_lines, counts_of, running_mock, submit

pytestmark = pytest.mark.proof

_LINES = 50_000
_ROUNDS = 4
_FLAT = 1.3
"""The most that a cost may grow by. One that grew with the number of workers or of batches would grow by far more."""


class Cost(NamedTuple):
    """Of whole batches, each from its create to its end."""

    lines: int
    seconds: float
    cpu: float
    """Of PostgreSQL."""
    transactions: int
    """Those that wrote something."""
    pooler_cpu: float = 0.0

    @property
    def milliseconds_a_transaction(self) -> float:
        return self.cpu / self.transactions * 1e3

    @property
    def microseconds(self) -> float:
        return self.cpu / self.lines * 1e6

    @property
    def pooler_microseconds(self) -> float:
        return self.pooler_cpu / self.lines * 1e6

    @property
    def speed(self) -> float:
        return self.lines / self.seconds


@pytest.fixture
def durable_postgres() -> Iterator[Postgres]:
    with running_postgres(durable=True) as server:
        yield server


@pytest.fixture
def mock() -> Iterator[Mock]:
    with running_mock() as running:
        yield running


def test_a_transaction_costs_the_same_with_more_workers_and_a_line_with_more_stored_batches(
    tmp_path: Path, durable_postgres: Postgres, seaweed: Seaweed, mock: Mock
) -> None:
    """One and four workers; about ten and ten thousand finished batches in the table. They take turns, as a machine may
    be slower for minutes. All rounds count together: one batch costs PostgreSQL less than half a second, of which the
    system counts hundredths, and the same fleet differs by a third from batch to batch."""
    running = partial(running_fleet, postgres=durable_postgres, seaweed=seaweed, upstream_url=mock.url)
    with (
        running(tmp_path / "one", "api", "worker") as one,
        running(tmp_path / "four", "api", *["worker"] * 4) as four,
        running(tmp_path / "filled", "api", *["worker"] * 4) as filled,
    ):
        for fleet in (one, four, filled):
            _run(fleet, durable_postgres)
        _fill_table(filled, durable_postgres, 10_000)
        rounds = [[_run(fleet, durable_postgres) for fleet in (one, four, filled)] for _ in range(_ROUNDS)]
    with_one, with_four, with_filled = map(_sum, zip(*rounds, strict=True))
    _print_table({"1 worker": with_one, "4 workers": with_four, "4 workers, 10,000 batches": with_filled})
    assert with_four.milliseconds_a_transaction / with_one.milliseconds_a_transaction < _FLAT
    assert with_filled.microseconds / with_four.microseconds < _FLAT


def test_the_whole_trip_works_through_a_pooler_in_transaction_mode(
    tmp_path: Path, durable_postgres: Postgres, seaweed: Seaweed, mock: Mock
) -> None:
    """F2: the whole trip through PgBouncer with BATCHLINE_DATABASE_POOLER on, beside a direct connection."""
    costs = {}
    roles = ("api", "worker", "worker")
    running = partial(running_fleet, postgres=durable_postgres, seaweed=seaweed, upstream_url=mock.url)
    with running(tmp_path / "direct", *roles) as fleet:
        costs["direct"] = _together(fleet, durable_postgres)
    with running_pooler(tmp_path, durable_postgres) as pooler:
        database = durable_postgres.new_database().rpartition("/")[2]
        url = durable_postgres.url(database, port=pooler.port)
        with running(tmp_path / "pooled", *roles, database_url=url, database_pooler="on") as fleet:
            costs["through PgBouncer"] = _together(fleet, durable_postgres, pooler)
            _cancel_and_delete(fleet)
    _print_table(costs)


def _cancel_and_delete(fleet: Fleet) -> None:
    client = fleet.client()
    batch = submit(client, chat_lines(f"[[delay=1]] {n}" for n in range(5000)))
    client.batches.cancel(batch.id)
    assert await_end(client, batch.id).status == "cancelled"
    assert client.files.delete(batch.input_file_id).deleted


def _together(fleet: Fleet, postgres: Postgres, pooler: Pooler | None = None) -> Cost:
    return _sum(_run(fleet, postgres, pooler) for _ in range(_ROUNDS))


def _sum(costs: Iterable[Cost]) -> Cost:
    return Cost(*map(sum, zip(*costs, strict=True)))


def _run(fleet: Fleet, postgres: Postgres, pooler: Pooler | None = None) -> Cost:
    client = fleet.client()
    lines = chat_lines(f"Summarise the ticket number {n} of the queue" for n in range(_LINES))
    uploaded = client.files.create(file=lines, purpose="batch")
    pids = [postgres.pid] if pooler is None else [postgres.pid, pooler.pid]
    began, before = time.monotonic(), list(map(_cpu_seconds, pids))
    first_transaction = postgres.next_transaction_id()
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h", timeout=60
    )
    while client.batches.retrieve(batch.id).status != "completed":
        time.sleep(0.2)
    took = time.monotonic() - began
    transactions = postgres.next_transaction_id() - first_transaction
    cpu, *pooler_cpu = (_cpu_seconds(pid) - so_far for pid, so_far in zip(pids, before, strict=True))
    cost = Cost(_LINES, took, cpu, transactions, *pooler_cpu)
    assert counts_of(client.batches.retrieve(batch.id)) == (_LINES, _LINES, 0)
    return cost


def _cpu_seconds(pid: int) -> float:
    """Of a process, its children, and those of them that have ended."""
    while True:
        # A child that ends meanwhile is counted by its parent the next time.
        with suppress(psutil.NoSuchProcess):
            return _sum_of_cpu_seconds(psutil.Process(pid))


def _sum_of_cpu_seconds(process: psutil.Process) -> float:
    own = process.cpu_times()
    spent = own.user + own.system + own.children_user + own.children_system
    for child in process.children(recursive=True):
        times = child.cpu_times()
        spent += times.user + times.system
    return float(spent)


def _fill_table(fleet: Fleet, postgres: Postgres, count: int) -> None:
    """Add copies of a finished batch, without what is kept of it for repairs."""
    database = str(fleet.settings["database_url"]).rpartition("/")[2]
    postgres.execute(
        f"""
        INSERT INTO batches
        SELECT (
            jsonb_populate_record(over, jsonb_build_object('id', over.id || '-' || n, 'seq', -n, 'work_key', NULL))
        ).*
        FROM batches AS over, generate_series(1, {count}) AS n
        WHERE over.id = (SELECT min(id) FROM batches WHERE status = 'completed')
        """,
        database=database,
    )
    postgres.execute("VACUUM ANALYZE batches", database=database)


def _print_table(costs: dict[str, Cost]) -> None:
    print(f"\n{'':30}{'lines/s':>10}{'transactions':>14}{'ms each':>10}{'us a line':>12}{'PgBouncer':>12}")
    for name, cost in costs.items():
        print(
            f"{name:30}{cost.speed:>10,.0f}{cost.transactions:>14,}{cost.milliseconds_a_transaction:>10.2f}"
            f"{cost.microseconds:>12.1f}{cost.pooler_microseconds:>12.1f}"
        )
