"""What refusals cost: the line, the model that they are about, and nobody else (D3, D9)."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any
from zlib import crc32

import pytest

from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.domain.waiting import WaitReason
from batchline.pipeline.dispatch.limiter import Limiter
from batchline.pipeline.dispatch.limiter.model import ModelLimit
from tests.support.dispatchers import DispatcherHarness, Request, ScriptedHarness
from tests.support.jobs import FAR_FUTURE, make_jobs

ANSWER = Answer(status=200, body=b'{"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}')
LATENCY_SECONDS = 0.2
Script = Callable[[Request], Awaitable[Reply]]


def refusal(status: int) -> Answer:
    return Answer(status=status, body=b'{"error":{"message":"not now"}}')


async def answer(request: Request) -> Reply:
    await asyncio.sleep(LATENCY_SECONDS)
    return ANSWER


def limited_to(slots: int, refused: Reply | None = None) -> Script:
    """Return an upstream that refuses what exceeds a number at once, with 503 if nothing else is given."""
    in_flight = 0

    async def reply(request: Request) -> Reply:
        nonlocal in_flight
        if in_flight >= slots:
            return refused or refusal(503)
        in_flight += 1
        try:
            return await answer(request)
        finally:
            in_flight -= 1

    return reply


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
    lines = 4000
    with closing(ScriptedHarness(refuse_one_project)) as harness:
        harness.add(make_jobs(1, project_id="refused", expires_at=FAR_FUTURE))
        harness.add(make_jobs(lines, project_id="good", expires_at=FAR_FUTURE))
        assert seconds_until(harness, lines) <= seconds_alone(lines) + 1
        harness.advance(600.0)
        (error,) = harness.recorder.errors
        assert b"rate_limit_exceeded" in error


@pytest.mark.rule("D9", "A project whose lines are all refused slows no other project, whatever its Retry-After says.")
@pytest.mark.parametrize("retry_after", [None, 60.0])
def test_a_project_whose_lines_are_all_refused_slows_no_other(retry_after: float | None) -> None:
    """D9: the other one comes when the refused one has been alone, so that its model seems to accept nothing."""
    lines = 4000

    async def reply(request: Request) -> Reply:
        if request.project == "good":
            return await answer(request)
        await asyncio.sleep(0.01)
        return Answer(status=429, body=b"{}", retry_after=retry_after)

    with closing(ScriptedHarness(reply)) as harness:
        harness.add(make_jobs(500, project_id="refused", expires_at=FAR_FUTURE))
        harness.advance(10.0)
        harness.add(make_jobs(lines, project_id="good", expires_at=FAR_FUTURE))
        assert seconds_until(harness, lines, project="good") <= 1.3 * seconds_alone(lines) + 1


@pytest.mark.rule("D9", "An upstream that accepts a number in a span of time, and does not say so, is asked seldom.")
def test_few_lines_are_refused_by_a_limit_for_each_span_of_time() -> None:
    """D9, D11: 200 in each 5 s, of which the progress says that none is accepted at the moment."""
    accepted: list[float] = []

    async def reply(request: Request) -> Reply:
        if sum(at > request.at - 5.0 for at in accepted) >= 200:
            await asyncio.sleep(0.01)
            return refusal(429)
        accepted.append(request.at)
        return await answer(request)

    with closing(ScriptedHarness(reply)) as harness:
        harness.add(make_jobs(1000, expires_at=FAR_FUTURE))
        harness.advance(0.9)
        queue = harness.dispatcher.upstream_load.queues["m"]
        assert (queue.reason, queue.rate) == (WaitReason.RATE_LIMIT, 0.0)
        assert seconds_until(harness, 1000) <= 1.3 * 20
        assert len(harness.requests) <= 4 * 1000


@pytest.mark.rule("D9", "An upstream that says with Retry-After when it accepts lines again is not paused.")
def test_an_upstream_that_names_a_time_is_tried_now_and_then_and_not_paused() -> None:
    """D3, D9: each line is tried once, because none is tried again before its own time. None of them fails."""

    async def reply(request: Request) -> Reply:
        if request.at < 100.0:
            return Answer(status=429, body=b"{}", retry_after=200.0)
        return await answer(request)

    with closing(ScriptedHarness(reply)) as harness:
        harness.add(make_jobs(400, expires_at=FAR_FUTURE))
        harness.advance(99.0)
        assert not harness.dispatcher.is_paused("m")
        assert max(request.attempt for request in harness.requests) == 1
        later = [request for request in harness.requests if request.at > 5.0]
        assert 94 / 5 - 2 <= len(later) <= 94 / 5 + 1
        harness.advance(16.0)
        assert harness.succeeded() >= 200
        harness.advance(300.0)
        assert (harness.succeeded(), harness.recorder.errors) == (400, [])


@pytest.mark.rule("D9", "A model with a limit of its own slows no other model, not even of the same project.")
@pytest.mark.parametrize("project", ["good", "other"])
def test_a_model_with_its_own_limit_slows_no_other_model(project: str) -> None:
    """D9: the free model takes as long as alone, and the limited one gets what it may have."""
    lines = 4000
    with closing(ScriptedHarness(LimitedModel(rate=20).reply)) as harness:
        harness.add(make_jobs(1000, project_id=project, model="limited", expires_at=FAR_FUTURE))
        harness.add(make_jobs(lines, project_id="good", model="free", expires_at=FAR_FUTURE))
        assert seconds_until(harness, lines, model="free") <= seconds_alone(lines, model="free") + 1
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


def refused_once(status: int) -> Script:
    """Return what refuses the first attempt of the first line, and answers all others after a while."""

    async def reply(request: Request) -> Reply:
        if request.attempt == 1 and request.line.endswith(" 0"):
            return refusal(status)
        return await answer(request)

    return reply


def tries_before(harness: ScriptedHarness) -> int:
    """Return how many attempts were made before the second one of a line."""
    return next(index for index, request in enumerate(harness.requests) if request.attempt == 2)


@pytest.mark.parametrize("status", [429, 503])
def test_a_line_that_is_tried_again_does_not_wait_for_all_others(status: int) -> None:
    """D3: it waits for a second at most. In that time five others are tried, one at a time."""
    with closing(ScriptedHarness(refused_once(status), cap=1)) as harness:
        harness.add(make_jobs(40, expires_at=FAR_FUTURE))
        harness.advance(30.0)
        assert tries_before(harness) <= 7


@pytest.mark.rule("D9", "Lines that are always refused do not hold up the others of their batch.")
@pytest.mark.parametrize("status", [429, 503])
def test_many_lines_that_are_always_refused_do_not_hold_up_the_others(status: int) -> None:
    """They once filled the queue: the limit fell, the upstream was paused, and each probe was one of them."""

    async def reply(request: Request) -> Reply:
        _, index = request.line.split()
        if crc32(index.encode()) % 4 == 0:
            await asyncio.sleep(0.01)
            return refusal(status)
        return await answer(request)

    with closing(ScriptedHarness(reply)) as harness:
        jobs = make_jobs(2000, expires_at=FAR_FUTURE)
        harness.add(jobs)
        assert seconds_until(harness, 1400) <= 40


@pytest.mark.rule("D3", "A refusal that the service provoked while it looks for the limit spends no throttle.")
def test_refusals_that_the_search_provoked_spend_no_throttle(monkeypatch: pytest.MonkeyPatch) -> None:
    """D3: a line must not fail because the service tries now and then whether more is accepted."""
    real, provoked = Limiter.end, [True]

    def end(*given: Any, **named: Any) -> float | None:
        cost = real(*given, **named)
        return 0.0 if provoked[0] else cost

    monkeypatch.setattr(Limiter, "end", end)

    async def refuse(request: Request) -> Reply:
        return refusal(429)

    with closing(ScriptedHarness(refuse)) as harness:
        harness.add(make_jobs(1, expires_at=FAR_FUTURE))
        harness.advance(60.0)
        assert (len(harness.requests) > 40, harness.recorder.errors) == (True, [])
        provoked[0] = False
        before = len(harness.requests)
        harness.advance(600.0)
        assert len(harness.requests) - before == 13
        assert len(harness.recorder.errors) == 1


@pytest.mark.rule("D3", "A line that a limit refuses with 503 spends no attempt.")
def test_lines_that_a_limit_refuses_with_503_do_not_fail() -> None:
    """Some servers and proxies refuse with 503 what exceeds their limits. Each line may meet many of these."""
    with closing(ScriptedHarness(limited_to(4))) as harness:
        harness.add(make_jobs(200, expires_at=FAR_FUTURE))
        harness.advance(60.0)
        assert len(harness.requests) > 250
        assert (harness.succeeded(), harness.recorder.errors) == (200, [])
        assert harness.attempts("throttled") > harness.attempts("fault")


@pytest.mark.rule("D3", "Connections that are reset beyond a number in flight are refusals, once that is known.")
@pytest.mark.parametrize("slots", [8, 16, 24])
def test_connections_that_are_reset_beyond_a_number_show_a_limit(slots: int) -> None:
    """Of 32 in flight, most, half or a quarter break. They pass later, so no line fails."""
    reset = Fault(kind=FaultKind.BROKEN, detail="reset by peer")
    with closing(ScriptedHarness(limited_to(slots, reset))) as harness:
        harness.add(make_jobs(800, expires_at=FAR_FUTURE))
        harness.advance(5.0 + 1.5 * 800 / slots * LATENCY_SECONDS)
        assert (harness.succeeded(), harness.recorder.errors) == (800, [])
        assert harness.attempts("throttled") > harness.attempts("fault")


@pytest.mark.rule("D3", "A line that alone gets 503 while others are answered fails after its attempts.")
def test_a_line_that_always_gets_503_beside_others_fails() -> None:
    jobs = make_jobs(400, expires_at=FAR_FUTURE)
    refused = f"{jobs[7].batch.id} 7"

    async def refuse_one(request: Request) -> Reply:
        return refusal(503) if request.line == refused else await answer(request)

    with closing(ScriptedHarness(refuse_one)) as harness:
        harness.add(jobs)
        harness.advance(120.0)
        assert (harness.succeeded(), len(harness.recorder.errors)) == (399, 1)
        assert max(request.attempt for request in harness.requests) == 4


@pytest.mark.rule("D2", "The error of a line says how often it was tried, also if the upstream refused it each time.")
def test_a_line_whose_tries_were_all_refused_names_their_number() -> None:
    """A limit of two at once is known, so a quick 503 is taken for a refusal, which costs no attempt."""
    jobs = make_jobs(600, expires_at=FAR_FUTURE)
    refused, others = f"{jobs[7].batch.id} 7", limited_to(2)

    async def refuse_one_and_beyond_two(request: Request) -> Reply:
        return refusal(503) if request.line == refused else await others(request)

    with closing(ScriptedHarness(refuse_one_and_beyond_two)) as harness:
        harness.add(jobs)
        harness.advance(600.0)
        [error] = harness.recorder.errors
        tried = max(request.attempt for request in harness.requests if request.line == refused)
        assert tried > 4
        assert f"Line failed after {tried} attempts: ".encode() in error


@pytest.mark.rule("D3", "At an upstream whose limit is known, a refused line is tried again after half a second.")
def test_the_backoff_is_short_where_the_limit_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """D3: six times. Elsewhere the wait doubles each time."""

    def seconds_of_six_waits() -> float:
        with closing(DispatcherHarness()) as harness:
            harness.add(make_jobs(1, expires_at=FAR_FUTURE))
            since = harness.now
            for sent in range(1, 7):
                assert harness.sent == sent
                harness.reply(refusal(429))
                while harness.sent == sent:
                    harness.advance(0.5)
            return harness.now - since

    assert seconds_of_six_waits() == 1 + 2 + 4 + 8 + 16 + 32
    monkeypatch.setattr(ModelLimit, "is_refused", True)
    assert seconds_of_six_waits() == 6 * 0.5


def test_a_line_that_may_start_earlier_than_another_is_not_kept_waiting() -> None:
    """D9: the timer of a model that must wait for long is set again when another one need not."""
    with closing(ScriptedHarness(answer)) as harness:
        may_start = {"late": 60.0, "soon": 5.0}
        limiter = harness.dispatcher._limiter
        limiter.allowance = lambda model, now: 10 if now >= may_start[model] else 0  # type: ignore[method-assign]
        limiter.wait = lambda model, now: max(0.0, may_start[model] - now)  # type: ignore[method-assign]
        harness.add(make_jobs(1, model="late", expires_at=FAR_FUTURE))
        harness.advance(1.0)
        harness.add(make_jobs(1, model="soon", expires_at=FAR_FUTURE))
        harness.advance(100.0)
        assert [(request.model, request.at) for request in harness.requests] == [("soon", 5.0), ("late", 60.0)]


def test_lines_that_each_get_some_429_before_their_answer_all_succeed() -> None:
    """D3, D9: one to three, whatever the rate."""

    async def reply(request: Request) -> Reply:
        await asyncio.sleep(LATENCY_SECONDS)
        return refusal(429) if request.attempt <= 1 + crc32(request.line.encode()) % 3 else ANSWER

    with closing(ScriptedHarness(reply)) as harness:
        harness.add(make_jobs(600, expires_at=FAR_FUTURE))
        assert seconds_until(harness, 600) <= 60
        assert harness.recorder.errors == []


@pytest.mark.rule("D3", "A line that a limit of tokens leaves no room for beside small ones succeeds after them.")
def test_a_large_line_that_is_refused_beside_small_ones_succeeds_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """D3, D9: its throttles would not last for as long as the small ones take."""
    monkeypatch.setattr(ModelLimit, "is_refused", True)
    limited = limited_to(4, refusal(429))

    async def reply(request: Request) -> Reply:
        is_last = harness.succeeded(project="small") == 2400
        return await limited(request) if request.project == "small" or is_last else refusal(429)

    with closing(ScriptedHarness(reply, cap=16)) as harness:
        harness.add(make_jobs(2400, project_id="small", expires_at=FAR_FUTURE))
        harness.add(make_jobs(1, project_id="large", expires_at=FAR_FUTURE))
        harness.advance(180.0)
        assert (harness.succeeded(), harness.recorder.errors) == (2401, [])


def test_a_line_that_may_start_a_moment_after_the_look_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """D9: otherwise it would start only when something else happens, such as another batch."""
    with closing(DispatcherHarness()) as harness:
        harness.advance(5.0)
        start_at, looks = harness.now, list[float]()

        def allowance(_: Limiter, __: str, now: float) -> int:
            looks.append(now)
            return int(now >= start_at)

        monkeypatch.setattr(Limiter, "allowance", allowance)
        monkeypatch.setattr(Limiter, "wait", lambda _, __, now: max(0.0, start_at - now))
        monkeypatch.setattr(harness.dispatcher._clock, "steady", lambda: start_at + (1e-6 if len(looks) > 1 else -1e-6))
        harness.add(make_jobs(1, expires_at=FAR_FUTURE))
        # It is looked at twice: within the limit, and beyond it because its project has nothing in flight.
        assert (harness.sent, len(looks)) == (0, 2)
        harness.advance(1.0)
        assert harness.sent == 1
