"""Promises of the SQLite store alone: durability, one writer that groups commits, locks, migrations."""

import asyncio
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Event, Timer

import pytest

from batchline.domain.errors import LeaseLost, StoreDown
from batchline.domain.records import SchemaVersions
from batchline.store.sql import Script, change, fenced
from batchline.store.sqlite import database as database_module
from batchline.store.sqlite.database import SqliteDatabase, migrate
from batchline.store.store import SqlStore
from batchline.system import ThreadPool
from tests.support.clocks import SettableClock
from tests.support.stores import World

pytestmark = pytest.mark.anyio

PATIENCE = 60
"""Ends a test that hangs; no test depends on its length."""


async def _nothing(_: float | str) -> None: ...


class Embedded:
    """A store on SQLite whose database a test can look into."""

    def __init__(self, path: Path, **timeouts: float) -> None:
        self.path = path
        self._pools = ThreadPool(1, name="writer"), ThreadPool(1, name="reader")
        writer, reader = self._pools
        self.database = SqliteDatabase(path, clock=SettableClock(), writer=writer, reader=reader, **timeouts)
        store = SqlStore(self.database)
        self.world = World(store, pass_time=_nothing, lose_time=_nothing, die=_nothing, set_time=_nothing)
        self.store = self.world.store

    def close(self) -> None:
        for pool in self._pools:
            pool.close()
        self.database.close()

    async def hold_writer(self) -> tuple[asyncio.Task[int], Event]:
        """Keep the writer inside a transaction until the event is set."""
        inside, go_on = Event(), Event()

        def script() -> Script[int]:
            inside.set()
            go_on.wait()
            return (yield from change("probe"))

        writing = asyncio.create_task(self.database.write(script))
        await asyncio.to_thread(inside.wait)
        return writing, go_on


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Embedded]:
    with closing(Embedded(tmp_path / "store.sqlite")) as opened:
        yield opened


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the database as another process would."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


@pytest.mark.rule("C7", "A commit is on the disk before anyone hears of it.")
def test_a_commit_is_on_the_disk_before_anyone_hears_of_it(embedded: Embedded) -> None:
    """C7: a batch that was answered with 200 survives a loss of power."""
    writing = embedded.database._for_writing
    assert writing.execute("PRAGMA synchronous").fetchone()[0] == 2, "FULL"
    assert writing.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert writing.execute("PRAGMA fullfsync").fetchone()[0] == 1
    with closing(sqlite3.connect(embedded.path)) as other:
        assert other.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


async def test_a_read_does_not_wait_for_a_long_write(embedded: Embedded) -> None:
    """C8: a read sees the state before a write that is not committed."""
    owner = await embedded.world.owner()
    writing, go_on = await embedded.hold_writer()
    second = asyncio.create_task(embedded.world.owner())
    try:
        async with asyncio.timeout(PATIENCE):
            assert [key.id for key in await embedded.store.keys()] == [owner.key_id]
        assert not writing.done()
    finally:
        go_on.set()
    await writing
    made = {owner.key_id, (await second).key_id}
    assert {key.id for key in await embedded.store.keys()} == made


def test_writes_that_wait_share_one_commit(embedded: Embedded) -> None:
    """All of them share one wait for the disk, and every caller gets its own result."""

    async def play() -> list[str]:
        writing, go_on = await embedded.hold_writer()
        waiting = [asyncio.create_task(embedded.world.owner()) for _ in range(20)]
        await asyncio.sleep(0)
        ran: list[str] = []
        embedded.database._for_writing.set_trace_callback(ran.append)
        go_on.set()
        owners = await asyncio.gather(*waiting)
        await writing
        assert {key.id for key in await embedded.store.keys()} == {owner.key_id for owner in owners}
        return ran

    assert [one for one in asyncio.run(play()) if one in {"BEGIN IMMEDIATE", "COMMIT"}] == [
        "COMMIT",
        "BEGIN IMMEDIATE",
        "COMMIT",
    ]


async def test_a_script_that_fails_undoes_only_itself(embedded: Embedded) -> None:
    """An error in a shared commit reaches its own caller alone and undoes its own script alone."""

    def lose() -> Script[None]:
        yield from change("insert_organization", organization_id="o", name="undone", at=1)
        yield from fenced("revoke_key", key_id="unknown", at=1)

    def break_a_rule() -> Script[int]:
        yield from change("insert_organization", organization_id="p", name="undone too", at=1)
        key = {"key_id": "k", "digest": b"", "hint": "", "name": "", "scopes": "", "at": 1, "expires_at": None}
        return (yield from change("insert_key", project_id="unknown", **key))

    writing, go_on = await embedded.hold_writer()
    before = asyncio.create_task(embedded.world.owner("alpha"))
    await asyncio.sleep(0)
    failing = [asyncio.create_task(embedded.database.write(script)) for script in (lose, break_a_rule)]
    await asyncio.sleep(0)
    after = asyncio.create_task(embedded.world.owner("beta"))
    await asyncio.sleep(0)
    go_on.set()
    await writing
    with pytest.raises(LeaseLost):
        await failing[0]
    with pytest.raises(sqlite3.IntegrityError):
        await failing[1]
    made = {(await before).key_id, (await after).key_id}
    assert {key.id for key in await embedded.store.keys()} == made
    with closing(sqlite3.connect(embedded.path)) as other:
        assert other.execute("SELECT name FROM organizations").fetchall() == [("default",)]


class Torn(BaseException):
    """An error that no code expects."""


def tear() -> Script[None]:
    yield from change("probe")
    raise Torn


def say_nonsense() -> Script[None]:
    """Run a statement that the driver refuses, as in a damaged database: the rest of the commit is uncertain."""
    yield from change("insert_organization", organization_id="n", name="nonsense", at=object())


@pytest.mark.parametrize(("script", "error"), [(tear, Torn), (say_nonsense, StoreDown)])
async def test_whatever_ends_a_shared_commit_nobody_hears_of_success(
    embedded: Embedded, script: Callable[[], Script[None]], error: type[BaseException]
) -> None:
    """C7, C12: scripts before and after it in the same commit fail too, leave nothing, and the writer goes on."""
    writing, go_on = await embedded.hold_writer()
    before = asyncio.create_task(embedded.world.owner())
    await asyncio.sleep(0)
    failing = asyncio.create_task(embedded.database.write(script))
    await asyncio.sleep(0)
    after = asyncio.create_task(embedded.world.owner())
    await asyncio.sleep(0)
    go_on.set()
    await writing
    results = await asyncio.gather(before, failing, after, return_exceptions=True)
    assert {type(one) for one in results} <= {StoreDown, error}
    assert await _writes_again(embedded) == 1


@pytest.mark.parametrize("refused", [{"COMMIT"}, {"COMMIT", "ROLLBACK"}])
async def test_a_commit_that_fails_is_no_success(embedded: Embedded, refused: set[str]) -> None:
    """C7, C12: every caller that shared the commit gets the error, even if it cannot be rolled back.

    Nothing of it is stored by the next commit.
    """

    def authorize(action: int, statement: str | None, *_: str | None) -> int:
        return sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_TRANSACTION and statement in refused else 0

    writing, go_on = await embedded.hold_writer()
    waiting = [asyncio.create_task(embedded.world.owner()) for _ in range(3)]
    await asyncio.sleep(0)
    embedded.database._for_writing.set_authorizer(authorize)
    go_on.set()
    results = await asyncio.gather(writing, *waiting, return_exceptions=True)
    assert [type(one) for one in results] == [StoreDown] * 4
    embedded.database._for_writing.set_authorizer(None)
    assert await _writes_again(embedded) == 1


async def _writes_again(embedded: Embedded) -> int:
    """Create a key, with a second try in case a transaction was left open, and return the number of keys."""
    with suppress(StoreDown):
        await embedded.store.check()
    made = await embedded.world.owner()
    keys = await embedded.store.keys()
    assert made.key_id in {key.id for key in keys}
    return len(keys)


async def test_who_lives_is_asked_when_nobody_can_claim_any_more(embedded: Embedded) -> None:
    """D5: a process that started and claimed while a rescue waited for the database is not taken for dead."""
    world = embedded.world

    await world.running(shards=[1])
    living = ["serve"]
    writing, go_on = await embedded.hold_writer()
    claiming = asyncio.create_task(world.claim(holder="hand"))
    await asyncio.sleep(0)
    rescuing = asyncio.create_task(embedded.store.rescue(live_owners=lambda: list(living)))
    await asyncio.sleep(0)
    living.append("hand")
    go_on.set()
    await writing
    assert len(await claiming) == 1
    assert await rescuing == 0


_WRITER = """
import asyncio
import sys
from pathlib import Path
from batchline.store.sqlite.database import SqliteDatabase
from batchline.store.store import SqlStore
from batchline.system import CommandClock, ThreadPool


async def write():
    pools = [ThreadPool(1, name="writer"), ThreadPool(1, name="reader")]
    store = SqlStore(SqliteDatabase(Path(sys.argv[1]), clock=CommandClock(), writer=pools[0], reader=pools[1]))
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(200):
        await store.check()
    for pool in pools:
        pool.close()
    print("written", flush=True)


asyncio.run(write())
"""


def test_processes_that_write_all_the_time_wait_for_each_other(tmp_path: Path) -> None:
    """F1: a database that another process writes to does not count as an outage."""
    path = tmp_path / "store.sqlite"
    Embedded(path).close()
    command = [sys.executable, "-c", _WRITER, str(path)]
    writers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        assert [_line_from(writer) for writer in writers] == ["ready"] * 3
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        assert [_line_from(writer) for writer in writers] == ["written"] * 3
    finally:
        for writer in writers:
            writer.communicate()


def test_a_locked_database_is_down_until_it_is_let_go(tmp_path: Path) -> None:
    """B2, F5: a write that raised StoreDown never happened; reads go on; once unlocked, writes succeed again."""
    embedded = Embedded(tmp_path / "store.sqlite", busy_timeout_seconds=0.02)

    async def play() -> None:
        owner = await embedded.world.owner()
        with locked(embedded.path):
            for _ in range(2):
                with pytest.raises(StoreDown):
                    await embedded.store.check()
            lost = await asyncio.gather(*(embedded.world.owner() for _ in range(3)), return_exceptions=True)
            assert [type(one) for one in lost] == [StoreDown] * 3
            assert [key.id for key in await embedded.store.keys()] == [owner.key_id]
        await embedded.store.check()
        again = await embedded.world.owner()
        assert {key.id for key in await embedded.store.keys()} == {owner.key_id, again.key_id}

    with closing(embedded):
        asyncio.run(play())


_OPENER = """
import sys
import time
from pathlib import Path
from batchline.store.sqlite.database import SqliteDatabase

print("ready", flush=True)
for line in sys.stdin:
    at, path = line.strip().split(" ", 1)
    while time.time() < float(at):
        pass
    SqliteDatabase(Path(path), clock=None, writer=None, reader=None).close()
    print("opened", flush=True)
"""


def test_processes_that_start_at_once_migrate_once(tmp_path: Path) -> None:
    """F1, F3: ``serve`` and ``keys`` may start on a new folder at the same moment."""
    command = [sys.executable, "-c", _OPENER]
    openers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        assert [_line_from(opener) for opener in openers] == ["ready"] * 3
        for number in range(12):
            path = tmp_path / f"{number}.sqlite"
            at = time.time() + 0.01
            for opener in openers:
                assert opener.stdin is not None
                opener.stdin.write(f"{at} {path}\n")
                opener.stdin.flush()
            assert [_line_from(opener) for opener in openers] == ["opened"] * 3
            with closing(sqlite3.connect(path)) as made:
                assert made.execute("SELECT count(*) FROM probe").fetchone()[0] == 1
    finally:
        for opener in openers:
            opener.communicate()


def _line_from(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_opening_waits_for_another_process_that_makes_the_database(tmp_path: Path) -> None:
    """F3: the race above, held open: the first process holds the lock of a database that is not in WAL mode yet."""
    path = tmp_path / "store.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        release = Timer(0.2, other.execute, ["ROLLBACK"])
        release.start()
        try:
            Embedded(path).close()
        finally:
            release.join()


def test_a_database_of_a_newer_version_is_left_alone(embedded: Embedded) -> None:
    """An older program must not lower the version: the newer one would then migrate a second time."""
    with closing(sqlite3.connect(embedded.path)) as other:
        other.execute("PRAGMA user_version = 99")
        with pytest.raises(StoreDown, match="newer version"):
            Embedded(embedded.path)
        with pytest.raises(StoreDown, match="newer version"):
            migrate(embedded.path)
        assert other.execute("PRAGMA user_version").fetchone()[0] == 99


@pytest.mark.rule("F1", "Only the holder of the data folder migrates it.")
def test_opening_does_not_migrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: a command may run beside a service of the former version, which expects its own tables."""
    path = tmp_path / "store.sqlite"
    Embedded(path).close()
    scripts = database_module._migrations()
    monkeypatch.setattr(database_module, "_migrations", lambda: [*scripts, "CREATE TABLE later (id INTEGER);"])
    with pytest.raises(StoreDown, match=r"older version of batchline.* batchline migrate"):
        Embedded(path)
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("PRAGMA user_version").fetchone()[0] == len(scripts)
    migrate(path)
    with closing(Embedded(path)) as embedded:
        versions = asyncio.run(embedded.store.schema_versions())
    assert versions == SchemaVersions(database=len(scripts) + 1, program=len(scripts) + 1)
