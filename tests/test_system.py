"""The clock, randomness and threads of the machine."""

import threading

import pytest

from batchline.system import SystemClock, SystemRandom, ThreadPool

pytestmark = pytest.mark.anyio


async def test_the_steady_clock_advances_while_sleeping() -> None:
    clock = SystemClock()
    before = clock.steady()
    await clock.sleep(0.01)
    assert clock.steady() - before >= 0.005
    assert clock.now() > 1_700_000_000


def test_random_values_differ_and_keep_their_bounds() -> None:
    random = SystemRandom()
    assert len(random.bytes(16)) == 16
    assert random.bytes(16) != random.bytes(16)
    assert all(2 <= random.uniform(2, 3) <= 3 for _ in range(100))


async def test_a_pool_runs_calls_in_its_own_threads_and_passes_on_errors() -> None:
    pool = ThreadPool(1, name="test")
    try:
        assert (await pool.run(threading.current_thread)).name.startswith("test")
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 / 0)
    finally:
        pool.close()
