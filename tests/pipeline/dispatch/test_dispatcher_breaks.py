"""Lines that fail or break by themselves concern nobody else, and a line that crashes the upstream is found (D3, D5,
D9)."""

import asyncio
from contextlib import closing

import pytest

from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from tests.support.dispatchers import Request, ScriptedHarness
from tests.support.jobs import FAR_FUTURE, make_jobs

ANSWER = Answer(status=200, body=b'{"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}')
BROKEN = Fault(kind=FaultKind.BROKEN, detail="reset by peer")
REFUSED = Fault(kind=FaultKind.REFUSED, detail="connection refused")
LATENCY_SECONDS = 0.1


def failure(status: int) -> Answer:
    return Answer(status=status, body=b'{"error":{"message":"this one never works"}}')


class Scene(ScriptedHarness):
    """An upstream that answers all lines but some bad ones."""

    def __init__(self, *, bad: Reply = BROKEN, bad_seconds: float = 0.02, seed: int = 1) -> None:
        self.bad, self.bad_seconds = bad, bad_seconds
        self.bad_lines: set[str] = set()
        self.down = False
        """Whether it refuses all connections."""
        super().__init__(self.reply, seed=seed)

    def add_lines(self, lines: int, project: str = "p", *, bad: int = 0) -> None:
        """Add the lines of a batch. So many of them are bad, evenly among the others."""
        jobs = make_jobs(lines, project_id=project, expires_at=FAR_FUTURE)
        chosen = [jobs[n * lines // bad] for n in range(bad)]
        self.bad_lines |= {f"{job.batch.id} {job.line.index}" for job in chosen}
        self.add(jobs)

    @property
    def ended(self) -> int:
        return len(self.recorder.output) + len(self.recorder.errors)

    def seconds_until_ended(self, lines: int) -> float:
        """Let time pass until so many lines have ended, successfully or not, and return how long that took."""
        began = self.now
        while self.ended < lines and self.now - began < 3000.0:
            self.advance(0.1)
        return self.now - began

    def seconds_until_succeeded(self, lines: int, project: str) -> float:
        began = self.now
        while self.succeeded(project=project) < lines and self.now - began < 3000.0:
            self.advance(0.1)
        return self.now - began

    async def reply(self, request: Request) -> Reply:
        if self.down:
            await asyncio.sleep(0.001)
            return REFUSED
        is_bad = request.line in self.bad_lines
        await asyncio.sleep(self.bad_seconds if is_bad else LATENCY_SECONDS)
        return self.bad if is_bad else ANSWER


class CrashScene(Scene):
    """An upstream that crashes by each bad line: all connections break, and it refuses further ones for some time."""

    def __init__(self, *, restart_seconds: float) -> None:
        self.restart_seconds = restart_seconds
        self.crashes = 0
        self._crashed = asyncio.Event()
        super().__init__(bad_seconds=LATENCY_SECONDS / 2)

    async def reply(self, request: Request) -> Reply:
        if self.down:
            return await super().reply(request)
        crashed = self._crashed
        if request.line in self.bad_lines:
            await asyncio.sleep(self.bad_seconds)
            if not crashed.is_set():
                self._crash()
            return BROKEN
        try:
            await asyncio.wait_for(crashed.wait(), LATENCY_SECONDS)
        except TimeoutError:
            return ANSWER
        return BROKEN

    def _crash(self) -> None:
        self.crashes += 1
        self._crashed.set()
        self._crashed, self.down = asyncio.Event(), True
        asyncio.get_running_loop().call_later(self.restart_seconds, self._restart)

    def _restart(self) -> None:
        self.down = False


@pytest.mark.rule("D9", "Lines of one project whose connections break keep no other project's waiting.")
@pytest.mark.parametrize(
    ("bad_seconds", "factor", "seconds_later"),
    [
        (0.02, 1.3, 0.0),
        (2.0, 2.0, 30.0),
        *(
            pytest.param(*lines, seconds_later, marks=pytest.mark.proof)
            for lines, seconds_later in (((2.0, 2.0), 0.0), ((0.02, 1.3), 1.0), ((2.0, 2.0), 1.0), ((0.02, 1.3), 30.0))
        ),
    ],
)
def test_lines_that_break_do_not_slow_another_project(bad_seconds: float, factor: float, seconds_later: float) -> None:
    """Lines that hang before they break have half of the slots meanwhile, as any project's lines."""
    with closing(Scene()) as scene:
        scene.add_lines(8_000, "alone")
        alone = scene.seconds_until_succeeded(8_000, "alone")
    with closing(Scene(bad_seconds=bad_seconds)) as scene:
        scene.add_lines(400, "breaking", bad=400)
        scene.advance(seconds_later)
        scene.add_lines(8_000, "other")
        beside = scene.seconds_until_succeeded(8_000, "other")
        assert beside < factor * alone + 2.0, "two seconds for the decision what the breaks are"


@pytest.mark.rule("D3", "Lines that always fail while others are answered do not keep their batch for an hour.")
@pytest.mark.parametrize(
    "bad", [BROKEN, failure(500), failure(502), failure(504), failure(403)], ids=["broken", "500", "502", "504", "403"]
)
def test_a_batch_with_lines_that_always_fail_ends_soon(bad: Reply) -> None:
    with closing(Scene(bad=bad)) as scene:
        scene.add_lines(1100, bad=100)
        assert scene.seconds_until_ended(1100) < 90.0
        assert (scene.succeeded(), len(scene.recorder.errors)) == (1000, 100)


def test_lines_that_failed_alone_outlast_a_short_outage_after_the_others() -> None:
    """D3: a line that failed twice while others were answered may work later, so an outage must not fail it."""
    with closing(Scene(bad=failure(500))) as scene:
        scene.add_lines(1020, bad=20)
        scene.advance(1.5)
        assert scene.succeeded() == 1000
        scene.down = True
        scene.advance(25.0)
        scene.down, scene.bad = False, ANSWER
        scene.seconds_until_ended(1020)
        assert (scene.succeeded(), scene.recorder.errors) == (1020, [])


def test_an_outage_pauses_though_lines_failed_alone_before() -> None:
    """D3: only what is known to fail alone is no sign of an outage."""
    with closing(Scene(bad=failure(500))) as scene:
        scene.add_lines(1100, bad=100)
        scene.seconds_until_ended(1100)
        scene.down = True
        scene.add_lines(100, "other")
        scene.advance(600.0)
        assert scene.breakers.paused
        scene.down = False
        scene.advance(60.0)
        assert scene.succeeded(project="other") == 100


@pytest.mark.rule("D5", "Lines that crash the upstream fail no other line, however soon it restarts.")
@pytest.mark.parametrize(
    "restart_seconds", [0.01, *(pytest.param(seconds, marks=pytest.mark.proof) for seconds in (0.2, 0.5, 3.0)), 30.0]
)
@pytest.mark.parametrize("bad", [1, 5])
@pytest.mark.parametrize("beside", [0, 500])
def test_lines_that_crash_the_upstream_fail_nothing_else(restart_seconds: float, bad: int, beside: int) -> None:
    with closing(CrashScene(restart_seconds=restart_seconds)) as scene:
        scene.add_lines(200, "crashing", bad=bad)
        scene.add_lines(max(1, beside), "other")
        lines = 200 + max(1, beside)
        scene.seconds_until_ended(lines)
        assert (scene.succeeded(), len(scene.recorder.errors)) == (lines - bad, bad)
        assert scene.crashes <= 12 * bad


class BreakingOnceScene(Scene):
    """An upstream that breaks each bad line once, and answers within ``seconds``."""

    seconds = LATENCY_SECONDS

    async def reply(self, request: Request) -> Reply:
        is_bad = request.line in self.bad_lines
        await asyncio.sleep(self.bad_seconds if is_bad else self.seconds)
        self.bad_lines.discard(request.line)
        return self.bad if is_bad else ANSWER


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.proof) for seed in range(2, 12))])
def test_a_suspect_that_turns_out_to_break_by_itself_holds_up_nothing(seed: int) -> None:
    """It is tried apart although connections have outlasted its break meanwhile, and then others are tried.

    With some of the seeds, it waits only for a moment before its next attempt.
    """
    with closing(BreakingOnceScene(seed=seed)) as scene:
        scene.seconds, scene.bad_seconds = 0.03, 0.02
        scene.add_lines(12, "first", bad=1)
        scene.advance(0.021)
        scene.seconds = scene.bad_seconds = 0.01
        scene.add_lines(12, "answered")
        scene.advance(0.012)
        scene.add_lines(1, "alone", bad=1)
        scene.seconds_until_ended(25)
        scene.add_lines(2, "together", bad=2)
        assert scene.seconds_until_ended(27) < 30.0
