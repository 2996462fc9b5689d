"""Slots are divided among projects, and within a project by the earliest deadline (D8)."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.records import Batch
from batchline.domain.replies import Answer, Reply
from tests.support.dispatchers import Request, ScriptedHarness
from tests.support.engine_harness import Bench
from tests.support.jobs import FAR_FUTURE, make_jobs

ANSWER = Answer(status=200, body=b'{"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}')


async def _hang_or_answer(request: Request) -> Reply:
    """Answer after a second, but never a project that is called hanging."""
    await asyncio.sleep(10_000 if request.project.startswith("hanging") else 1.0)
    return ANSWER


def _hanging(*, cap: int | None) -> ScriptedHarness:
    """Return a dispatcher with 400 hanging lines of one project that had every slot to itself."""
    harness = ScriptedHarness(_hang_or_answer, cap=cap)
    harness.add(make_jobs(400, project_id="hanging", expires_at=FAR_FUTURE))
    harness.advance(20.0)
    return harness


async def _timed(bench: Bench, batch: Batch) -> float:
    """Virtual seconds until the batch is over, from now."""
    began = bench.time.now
    await bench.ended(batch)
    return bench.time.now - began


@pytest.mark.rule("D8", "Streams that their client does not read slow the lines of another project little.")
def test_unread_streams_of_a_project_leave_another_its_share() -> None:
    """D8: eight of them took seven of eight slots, so the lines of another project took seven times as long."""
    alone, beside = (_answered_beside(calls) for calls in (0, 8))
    assert beside * 2.5 >= alone


def _answered_beside(calls: int) -> int:
    """Return how many lines are answered in 10 seconds beside synchronous calls of another project."""
    with closing(ScriptedHarness(_hang_or_answer, cap=8)) as harness:
        for _ in range(calls):
            harness.sync_calls.begin("streaming")
        harness.add(make_jobs(100, project_id="quick", expires_at=FAR_FUTURE))
        harness.advance(10.5)
        return harness.succeeded(project="quick")


@pytest.mark.rule("D8", "Slots are shared by project.")
def test_a_small_batch_beside_a_large_one_is_soon_done(tmp_path: Path) -> None:
    """D8: 5 lines of a second beside 20,000 of another project, with 16 slots."""
    with closing(Bench(tmp_path, latency=1, max_concurrency=16)) as bench:

        async def scene() -> float:
            await bench.batch((f"large {n}" for n in range(20_000)), project="alpha")
            await asyncio.sleep(7)
            return await _timed(bench, await bench.batch((f"small {n}" for n in range(5)), project="beta"))

        taken = bench.play(scene())
        print(f"5 lines of 1 s beside 20,000: {taken:.1f} s")
        assert taken <= 4


@pytest.mark.parametrize("lines", [40, 200])
def test_a_batch_takes_at_most_twice_its_time_alone_and_a_line(tmp_path: Path, lines: int) -> None:
    """D8: beside another project it gets half of the slots."""

    def run(folder: Path, *, beside: int) -> float:
        with closing(Bench(folder, latency=0.5, max_concurrency=16)) as bench:

            async def scene() -> float:
                if beside:
                    await bench.batch((f"large {n}" for n in range(beside)), project="alpha")
                    await asyncio.sleep(5)
                return await _timed(bench, await bench.batch((f"small {n}" for n in range(lines)), project="beta"))

            return bench.play(scene())

    (tmp_path / "alone").mkdir()
    (tmp_path / "beside").mkdir()
    alone, beside = run(tmp_path / "alone", beside=0), run(tmp_path / "beside", beside=5000)
    assert beside <= 2 * alone + 0.5 + 0.5, (alone, beside)


@pytest.mark.rule("D8", "Hanging lines keep no other project's from starting.")
def test_lines_that_hang_keep_nobody_from_starting(tmp_path: Path) -> None:
    """D8: within about a second, though every slot that their project may have is taken."""
    with closing(Bench(tmp_path, latency=0.2, max_concurrency=16, request_timeout_seconds=300)) as bench:

        async def scene() -> float:
            await bench.batch((f"[[hang]] {n}" for n in range(200)), project="alpha")
            await asyncio.sleep(30)
            other = await bench.batch((f"quick {n}" for n in range(5)), project="beta")
            began = bench.time.now
            await bench.until(other, lambda seen: bench.attempts("quick") > 0)
            started = bench.time.now - began
            assert (await bench.ended(other)).completed == 5
            return started

        assert bench.play(scene()) <= 1


@pytest.mark.parametrize("cap", [None, 16, 8])
def test_beside_hundreds_of_hanging_lines_those_of_another_project_start_at_once(cap: int | None) -> None:
    """D8, D9: beyond the limit, or in the slot that is kept below a cap. The cap is never exceeded."""
    with closing(_hanging(cap=cap)) as harness:
        harness.add(make_jobs(5, project_id="other", expires_at=FAR_FUTURE))
        assert harness.requests[-1].project == "other"
        assert cap is None or harness.dispatcher.in_flight == cap
        harness.advance(5.5)
        assert harness.succeeded(project="other") == 5


@pytest.mark.parametrize("cap", [None, 16])
def test_lines_of_two_projects_that_hang_keep_no_third_waiting(cap: int | None) -> None:
    """D8: both leave the same slot free, though they came together."""
    with closing(ScriptedHarness(_hang_or_answer, cap=cap)) as harness:
        projects = ("hanging", "hanging too")
        harness.add([job for name in projects for job in make_jobs(200, project_id=name, expires_at=FAR_FUTURE)])
        harness.advance(20.0)
        harness.add(make_jobs(5, project_id="other", expires_at=FAR_FUTURE))
        assert harness.requests[-1].project == "other"


@pytest.mark.rule("D8", "A project gets its share of the slots while the lines of another hang.")
def test_a_project_gets_its_share_while_the_lines_of_another_hang() -> None:
    """D8: half of 32, in steps, though all of them are taken."""
    with closing(_hanging(cap=None)) as harness:
        assert harness.dispatcher.in_flight == 32
        harness.add(make_jobs(3000, project_id="other", expires_at=FAR_FUTURE))
        assert harness.dispatcher.in_flight == 33, "one at first"
        harness.advance(6.0)
        before = harness.succeeded(project="other")
        harness.advance(5.0)
        assert harness.succeeded(project="other") - before >= 0.9 * 16 * 5


def test_two_projects_get_their_shares_while_the_lines_of_a_third_hang() -> None:
    """D8: a third of 32 each."""
    with closing(_hanging(cap=None)) as harness:
        for project in ("a", "b"):
            harness.add(make_jobs(3000, project_id=project, expires_at=FAR_FUTURE))
        harness.advance(6.0)
        before = [harness.succeeded(project=project) for project in ("a", "b")]
        harness.advance(5.0)
        gained = [harness.succeeded(project=project) - count for project, count in zip("ab", before, strict=True)]
        assert all(count >= 0.9 * 10 * 5 for count in gained), gained


def test_in_a_project_the_earliest_deadline_is_first(tmp_path: Path) -> None:
    """D8: a batch near its window is not missed while others have slack."""
    with closing(Bench(tmp_path, latency=1, max_concurrency=4, completion_window_seconds=3600)) as bench:

        async def scene() -> None:
            slack = await bench.batch(f"slack {n}" for n in range(400))
            await asyncio.sleep(5)
            owner = await bench.owner("alpha")
            bench.engine.api_role.services.creator._window_seconds = 30
            urgent = await bench.batch(f"urgent {n}" for n in range(40))
            assert owner.project_id == urgent.project_id
            assert (await bench.ended(urgent)).completed == 40
            assert (await bench.seen(slack.id)).completed < 200

        bench.play(scene())


def test_models_share_alike_too(tmp_path: Path) -> None:
    """D8: a project's many lines of one model do not keep its others waiting."""
    two: dict[str, Any] = {
        "upstreams": {"second": {"url": "http://second/v1"}},
        "models": {"m": {}, "n": {"upstream": "second"}},
    }
    with closing(Bench(tmp_path, latency=1, max_concurrency=4, **two)) as bench:

        async def scene() -> float:
            await bench.batch((f"large {n}" for n in range(1000)), model="m")
            await asyncio.sleep(5)
            return await _timed(bench, await bench.batch((f"small {n}" for n in range(4)), model="n"))

        assert bench.play(scene()) <= 3
