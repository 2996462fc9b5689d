"""The end of a batch whose lines take very different times."""

import random
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.support.engine_harness import Bench

LINES, LONG_LINES = 1000, 40


def _bodies(*, limited: bool) -> list[dict[str, Any]]:
    """Return short lines with some long ones among them, half of these at the end."""
    source = random.Random(7)
    long = {source.randrange(LINES) for _ in range(LONG_LINES // 2)} | set(range(LINES - LONG_LINES // 2, LINES))
    bodies = []
    for n in range(LINES):
        prompt = f"[[delay={20 if n in long else 0.2}]] question {n}"
        body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": prompt}]}
        bodies.append(body | ({"max_tokens": 4000 if n in long else 40} if limited else {}))
    return bodies


def test_a_batch_with_limits_does_not_end_with_its_longest_lines(tmp_path: Path) -> None:
    """The last 5 % of the lines take less time, since the longest were started before."""
    seconds = {}
    for limited in (False, True):
        folder = tmp_path / str(limited)
        folder.mkdir()
        with closing(Bench(folder, max_concurrency=16, request_timeout_seconds=60)) as bench:

            async def scene(bench: Bench = bench, limited: bool = limited) -> tuple[float, float]:
                batch = await bench.batch_of(_bodies(limited=limited))
                began = bench.time.now
                await bench.until(batch, lambda seen: seen.completed >= 0.95 * LINES)
                tail = bench.time.now
                await bench.until(batch, lambda seen: seen.completed == LINES)
                return bench.time.now - tail, bench.time.now - began

            seconds[limited] = bench.play(scene())
    (tail_before, before), (tail_after, after) = seconds[False], seconds[True]
    print(f"\nlast 5 %: {tail_before:.0f} s, then {tail_after:.0f} s; whole batch: {before:.0f} s, then {after:.0f} s")
    assert tail_after < tail_before / 2
    assert after < before
