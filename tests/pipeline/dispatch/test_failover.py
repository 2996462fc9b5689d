"""Several upstreams for one model: the least busy is used, and an unavailable one is left out until it is back."""

import asyncio
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from tests.support.engine_harness import Bench

TWO: dict[str, Any] = {
    "upstreams": {"second": {"url": "http://second/v1"}},
    "models": {"m": {"upstream": ["default", "second"]}},
}


def _shares(bench: Bench) -> list[int]:
    return [sum(machine.starts.values()) for machine in bench.machines.values()]


def test_lines_go_to_the_less_busy_upstream(tmp_path: Path) -> None:
    """Two equal upstreams get the same, and together they do twice as much."""
    with closing(Bench(tmp_path, latency=0.5, max_concurrency=8, **TWO)) as bench:

        async def scene() -> None:
            assert (await bench.ended(await bench.batch(f"good {n}" for n in range(400)))).completed == 400

        bench.play(scene())
        first, second = _shares(bench)
        assert first + second == 400
        assert abs(first - second) <= 80
        assert bench.time.now < 400 / 16 * 0.5 * 1.5 + 2


def test_one_that_is_gone_costs_nothing_while_the_other_is_there(tmp_path: Path) -> None:
    """D3: no line fails, none waits for it, and it works again when it is back."""
    with closing(Bench(tmp_path, latency=0.5, max_concurrency=8, **TWO)) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"good {n}" for n in range(1200))
            await asyncio.sleep(2)
            bench.machine.crash(40)
            done = (await bench.seen(batch.id)).completed
            await asyncio.sleep(20)
            assert (await bench.seen(batch.id)).completed - done > 20 / 0.5 * 8 * 0.6
            ended = await bench.ended(batch)
            assert ended.completed == 1200

        bench.play(scene())
        assert bench.time.now < 1200 / 8 * 0.5 * 1.1


def test_one_that_comes_back_is_taken_back(tmp_path: Path) -> None:
    """It is probed even though the other upstream runs everything."""
    with closing(Bench(tmp_path, latency=0.5, max_concurrency=8, **TWO)) as bench:
        bench.machine.down_until = 30

        async def scene() -> None:
            batch = await bench.batch(f"good {n}" for n in range(1600))
            await asyncio.sleep(60)
            before = _shares(bench)[0]
            await asyncio.sleep(5)
            assert _shares(bench)[0] - before > 5 / 0.5 * 8 * 0.6
            assert (await bench.ended(batch)).completed == 1600

        bench.play(scene())


def test_synchronous_calls_take_slots_from_batches(tmp_path: Path) -> None:
    """Batch lines yield as they end: together they have 8 slots, of which one is kept for other projects."""
    with closing(Bench(tmp_path, latency=1, max_concurrency=8)) as bench:

        async def most_in_flight(seconds: int) -> int:
            seen = []
            for _ in range(10 * seconds):
                await asyncio.sleep(0.1)
                seen.append(bench.engine.worker_role.worker.report().upstream_loads["default"].in_flight)
            return max(seen)

        async def scene() -> None:
            batch = await bench.batch(f"good {n}" for n in range(200))
            assert await most_in_flight(5) == 7
            with ExitStack() as calls:
                for _ in range(3):
                    calls.enter_context(bench.router.call("default", "caller"))
                await asyncio.sleep(2)
                assert await most_in_flight(10) == 4
            assert await most_in_flight(10) == 7
            assert (await bench.ended(batch)).completed == 200

        bench.play(scene())
