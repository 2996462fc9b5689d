"""What refusals cost: the line, the model that they are about, and nobody else (D3, D9)."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from zlib import crc32

import pytest

from batchline.domain.replies import Answer, Reply
from tests.support.dispatchers import Request, ScriptedHarness
from tests.support.jobs import FAR_FUTURE, make_jobs

ANSWER = Answer(status=200, body=b'{"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}')
LATENCY_SECONDS = 0.2
Script = Callable[[Request], Awaitable[Reply]]


def refusal(status: int) -> Answer:
    return Answer(status=status, body=b'{"error":{"message":"not now"}}')


async def answer(request: Request) -> Reply:
    await asyncio.sleep(LATENCY_SECONDS)
    return ANSWER


async def refuse_one_project(request: Request) -> Reply:
    """Answer all but the lines of one project, which are refused at once."""
    if request.project == "refused":
        await asyncio.sleep(0.01)
        return refusal(429)
    return await answer(request)


class LimitedModel:
    """Answers so many per second of one model, with a burst of as many, and everything of other models."""

    def __init__(self, *, rate: float) -> None:
        self._rate = self._tokens = rate
        self._at = 0.0

    async def reply(self, request: Request) -> Reply:
        if request.model != "limited":
            return await answer(request)
        self._tokens = min(self._rate, self._tokens + self._rate * (request.at - self._at))
        self._at = request.at
        if self._tokens < 1:
            await asyncio.sleep(0.01)
            return refusal(429)
        self._tokens -= 1
        return await answer(request)


def seconds_until(harness: ScriptedHarness, lines: int, *, project: str | None = None, model: str | None = None) -> int:
    """Return after how many seconds so many lines have succeeded."""
    for seconds in range(1, 61):
        harness.advance(1.0)
        if harness.succeeded(project=project, model=model) >= lines:
            return seconds
    pytest.fail(f"{harness.succeeded(project=project, model=model)} of {lines} lines succeeded within a minute")


def seconds_alone(lines: int, *, model: str = "m") -> int:
    with closing(ScriptedHarness(answer)) as harness:
        harness.add(make_jobs(lines, project_id="good", model=model, expires_at=FAR_FUTURE))
        return seconds_until(harness, lines)


@pytest.mark.rule("D9", "A line that is always refused slows no other line of its model.")
def test_a_line_that_is_always_refused_slows_nobody() -> None:
    """D9: the refusals are about that line alone. It fails after its budget, as D3 says."""
    lines = 10_000
    with closing(ScriptedHarness(refuse_one_project)) as harness:
        harness.add(make_jobs(1, project_id="refused", expires_at=FAR_FUTURE))
        harness.add(make_jobs(lines, project_id="good", expires_at=FAR_FUTURE))
        assert seconds_until(harness, lines) <= seconds_alone(lines) + 2
        harness.advance(600.0)
        (error,) = harness.recorder.errors
        assert b"rate_limit_exceeded" in error


@pytest.mark.rule("D9", "A model with a limit of its own slows no other model, not even of the same project.")
@pytest.mark.parametrize("project", ["good", "other"])
def test_a_model_with_its_own_limit_slows_no_other_model(project: str) -> None:
    """D9: the free model takes as long as alone, and the limited one gets what it may have."""
    lines = 10_000
    with closing(ScriptedHarness(LimitedModel(rate=20).reply)) as harness:
        harness.add(make_jobs(2000, project_id=project, model="limited", expires_at=FAR_FUTURE))
        harness.add(make_jobs(lines, project_id="good", model="free", expires_at=FAR_FUTURE))
        assert seconds_until(harness, lines, model="free") <= seconds_alone(lines, model="free") + 2
        harness.advance(10.0)
        before = harness.succeeded(model="limited")
        harness.advance(20.0)
        assert harness.succeeded(model="limited") - before >= 0.8 * 20 * 20
        assert harness.recorder.errors == []


@pytest.mark.rule("D3", "Lines that need several attempts each do not fail, and are soon done.")
def test_lines_that_each_get_three_503_before_their_answer_all_succeed() -> None:
    """D3: as from a gateway that starts a machine for each of them. Four attempts are enough for four answers."""

    async def reply(request: Request) -> Reply:
        await asyncio.sleep(LATENCY_SECONDS)
        return refusal(503) if request.attempt <= 3 else ANSWER

    with closing(ScriptedHarness(reply)) as harness:
        harness.add(make_jobs(500, expires_at=FAR_FUTURE))
        assert seconds_until(harness, 500) <= 60
        assert harness.recorder.errors == []


def test_lines_that_each_get_some_429_before_their_answer_all_succeed() -> None:
    """D3, D9: one to three, whatever the rate."""

    async def reply(request: Request) -> Reply:
        await asyncio.sleep(LATENCY_SECONDS)
        return refusal(429) if request.attempt <= 1 + crc32(request.line.encode()) % 3 else ANSWER

    with closing(ScriptedHarness(reply)) as harness:
        harness.add(make_jobs(600, expires_at=FAR_FUTURE))
        assert seconds_until(harness, 600) <= 60
        assert harness.recorder.errors == []
