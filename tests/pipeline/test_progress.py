"""The progress of a batch while it runs (C8, C10, D2, D3, D11)."""

import asyncio
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec.json import encode
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from batchline.domain.errors import BatchNotFound
from batchline.domain.fleet import MAX_REPORTED_MODELS
from batchline.domain.progress import Progress
from batchline.domain.rate_limits import Quota, RateLimits
from batchline.domain.records import Batch
from batchline.domain.replies import Answer, Reply
from batchline.domain.states import BatchStatus
from batchline.domain.waiting import (
    QuarantineWait,
    QueueWait,
    RateLimitWait,
    RetryAfterWait,
    RetryWait,
    SlotsWait,
    StorageWait,
    UpstreamPause,
)
from batchline.ports import Upstream
from batchline.upstream.mock.script import Plan
from tests.support.engine_harness import Bench

MODELS: dict[str, Any] = {
    "upstreams": {"gpu": {"url": "http://gpu/v1"}},
    "models": {"m": {}, "far": {"upstream": "gpu"}},
}


async def _progress(bench: Bench, batch: Batch) -> Progress:
    return await bench.engine.api_role.services.progress_reader.progress(batch.project_id, batch.id)


def _counted(progress: Progress) -> dict[str, int]:
    return {each.code: each.count for each in progress.errors}


def test_a_batch_of_nobody_is_not_found(tmp_path: Path) -> None:
    """A8, C8: nor is one of another project."""
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            batch = await bench.batch(["one"])
            other = await bench.owner("beta")
            for project_id, batch_id in ((other.project_id, batch.id), (batch.project_id, "batch_none")):
                with pytest.raises(BatchNotFound):
                    await bench.engine.api_role.services.progress_reader.progress(project_id, batch_id)

        bench.play(scene())


def test_lines_in_flight_are_those_of_the_batch(tmp_path: Path) -> None:
    """And none of them once it has ended."""
    with closing(Bench(tmp_path, latency=5, max_concurrency=16)) as bench:

        async def scene() -> None:
            batch, other = await bench.batch(["a", "b", "c"]), await bench.batch(["d"], project="beta")
            await asyncio.sleep(2)
            assert [(await _progress(bench, each)).activity.in_flight for each in (batch, other)] == [3, 1]
            await bench.ended(batch)
            assert (await _progress(bench, batch)).activity.in_flight == 0

        bench.play(scene())


def test_the_end_is_estimated_from_what_was_recorded(tmp_path: Path) -> None:
    """With four of 600 lines done per second, the end is known to a few seconds after a minute.

    A batch that has ended has no rate, whether or not its work file was removed yet.
    """
    with closing(Bench(tmp_path, latency=1, max_concurrency=4)) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(600))
            fresh = await _progress(bench, batch)
            assert (fresh.rate, fresh.eta) == (0.0, None)
            await asyncio.sleep(70)
            progress, now = await _progress(bench, batch), bench.time.now
            assert progress.eta is not None
            assert progress.rate == pytest.approx(4, rel=0.1)
            bench.store.trouble["delete_work"] = _never
            await bench.ended(batch)
            assert progress.eta.low - 5 <= bench.time.now - now <= progress.eta.high + 5
            ended = await _progress(bench, batch)
            assert (ended.rate, ended.eta, ended.batch.completed) == (0.0, None, 600)

        bench.play(scene())


def test_errors_are_counted_by_code_with_the_first_of_each(tmp_path: Path) -> None:
    """C12, D2: those that the upstream refused, those that ran out of attempts, those that never ran."""
    prompts = ["[[status=400]] a", "good", "[[status=404]] b", "[[status=400]] c", "[[hang]] d"]
    with closing(Bench(tmp_path, max_concurrency=1, request_timeout_seconds=60)) as bench:

        async def scene() -> None:
            batch = await bench.batch([*prompts, "e", "f"])
            await bench.until(batch, lambda seen: seen.failed == 3)
            running = await _progress(bench, batch)
            assert _counted(running) == {"invalid_request_error": 2, "not_found_error": 1}
            assert json.loads(running.errors[0].sample)["custom_id"] == "line-0"
            await bench.engine.api_role.services.cancellation.cancel(batch.project_id, batch.id)
            ended = await bench.ended(batch)
            progress, records = await _progress(bench, batch), await bench.records(ended)
            assert _counted(progress)["batch_cancelled"] == 2
            assert sum(_counted(progress).values()) == ended.failed
            for each in progress.errors:
                sample = json.loads(each.sample)
                written = records[sample["custom_id"]]["error"]
                assert (each.code, sample["message"]) == (written["code"], written["message"])

        bench.play(scene())


def test_a_batch_waits_for_the_upstream_of_its_models_alone(tmp_path: Path) -> None:
    """D3: the progress has the reason of a pause and its beginning, until the upstream is available again."""
    with closing(Bench(tmp_path, **MODELS)) as bench:
        bench.machines["gpu"].down_until = 60

        async def scene() -> None:
            far = await bench.batch((f"far {n}" for n in range(40)), model="far")
            near = await bench.batch([f"near {n} [[delay=40]]" for n in range(4)], project="beta")
            await asyncio.sleep(30)
            waits, runs = await _progress(bench, far), await _progress(bench, near)
            pause = waits.activity.waiting_for
            assert isinstance(pause, UpstreamPause)
            assert (pause.upstream, pause.detail, pause.model) == ("gpu", "refused", None)
            assert far.created_at <= pause.since < far.created_at + 25
            assert runs.activity.waiting_for is None
            await asyncio.sleep(10)
            assert (await _progress(bench, far)).activity.waiting_for == pause
            assert (await bench.ended(far)).completed == 40
            assert (await _progress(bench, far)).activity.waiting_for is None

        bench.play(scene())


def test_a_batch_that_was_stopped_waits_for_nothing(tmp_path: Path) -> None:
    """C10: what is left of it never runs."""
    with closing(Bench(tmp_path, latency=10)) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(40))
            await asyncio.sleep(1)
            bench.machine.crash(600)
            await asyncio.sleep(20)
            assert isinstance((await _progress(bench, batch)).activity.waiting_for, UpstreamPause)
            bench.store.trouble["record"] = _never
            await bench.engine.api_role.services.cancellation.cancel(batch.project_id, batch.id)
            progress = await _progress(bench, batch)
            assert progress.batch.status is BatchStatus.CANCELLING
            assert (progress.activity.waiting_for, progress.eta) == (None, None)

        bench.play(scene())


@pytest.mark.rule("D11", "A rate that the upstream limits is the reason, with the lines per second.")
def test_lines_wait_for_the_rate_of_the_upstream(tmp_path: Path) -> None:
    """No moment goes without a reason, and once the rate is known it is near that of the upstream."""
    with closing(Bench(tmp_path, latency=0.1, upstream=lambda inner, now: _PerSecond(inner, now, 5))) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(400))
            await asyncio.sleep(10)
            waits = [await _wait_of(bench, batch, object, after=0.37) for _ in range(50)]
            limited = [wait for wait in waits if isinstance(wait, RateLimitWait)]
            assert len(limited) > 25
            assert {(wait.upstream, wait.model) for wait in limited} == {("default", "m")}
            rates = [wait.rate for wait in limited if wait.rate is not None]
            assert 2 < sum(rates) / len(rates) < 10

        bench.play(scene())


@pytest.mark.rule("D11", "If the upstream said when it may be asked again, that time is given.")
def test_lines_wait_until_the_time_that_the_upstream_named(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"upstream": lambda inner, now: _PerWindow(inner, now, 20, seconds=60)}
    with closing(Bench(tmp_path, max_concurrency=8, **settings)) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(100))
            await asyncio.sleep(20)
            wait = await _wait_of(bench, batch, RetryAfterWait)
            assert (wait.upstream, wait.model) == ("default", "m")
            assert 58 <= wait.until - batch.created_at <= 63
            assert (await _progress(bench, batch)).activity.in_flight == 0

        bench.play(scene())


@pytest.mark.rule("D11", "A time that the upstream announces in its rate-limit headers is given.")
def test_lines_wait_until_the_reset_that_the_upstream_announced(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"upstream": lambda inner, now: _Announcing(inner, now, 20, seconds=60)}
    with closing(Bench(tmp_path, max_concurrency=8, **settings)) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(100))
            await asyncio.sleep(20)
            wait = await _wait_of(bench, batch, RetryAfterWait)
            assert 58 <= wait.until - batch.created_at <= 63
            assert bench.attempts("line") == 20
            assert _reasons(bench) == {"retry_after"}

        bench.play(scene())


@pytest.mark.rule("D11", "If the upstream accepts only so many at once, the rate that this comes to is given.")
def test_lines_wait_for_the_rate_of_an_upstream_that_accepts_a_number(tmp_path: Path) -> None:
    """Six at once that take 5 s each are 1.2 in a second."""
    with closing(Bench(tmp_path, latency=5, upstream=lambda inner, _: _AtMost(inner, 6))) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(400))
            await asyncio.sleep(60)
            waits = [await _wait_of(bench, batch, object, after=1.3) for _ in range(50)]
            rates = [wait.rate for wait in waits if isinstance(wait, RateLimitWait) and wait.rate is not None]
            assert 1.0 <= sum(rates) / len(rates) <= 1.5

        bench.play(scene())


@pytest.mark.rule("D11", "Slots are given with the lines of other projects that have taken them.")
def test_lines_wait_for_slots_that_another_project_has(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, latency=100, max_concurrency=4)) as bench:

        async def scene() -> None:
            first = await bench.batch(f"first {n}" for n in range(20))
            await asyncio.sleep(5)
            late = await bench.batch((f"late {n}" for n in range(20)), project="beta")
            await asyncio.sleep(5)
            mine, theirs = [await _wait_of(bench, batch, SlotsWait) for batch in (first, late)]
            assert (mine.upstream, mine.in_flight, mine.limit) == ("default", 4, 4)
            in_flight = [(await _progress(bench, batch)).activity.in_flight for batch in (first, late)]
            assert [mine.by_other_projects, theirs.by_other_projects] == [in_flight[1], in_flight[0]]
            assert _reasons(bench) == {"slots"}

        bench.play(scene())


@pytest.mark.rule("D11", "Lines wait for their next attempt.")
def test_lines_wait_for_their_next_attempt(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, retry_base_seconds=30)) as bench:

        async def scene() -> None:
            batch = await bench.batch(["[[status=500 times=2]] a", "[[status=500 times=2]] b", "c"])
            await bench.until(batch, lambda seen: seen.completed == 1)
            assert (await _wait_of(bench, batch, RetryWait)).lines == 2
            assert _reasons(bench) == {"retrying"}

        bench.play(scene())


@pytest.mark.rule("D11", "Lines wait for storage, and no end is estimated.")
def test_lines_wait_for_storage(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, latency=0.5, max_concurrency=4)) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(400))
            await asyncio.sleep(10)
            assert (await _progress(bench, batch)).eta is not None
            bench.take_store_away(60)
            await asyncio.sleep(10)
            await _wait_of(bench, batch, StorageWait)
            assert (await _progress(bench, batch)).eta is None
            assert _reasons(bench) <= {"storage"}

        bench.play(scene())


@pytest.mark.rule("D11", "While the upstream is paused, no end is estimated.")
def test_no_end_is_estimated_during_a_pause(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, latency=0.5, max_concurrency=4)) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(400))
            await asyncio.sleep(10)
            bench.machine.down_until = bench.time.now + 40
            await asyncio.sleep(20)
            await _wait_of(bench, batch, UpstreamPause)
            progress = await _progress(bench, batch)
            assert (progress.rate > 0, progress.eta) == (True, None)
            assert _reasons(bench) == {"upstream_paused"}

        bench.play(scene())


@pytest.mark.rule("D11", "Lines wait while suspects of a crash are tried.")
def test_lines_wait_while_suspects_are_tried(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, latency=1, max_concurrency=16)) as bench:

        async def scene() -> None:
            seen = set()
            batch = await bench.batch(["[[crash]] poison", *(f"line {n}" for n in range(60))])
            while (await bench.seen(batch.id)).status is BatchStatus.IN_PROGRESS:
                seen.add(type((await _progress(bench, batch)).activity.waiting_for))
                await asyncio.sleep(0.2)
            assert {UpstreamPause, QuarantineWait, SlotsWait} <= seen
            await bench.ended(batch)

        bench.play(scene())


@pytest.mark.rule("D11", "There is a reason at every moment at which lines wait.")
def test_lines_never_wait_without_a_reason(tmp_path: Path) -> None:
    plan = Plan(status={429: 5, 500: 5, 400: 2}, drop=2)
    with closing(Bench(tmp_path, plan=plan, latency=0.2, max_concurrency=8)) as bench:

        async def scene() -> None:
            batch = await bench.batch(f"line {n}" for n in range(300))
            while (seen := await bench.seen(batch.id)).status is BatchStatus.IN_PROGRESS:
                activity = (await _progress(bench, batch)).activity
                remaining = seen.total - seen.completed - seen.failed
                # Up to a second of answers is not recorded yet.
                assert activity.waiting_for is not None or remaining <= activity.in_flight + 80
                await asyncio.sleep(0.05)
            await bench.ended(batch)

        bench.play(scene())


def test_a_report_stays_small_however_many_models_wait(tmp_path: Path) -> None:
    """A heartbeat carries it, and a file may name any number of models."""
    with closing(Bench(tmp_path, latency=1000, max_concurrency=64, request_timeout_seconds=2000)) as bench:

        async def scene() -> None:
            messages = [{"role": "user", "content": "hi"}]
            batch = await bench.batch_of({"model": f"model {n}", "messages": messages} for n in range(400))
            await asyncio.sleep(10)
            assert isinstance((await _progress(bench, batch)).activity.waiting_for, SlotsWait | QueueWait)
            (report,) = await bench.engine.worker_role.worker.reports()
            assert len(report.upstream_loads["default"].queues) <= MAX_REPORTED_MODELS
            assert len(encode(report)) < 20_000

        bench.play(scene())


T = TypeVar("T")


async def _wait_of(bench: Bench, batch: Batch, kind: type[T], *, after: float = 0) -> T:
    """Return why lines of a batch wait, which must be for a reason of this kind."""
    await asyncio.sleep(after)
    wait = (await _progress(bench, batch)).activity.waiting_for
    assert wait is not None
    assert isinstance(wait, kind)
    return wait


def _reasons(bench: Bench) -> set[str]:
    """Return the reasons for which the metrics count lines."""
    samples = [
        sample
        for family in text_string_to_metric_families(bench.metrics.render().decode())
        for sample in family.samples
        if sample.name == "batchline_lines_waiting" and sample.labels["upstream"] == "default"
    ]
    return {sample.labels["reason"] for sample in samples if sample.value}


class _PerSecond:
    """Refuses what comes faster than a rate, with 429 and without saying when to retry."""

    def __init__(self, inner: Upstream, now: Callable[[], float], rate: float) -> None:
        self._inner, self._now, self._rate = inner, now, rate
        self._tokens, self._at = 1.0, now()

    async def post(self, path: str, body: bytes) -> Reply:
        now = self._now()
        self._tokens, self._at = min(self._rate, self._tokens + (now - self._at) * self._rate), now
        if self._tokens < 1:
            return Answer(status=429, body=b"{}")
        self._tokens -= 1
        return await self._inner.post(path, body)


class _PerWindow:
    """Accepts so many requests in a window of time, and says when the next one begins."""

    def __init__(self, inner: Upstream, now: Callable[[], float], count: int, *, seconds: float) -> None:
        self._inner, self._now, self._count, self._seconds = inner, now, count, seconds
        self._until, self._left = 0.0, 0

    async def post(self, path: str, body: bytes) -> Reply:
        now = self._now()
        if now >= self._until:
            self._until, self._left = now + self._seconds, self._count
        if not self._left:
            return Answer(status=429, body=b"{}", retry_after=self._until - now)
        self._left -= 1
        return await self._inner.post(path, body)


class _Announcing(_PerWindow):
    """Says with every answer how many requests are left, and when the next window begins."""

    async def post(self, path: str, body: bytes) -> Reply:
        reply = await super().post(path, body)
        quota = Quota(limit=self._count, remaining=self._left, reset_seconds=self._until - self._now())
        return replace(reply, rate_limits=RateLimits(requests=quota)) if isinstance(reply, Answer) else reply


class _AtMost:
    """Refuses what comes while so many are in flight, with 429."""

    def __init__(self, inner: Upstream, count: int) -> None:
        self._inner, self._count, self._in_flight = inner, count, 0

    async def post(self, path: str, body: bytes) -> Reply:
        if self._in_flight >= self._count:
            return Answer(status=429, body=b"{}")
        self._in_flight += 1
        try:
            return await self._inner.post(path, body)
        finally:
            self._in_flight -= 1


async def _never(*_: Any, **__: Any) -> None:
    await asyncio.Event().wait()
