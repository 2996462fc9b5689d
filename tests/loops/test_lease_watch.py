"""Leases end while the store is available, however slow it is, and do not while it is not (D5)."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.errors import StoreDown
from batchline.domain.states import BatchStatus
from tests.support.engine_harness import Bench

LEASE_SECONDS = 6.0


@pytest.mark.rule("D5", "A batch whose finalizer got no reply is finalized when its lease has ended.")
@pytest.mark.parametrize("write_seconds", [0.0, LEASE_SECONDS / 10, LEASE_SECONDS / 4])
def test_a_lease_ends_in_a_slow_store(tmp_path: Path, write_seconds: float) -> None:
    """However long a rescue takes, since it does not delay the note that the store is available."""
    with closing(Bench(tmp_path, lease_seconds=LEASE_SECONDS)) as bench:
        lost: list[str] = []

        async def lose_reply(**named: Any) -> None:
            if not lost:
                leased = await bench.rows.lease_finalizable(**named)
                if leased is not None:
                    lost.append(leased.batch.id)
                    raise StoreDown("the reply was lost")

        async def be_slow(**_: Any) -> None:
            await asyncio.sleep(write_seconds)

        bench.store.trouble["lease_finalizable"] = lose_reply
        for name in ("watch_leases", "rescue", "fail_interrupted"):
            bench.store.trouble[name] = be_slow

        async def scene() -> None:
            batch = await bench.ended(await bench.batch(["line"]))
            assert (batch.status, lost) == (BatchStatus.COMPLETED, [batch.id])

        bench.play(scene(), seconds=20 * LEASE_SECONDS)
