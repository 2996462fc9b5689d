"""Queries of the SQLite store do not slow down with history, nor with what other batches have open."""

import re
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from batchline.store.sql import load_queries, rows
from batchline.store.sqlite.database import SqliteDatabase, migrate
from batchline.store.store import SqlStore
from batchline.system import ThreadPool
from tests.support.clocks import SettableClock
from tests.support.query_plans import GROWING, SMALL_INDEXES, SUMS, WHOLE_READS
from tests.support.stores import NOW, World, cut

_DIALECT = "batchline.store.sqlite"
_SCAN = re.compile(rf"SCAN ({'|'.join(sorted(GROWING))})\b(?: USING (?:COVERING )?INDEX (?P<index>\w+))?")
_QUERIES = load_queries(_DIALECT)


@pytest.fixture(scope="module")
def tables() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    for migration in sorted((files(_DIALECT) / "migrations").iterdir(), key=lambda path: path.name):
        connection.executescript(migration.read_text())
    return connection


def plan_of(tables: sqlite3.Connection, name: str) -> list[str]:
    sql = _QUERIES[name]
    params = dict.fromkeys(re.findall(r":(\w+)", sql), "[]")
    return [row[3] for row in tables.execute(f"EXPLAIN QUERY PLAN {sql}", params)]


@pytest.mark.parametrize("name", _QUERIES.keys() - WHOLE_READS)
def test_no_statement_walks_what_is_kept(tables: sqlite3.Connection, name: str) -> None:
    """With 10,000 finished batches, looking for those past their window took 6 ms of every second.

    An index without a condition on it is walked as a whole, just as a table is.
    """
    scans = [found for step in plan_of(tables, name) if (found := _SCAN.match(step))]
    assert [scan[0] for scan in scans if scan["index"] not in SMALL_INDEXES] == []


@pytest.mark.parametrize("name", SUMS)
def test_sums_stay_in_an_index(tables: sqlite3.Connection, name: str) -> None:
    assert all("USING COVERING INDEX" in step for step in plan_of(tables, name))


@pytest.mark.parametrize(
    ("name", "condition"),
    [
        ("batches", "batches_of_project (project_id=? AND created_at>? AND created_at<?)"),
        ("batches_of_status", "batches_by_status (project_id=? AND status=? AND created_at>? AND created_at<?)"),
        ("files_newest_first", "files_of_project (project_id=? AND seq<?)"),
        ("files_oldest_first", "files_of_project (project_id=? AND seq>?)"),
        ("files_of_purpose_newest_first", "files_by_purpose (project_id=? AND purpose=? AND seq<?)"),
        ("files_of_purpose_oldest_first", "files_by_purpose (project_id=? AND purpose=? AND seq>?)"),
        ("claimable_lanes", "lanes_next (open=?)"),
        ("claimable_shards", "shards_open (project_id=? AND model=?)"),
        ("delete_idle_lanes", "lanes_idle (project_id=?)"),
    ],
)
def test_a_page_begins_where_its_index_says(tables: sqlite3.Connection, name: str, condition: str) -> None:
    """B5, C9, D8: all conditions are on the index, and it has the order of the page: nothing is read and left out."""
    plan = plan_of(tables, name)
    assert plan[0].endswith(condition)
    assert not any("TEMP B-TREE" in step for step in plan)


class Counted(World):
    """A store that counts the steps of SQLite's virtual machine."""

    def __init__(self, folder: Path) -> None:
        self._threads = [ThreadPool(1, name="writer"), ThreadPool(1, name="reader")]
        connections: list[sqlite3.Connection] = []

        def connect(*args: Any, **options: Any) -> sqlite3.Connection:
            connections.append(_connect(*args, **options))
            return connections[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sqlite3, "connect", connect)
            writer, reader = self._threads
            self.database = SqliteDatabase(
                folder / "db.sqlite", clock=SettableClock(now=NOW), writer=writer, reader=reader
            )
        self._connections = connections
        super().__init__(
            SqlStore(self.database), pass_time=_nothing, lose_time=_nothing, die=_nothing, set_time=_nothing
        )

    async def lanes(self) -> list[str]:
        """Return the models of all lanes."""
        self.database._queries["lanes"] = "SELECT model FROM lanes ORDER BY model"
        return [row["model"] for row in await self.database.read(lambda: rows("lanes"))]

    async def steps(self, call: Callable[[], Awaitable[object]]) -> int:
        """Return how many steps a call takes, in tens."""
        count = 0

        def step() -> int:
            nonlocal count
            count += 1
            return 0

        for connection in self._connections:
            connection.set_progress_handler(step, 10)
        await call()
        for connection in self._connections:
            connection.set_progress_handler(None, 0)
        return count

    def close(self) -> None:
        for threads in self._threads:
            threads.close()
        self.database.close()


_connect = sqlite3.connect


async def _nothing(_value: object) -> None:
    pass


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Counted]:
    counted = Counted(tmp_path)
    yield counted
    counted.close()


@pytest.mark.anyio
async def test_the_end_of_a_batch_costs_the_same_whatever_else_is_open(world: Counted) -> None:
    """With 100,000 open shards of other batches, each batch that ended took a second of the only writer."""
    owner = await world.owner()
    costs = []
    for others in (10, 2000):
        await world.running(owner, shards=[1] * others, model=f"other {others}")
        batch = await world.running(owner, shards=[1], model="mine")
        costs.append(await world.steps(partial(world.store.delete_work, batch.id)))
    assert costs[1] <= 1.5 * costs[0]


@pytest.mark.anyio
async def test_the_lanes_of_a_project_without_open_shards_are_deleted_when_a_batch_ends(world: Counted) -> None:
    """Else they would grow with every name of a model that a client ever used. Those with open shards stay."""
    owner = await world.owner()
    await world.running(owner, shards=[1], model="mine")
    await world.record_all(await world.claim())
    await world.running(owner, shards=[1], model="waits")
    await world.running(await world.owner("beta"), shards=[1], model="of another")
    await world.publish(await world.finish())
    assert await world.lanes() == ["of another", "waits"]


@pytest.mark.anyio
async def test_the_start_and_the_claim_of_a_batch_cost_the_same_whatever_lanes_are_open(world: Counted) -> None:
    """With 12,000 lanes, a new batch took half a minute of the only writer: each lane looked at all others."""
    owner = await world.owner()
    starts, claims = [], []
    for others in (10, 1000):
        for n in range(others):
            await world.running(owner, shards=[1], model=f"{others} {n}")
        batch = await world.validating(owner)
        shards = [shard for n in range(20) for shard in cut([1], model=f"mine {others} {n}")]
        start = partial(
            world.store.start_batch, batch.id, epoch=1, shards=shards, total=len(shards), work_key="w", at=NOW
        )
        starts.append(await world.steps(start))
        claims.append(await world.steps(lambda: world.claim(lines=16)))
    assert starts[1] <= 1.5 * starts[0]
    assert claims[1] <= 1.5 * claims[0]


@pytest.mark.anyio
async def test_a_page_costs_the_same_with_any_history(world: Counted) -> None:
    """C9, B5: with 300,000 batches, a list by status took 400 ms of the only reader."""
    owner = await world.owner()
    await world.running(owner)
    store, project = world.store, owner.project_id
    pages: list[Callable[[], Awaitable[object]]] = [
        lambda: store.batches(project, after=None, limit=5, status="in_progress"),
        lambda: store.batches(project, after=None, limit=5, created_before=NOW + 1),
        lambda: store.batches(project, after=None, limit=5, created_after=NOW + 500),
        lambda: store.batches(project, after=f"batch_{10:04}", limit=5),
        lambda: store.files(project, purpose="batch_output", ascending=False, after=None, limit=5, at=NOW),
        lambda: store.files(project, purpose=None, ascending=True, after=f"file-{11:04}", limit=5, at=NOW),
    ]
    costs = []
    for history in (30, 1000):
        for n in range(history):
            batch = await world.validating(owner, created_at=NOW + 2 + n // 5)
            await store.cancel_batch(project, batch.id, at=NOW)
            await world.stored(owner)
        costs.append([await world.steps(page) for page in pages])
    assert [late <= 1.5 * early for early, late in zip(*costs, strict=True)] == [True] * len(pages), costs


@pytest.mark.anyio
async def test_lanes_of_an_older_database_are_open_if_they_have_open_shards(tmp_path: Path) -> None:
    """The first schema did not say which lanes are open: after the upgrade, all open shards are found."""
    path = tmp_path / "db.sqlite"
    first = (files(_DIALECT) / "migrations" / "0001_initial.sql").read_text()
    with closing(sqlite3.connect(path)) as older:
        older.executescript(first)
        older.executescript(f"""
            PRAGMA user_version = 1;
            INSERT INTO organizations (id, name, created_at) VALUES ('o', 'o', 0);
            INSERT INTO projects (id, organization_id, name, created_at) VALUES ('p', 'o', 'p', 0);
            INSERT INTO keys (id, project_id, digest, hint, created_at) VALUES ('k', 'p', 'k', '', 0);
            INSERT INTO batches (id, project_id, key_id, endpoint, input_file_id, metadata, status, created_at,
                expires_at, epoch, digest, work_key, total)
            VALUES ('b', 'p', 'k', '/', 'f', '{{}}', 'in_progress', 0, {NOW + 9}, 1, '', 'w', 2);
            INSERT INTO shards (batch_id, n, project_id, "offset", length, lines, model, expires_at, settled, state)
            VALUES ('b', 0, 'p', 0, 9, 1, 'open', {NOW + 9}, x'00', 'open'),
                ('b', 1, 'p', 9, 9, 1, 'done', {NOW + 9}, x'01', 'done');
            INSERT INTO lanes (project_id, model, virtual_time) VALUES ('p', 'open', 7), ('p', 'done', 5);
        """)
    migrate(path)
    world = Counted(tmp_path)
    try:
        assert [shard.n for shard in await world.claim()] == [0]
        with closing(sqlite3.connect(path)) as upgraded:
            assert dict(upgraded.execute("SELECT model, virtual_time FROM lanes")) == {"open": 8, "done": 5}
    finally:
        world.close()
