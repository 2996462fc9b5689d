"""Every invariant holds in worlds made from seeds, and faults that are planted in the code are caught."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from batchline.domain.errors import LeaseLost
from batchline.store import shards
from batchline.store.batches import fetch_batch
from batchline.store.ledger import charge_account
from batchline.store.shards import SqlShards
from batchline.store.sql import Script, change, rows
from batchline.store.sqlite.clock import TrustedClock
from tests.simulation.clocks import MachineClock
from tests.simulation.world import Process, World

# A process that is killed while it opens a file leaves it open.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

_SEEDS_TO_CATCH = 100


@pytest.mark.parametrize("seed", range(1, 31))
def test_a_world_holds(seed: int) -> None:
    """C11, C12, D5: whatever is killed when, every line is in exactly one file once, and counts never fall."""
    World(seed).run()


@contextmanager
def no_fence() -> Iterator[None]:
    """Let a write succeed that follows a lost lease."""

    def unfenced(name: str, /, **params: Any) -> Script[None]:
        yield from change(name, **params)

    queries = "batchline.store.sqlite.database.load_queries"
    from batchline.store.sql import load_queries  # noqa: PLC0415 - the original, before it is patched

    def without_epochs(package: str) -> dict[str, str]:
        return load_queries(package) | {
            name: text.replace("AND epoch = :epoch AND state = 'leased'", "")
            for name, text in load_queries(package).items()
            if name == "advance_shard"
        }

    with mock.patch(queries, without_epochs), mock.patch.object(shards, "fenced", unfenced):
        yield


@contextmanager
def commit_before_durable() -> Iterator[None]:
    """Count lines before the bytes of their segment are durable."""
    record = SqlShards.record
    late: dict[str, Any] = {}

    async def put_later(self: Any, key: str, data: bytes) -> None:
        late[key] = (self, data)

    async def record_first(self: SqlShards, batch_id: str, **recorded: Any) -> int:
        left = await record(self, batch_id, **recorded)
        key = recorded["segment"].object_key
        if key in late:
            objects, data = late.pop(key)
            await put(objects, key, data)
        return left

    from batchline.objects.local import LocalObjects  # noqa: PLC0415 - patched below

    put = LocalObjects.put
    with mock.patch.object(LocalObjects, "put", put_later), mock.patch.object(SqlShards, "record", record_first):
        yield


@contextmanager
def publish_before_counting() -> Iterator[None]:
    """Show the batch as terminal before the lines that never ran are counted."""
    publish = SqlShards.publish

    async def publish_early(self: SqlShards, batch_id: str, **published: Any) -> Any:
        batch = await self._database.read(lambda: fetch_batch(batch_id))
        return await publish(self, batch_id, **published | {"failed": batch.failed})

    with mock.patch.object(SqlShards, "publish", publish_early):
        yield


@contextmanager
def charge_before_recording() -> Iterator[None]:
    """Charge in a separate transaction, before the one that counts the lines."""
    record = SqlShards.record

    async def charge_first(self: SqlShards, batch_id: str, **recorded: Any) -> int:
        account = (await self._database.read(lambda: rows("account_of_batch", batch_id=batch_id)))[0]
        paid = recorded.pop("charges")
        await self._database.write(
            lambda: charge_account(
                account["organization_id"],
                key_id=account["key_id"],
                batch_id=batch_id,
                charges=paid,
                at=recorded["at"],
            )
        )
        return await record(self, batch_id, **recorded)

    with mock.patch.object(SqlShards, "record", charge_first):
        yield


@contextmanager
def expiry_by_the_wall_clock() -> Iterator[None]:
    """Believe the clock of the only machine at once."""
    with mock.patch.object(TrustedClock, "due", TrustedClock.now):
        yield


@contextmanager
def expiry_by_the_process_clock() -> Iterator[None]:
    """Let each process of a fleet end windows and lifetimes by its own clock."""
    open_database = Process._open

    def open_with_own_clock(self: Process, machine: MachineClock, threads: Any) -> Any:
        database, clock = open_database(self, machine, threads)
        if self.world.plan.shared:
            read_clocks = database._read_clocks
            database._read_clocks = lambda: read_clocks() | {"due": int(machine.now())}  # type: ignore[method-assign]
        return database, clock

    with mock.patch.object(Process, "_open", open_with_own_clock):
        yield


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        (no_fence, 146),
        (commit_before_durable, 44),
        (publish_before_counting, 1),
        (charge_before_recording, 14),
        (expiry_by_the_wall_clock, 4),
        (expiry_by_the_process_clock, 2),
    ],
)
def test_a_planted_fault_is_caught(fault: Any, first: int) -> None:
    """The simulation catches a fault in the code; otherwise a passing run would prove nothing. Each search begins at a
    seed that is known to show the fault, and goes on in case a change has moved it."""
    with fault():
        for seed in range(first, first + _SEEDS_TO_CATCH):
            try:
                World(seed).run()
            except (AssertionError, LeaseLost, ExceptionGroup):
                return
    pytest.fail(f"{fault.__name__} was not caught in {_SEEDS_TO_CATCH} seeds")


def test_the_same_seed_makes_the_same_world() -> None:
    """A seed that fails can be run again and looked at."""
    first, second = World(7), World(7)
    first.run()
    second.run()
    assert (first.steps, first.time.now) == (second.steps, second.time.now)
    assert first.observer.seen == second.observer.seen
