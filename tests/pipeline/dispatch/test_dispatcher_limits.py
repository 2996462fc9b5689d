"""The engine finds how much its upstream can take, without any setting, and survives its outages (D3, D8)."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.records import Batch
from batchline.domain.replies import Answer, Reply
from batchline.pipeline.dispatch.limiter import Limiter
from batchline.ports import Upstream
from batchline.upstream.mock.script import Plan
from tests.support.engine_harness import Bench

REFUSAL = Answer(status=429, body=b'{"error":{"message":"too many requests"}}')


class Serving:
    """Serves so many at once and silently queues the rest."""

    def __init__(self, inner: Upstream, *, at_once: int) -> None:
        self._inner, self._slots = inner, asyncio.Semaphore(at_once)
        self.answered = 0

    async def post(self, path: str, body: bytes) -> Reply:
        async with self._slots:
            reply = await self._inner.post(path, body)
        self.answered += 1
        return reply


class Refusing:
    """Refuses more than so many per second, with a burst of one second."""

    def __init__(self, inner: Upstream, *, rate: float, now: Callable[[], float]) -> None:
        self._inner, self._rate, self._now = inner, rate, now
        self._tokens, self._at = rate, 0.0
        self.answered = self.refused = 0

    async def post(self, path: str, body: bytes) -> Reply:
        now = self._now()
        self._tokens, self._at = min(self._rate, self._tokens + self._rate * (now - self._at)), now
        if self._tokens < 1:
            self.refused += 1
            await asyncio.sleep(0.005)
            return REFUSAL
        self._tokens -= 1
        self.answered += 1
        return await self._inner.post(path, body)


def _play(bench: Bench, lines: int) -> tuple[Batch, float]:
    async def scene() -> Batch:
        return await bench.ended(await bench.batch(f"line {n}" for n in range(lines)))

    since = bench.time.now
    return bench.play(scene()), bench.time.now - since


@pytest.mark.rule("F2", "Where no cap is set, no more lines are in flight than make the upstream faster.")
def test_a_server_that_queues_in_silence_is_not_buried(tmp_path: Path) -> None:
    """If it serves 32 at once, it has 25 to 48 in flight after 20 seconds, and is never idle; the progress says so."""
    with closing(Bench(tmp_path, latency=0.2, upstream=lambda inner, _: Serving(inner, at_once=32))) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(7000))
            await asyncio.sleep(20)
            server, seen, before = bench.upstream, [], bench.upstream.answered
            for _ in range(100):
                await asyncio.sleep(0.2)
                seen.append(await bench.engine.api_role.services.progress_reader.progress(batch.project_id, batch.id))
            assert all(25 <= progress.activity.concurrency <= 48 for progress in seen)
            assert all(progress.activity.in_flight <= 48 for progress in seen)
            assert server.answered - before >= 0.95 * 32 / 0.2 * 20

        bench.play(scene())


@pytest.mark.rule("D3", "429 makes lines start at a pace that is seldom refused.")
def test_a_server_that_refuses_by_rate_is_used_and_seldom_annoyed(tmp_path: Path) -> None:
    """If it takes 40 per second, 95 % of that is used and less than 20 % of the requests are refused after 30 seconds.

    No line fails.
    """
    with closing(Bench(tmp_path, latency=0.2, upstream=lambda inner, now: Refusing(inner, rate=40, now=now))) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(3700))
            await asyncio.sleep(30)
            server = bench.upstream
            answered, refused = server.answered, server.refused
            await asyncio.sleep(60)
            answered, refused = server.answered - answered, server.refused - refused
            assert answered >= 0.95 * 40 * 60
            assert refused < 0.2 * (answered + refused)
            assert await bench.failures(await bench.ended(batch)) == {}

        bench.play(scene())


def test_an_upstream_that_is_gone_for_two_minutes_costs_no_line(tmp_path: Path) -> None:
    """D3: in the middle of 3,000 lines, which go on within 15 seconds after its return."""
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(3000))
            await bench.until(batch, lambda seen: seen.completed >= 1000)
            bench.machine.crash(120)
            await asyncio.sleep(119)
            before = (await bench.seen(batch.id)).completed
            await asyncio.sleep(16)
            assert (await bench.seen(batch.id)).completed > before
            assert await bench.failures(await bench.ended(batch)) == {}

        bench.play(scene(), seconds=200)


@pytest.mark.rule("D3", "A storm of refusals slows a batch and fails nothing.")
@pytest.mark.parametrize("status", [429, 503])
def test_a_storm_slows_a_batch_and_fails_nothing(tmp_path: Path, status: int) -> None:
    """D3: for a minute everything is refused."""
    with closing(Bench(tmp_path, max_concurrency=64)) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(3000))
            await bench.until(batch, lambda seen: seen.completed >= 1000)
            bench.machine.script.follow(Plan(status={status: 100}, retry_after=1))
            await asyncio.sleep(60)
            bench.machine.script.follow(Plan())
            back = bench.time.now
            assert await bench.failures(await bench.ended(batch)) == {}
            assert bench.time.now - back < 60

        bench.play(scene(), seconds=300)


@pytest.mark.rule("D3", "Refusals that no pace avoids do not slow a batch down.")
def test_faults_cost_little_time_and_no_line(tmp_path: Path) -> None:
    """D3: 5 % 500, 5 % 429 with Retry-After 1 and 1 % cut off, in under 1.5 times the clean time."""
    faults = Plan(status={500: 5, 429: 5}, cut=1, retry_after=1)
    taken = []
    for name, plan in (("clean", Plan()), ("faulty", faults)):
        folder = tmp_path / name
        folder.mkdir()
        with closing(Bench(folder, plan=plan, latency=0.2, max_concurrency=64)) as bench:
            batch, seconds = _play(bench, 5_000)
            assert (batch.completed, batch.failed) == (5_000, 0)
            taken.append(seconds)
    assert taken[1] < 1.5 * taken[0]


@pytest.mark.rule("D3", "A line that is held up by its upstream's pace starts when it is time.")
def test_a_paced_line_starts_also_when_its_time_comes_between_two_looks_at_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else may be under way that would look again."""
    real, looks = Limiter.wait, count()
    monkeypatch.setattr(Limiter, "wait", lambda limiter, *named: real(limiter, *named) or 1e-6 * (next(looks) % 2 == 0))
    with closing(Bench(tmp_path, retry_base_seconds=0)) as bench:

        async def scene() -> Batch:
            return await bench.ended(await bench.batch(["[[status=429]]"] * 3))

        assert bench.play(scene()).failed == 3


def test_a_fast_pace_is_kept_without_counting_microseconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Event loops count milliseconds: with shorter waits the process would go round and round until the next start."""
    real, waits = asyncio.BaseEventLoop.call_at, []

    def call_at(loop: asyncio.BaseEventLoop, when: float, callback: Any, *rest: Any, **named: Any) -> Any:
        if getattr(callback, "__name__", "") == "_on_rate_timer":
            waits.append(when - loop.time())
        return real(loop, when, callback, *rest, **named)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_at", call_at)
    with closing(Bench(tmp_path, upstream=lambda inner, now: Refusing(inner, rate=1500, now=now))) as bench:
        batch, seconds = _play(bench, 3000)
        assert batch.completed == 3000
        assert seconds < 1.5 * 3000 / 1500
    assert waits
    assert min(waits) >= 0.000_999
