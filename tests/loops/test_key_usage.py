"""When a key was last used is known to operators a few seconds later (F3)."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.errors import StoreDown
from batchline.loops.key_usage import KeyUsage
from tests.simulation.virtual import EPOCH
from tests.support.clocks import SettableClock
from tests.support.engine_harness import Bench


class Accounts:
    def __init__(self) -> None:
        self.written: list[Mapping[str, int]] = []
        self.on_write: Callable[[], None] = lambda: None

    async def touch_keys(self, key_usage: Mapping[str, int]) -> None:
        self.on_write()
        self.written.append(key_usage)


@pytest.mark.anyio
async def test_the_last_use_of_each_key_is_written_once() -> None:
    """However often a key was used, and nothing if none was."""
    accounts: Any = Accounts()
    clock = SettableClock(now=100.7)
    usage = KeyUsage(accounts=accounts, clock=clock)
    await usage.step()
    usage.mark("a")
    usage.mark("b")
    clock.advance(5)
    usage.mark("a")
    assert not await usage.step()
    await usage.step()
    assert accounts.written == [{"a": 105, "b": 100}]


@pytest.mark.anyio
async def test_uses_that_could_not_be_written_are_written_later() -> None:
    """F3: and a use during the outage is the later one."""
    accounts: Any = Accounts()
    clock = SettableClock(now=100)
    usage = KeyUsage(accounts=accounts, clock=clock)
    usage.mark("a")
    usage.mark("b")

    def fail() -> None:
        clock.advance(5)
        usage.mark("a")
        raise StoreDown("away")

    accounts.on_write = fail
    with pytest.raises(StoreDown):
        await usage.step()
    accounts.on_write = lambda: None
    await usage.step()
    assert accounts.written == [{"a": 105, "b": 100}]


def test_the_last_use_of_a_key_is_written_soon(tmp_path: Path) -> None:
    """F3: what operators see of it is a few seconds old at most."""
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            owner = await bench.owner("alpha")
            await asyncio.sleep(100)
            bench.engine.api_role.services.on_key_used(owner.key_id)
            await asyncio.sleep(6)
            (key,) = await bench.rows.keys()
            assert key.last_used_at is not None
            assert bench.time.now - 7 < key.last_used_at - EPOCH <= bench.time.now

        bench.play(scene())
