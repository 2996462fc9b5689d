"""A paused upstream or model: who is probed, what ends the pause, and what it costs (D3, D9)."""

import asyncio
from collections import Counter
from contextlib import closing

import pytest

from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from tests.support.dispatchers import DispatcherHarness, Request, ScriptedHarness
from tests.support.jobs import FAR_FUTURE, make_jobs

ANSWER = Answer(status=200, body=b'{"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}')
LATENCY_SECONDS = 0.1


def refusal(status: int) -> Answer:
    return Answer(status=status, body=b'{"error":{"message":"not now"}}')


class Scene(ScriptedHarness):
    """An upstream that answers all but some projects and models. It never answers the project "hanging"."""

    def __init__(self, *, status: int = 503, patience_seconds: float = 3600.0) -> None:
        self.status = status
        self.failure_seconds = LATENCY_SECONDS
        self.everything_fails = False
        self.failing_projects: set[str] = set()
        self.failing_models: set[str] = set()
        super().__init__(self._reply, patience_seconds=patience_seconds)

    def add_lines(self, lines: int, project: str = "a", model: str = "m") -> None:
        self.add(make_jobs(lines, project_id=project, model=model, expires_at=FAR_FUTURE))

    def sent_since(self, at: float) -> list[Request]:
        return [request for request in self.requests if request.at >= at]

    def pauses(self) -> set[str | None]:
        """The models that are paused; None stands for the whole upstream."""
        return {pause.model for pause in self.breakers.pauses}

    async def _reply(self, request: Request) -> Reply:
        fails = (
            self.everything_fails or request.project in self.failing_projects or request.model in self.failing_models
        )
        seconds = self.failure_seconds if fails else LATENCY_SECONDS
        await asyncio.sleep(10_000 if request.project == "hanging" else seconds)
        return refusal(self.status) if fails else ANSWER


def test_probes_come_from_each_project_and_model_in_turn() -> None:
    """D3: whoever has many lines, and whoever came first."""
    with closing(Scene()) as scene:
        scene.everything_fails = True
        scene.add_lines(100, "a", "m")
        scene.advance(1.0)
        assert scene.pauses() == {None}
        scene.add_lines(1, "a", "n")
        scene.add_lines(1, "b", "m")
        before = scene.now
        scene.advance(200.0)
        probed = [(request.project, request.model) for request in scene.sent_since(before)]
        assert len(probed) >= 12
        assert all(set(probed[turn : turn + 3]) == set(probed) for turn in range(0, len(probed) - 2, 3))


@pytest.mark.rule("D9", "Lines of one project that are always refused keep no other project's waiting.")
def test_a_project_that_comes_later_is_probed_within_a_second_and_ends_the_pause() -> None:
    """D3, D9: the next regular probe may be 5 s away, and of the other project it would be in vain."""
    with closing(Scene(status=429)) as scene:
        scene.failing_projects = {"refused"}
        scene.add_lines(40, "refused")
        scene.advance(60.0)
        assert scene.pauses() == {None}
        scene.add_lines(100, "welcome")
        began = scene.now
        scene.advance(1.2)
        assert [request.project for request in scene.sent_since(began)].count("welcome") >= 1
        assert scene.pauses() == set()
        scene.advance(15.0)
        assert scene.succeeded(project="welcome") == 100


def test_a_project_that_comes_later_is_probed_within_a_second_if_a_model_is_paused() -> None:
    """D3, D9: the same, with another model in use that the project with nothing but refusals has no lines of."""
    with closing(Scene(status=429)) as scene:
        scene.failing_projects = {"refused"}
        scene.add_lines(40, "refused", "m")
        for _ in range(50):
            scene.add_lines(40, "welcome", "other")
            scene.advance(0.2)
        assert scene.pauses() == {"m"}
        scene.add_lines(5000, "welcome", "other")
        scene.add_lines(50, "welcome", "m")
        scene.advance(1.2)
        assert scene.pauses() == set()
        scene.advance(10.0)
        assert scene.succeeded(project="welcome", model="m") == 50


def test_the_outage_of_a_model_pauses_that_model_alone() -> None:
    """D3: the lines of the other model go on, and those of the model when it is back."""
    with closing(Scene()) as scene:
        scene.failing_models = {"gone"}
        scene.add_lines(100, model="gone")
        scene.add_lines(60_000, model="there")
        scene.advance(5.0)
        assert scene.pauses() == {"gone"}
        before = scene.succeeded(model="there")
        scene.advance(1.0)
        assert scene.succeeded(model="there") > before + 100
        scene.failing_models = set()
        scene.advance(30.0)
        assert (scene.succeeded(model="gone"), scene.recorder.errors) == (100, [])


def test_the_outage_of_a_model_that_is_used_alone_does_not_keep_others_waiting() -> None:
    """D3: it looks like an outage of the whole upstream, until another model is asked for."""
    with closing(Scene()) as scene:
        scene.failing_models = {"gone"}
        scene.add_lines(100, model="gone")
        scene.advance(60.0)
        assert scene.pauses() == {None}
        scene.add_lines(50, model="there")
        scene.advance(1.2)
        assert scene.pauses() == {"gone"}
        scene.advance(2.0)
        assert scene.succeeded(model="there") == 50


def test_the_whole_upstream_is_paused_if_all_its_models_fail() -> None:
    """D3: one probe at a time, not one for each model."""
    with closing(Scene()) as scene:
        scene.everything_fails = True
        for model in ("a", "b", "c"):
            scene.add_lines(50, model=model)
        scene.advance(1.0)
        assert scene.pauses() == {None}
        before = scene.now
        scene.advance(60.0)
        assert len(scene.sent_since(before)) <= 24
        scene.everything_fails = False
        scene.advance(30.0)
        assert (scene.succeeded(), scene.recorder.errors) == (150, [])


def test_an_answer_to_a_synchronous_call_ends_a_pause() -> None:
    """D3: of the whole upstream and of its model, and lines start at once."""
    with closing(Scene()) as scene:
        scene.everything_fails = True
        scene.add_lines(50)
        scene.advance(60.0)
        scene.everything_fails = False
        before = scene.now
        scene.call(lambda: scene.dispatcher.on_real_answers("m"))
        assert (scene.pauses(), scene.dispatcher.in_flight > 1) == (set(), True)
        scene.advance(5.0)
        assert scene.succeeded() == 50
        assert Counter(request.at for request in scene.sent_since(before))[before] > 1


def test_a_paused_upstream_is_probed_though_every_slot_hangs() -> None:
    """D8, D9: with a line of a project that has nothing in flight, beyond the limit."""
    with closing(Scene()) as scene:
        scene.failing_projects = {"a"}
        scene.add_lines(400, "hanging")
        scene.advance(10.0)
        scene.add_lines(50, "a")
        scene.advance(60.0)
        assert (scene.pauses(), scene.dispatcher.in_flight >= scene.dispatcher.limit) == ({None}, True)
        scene.failing_projects = set()
        scene.advance(30.0)
        assert (scene.succeeded(project="a"), scene.recorder.errors) == (50, [])


def test_an_upstream_that_is_restarted_while_probes_hang_is_probed_soon() -> None:
    """D3: the probes break together, so their lines become suspects. None of them is in flight any more."""
    with closing(DispatcherHarness(cap=64)) as bench:
        bench.add(make_jobs(40, expires_at=FAR_FUTURE))
        bench.reply(refusal(503))
        assert bench.breaker.paused
        bench.advance(300.0)
        bench.reply(Fault(kind=FaultKind.BROKEN, detail="the connection ended before an answer came"))
        before = bench.sent
        bench.advance(16.0)
        assert bench.sent > before
        bench.reply(ANSWER)
        assert not bench.breaker.paused


def test_an_outage_soon_after_another_costs_no_line() -> None:
    """D3: though a pause needs more answers then, and the few lines that are left have not so many attempts."""
    with closing(Scene()) as scene:
        scene.everything_fails = True
        scene.add_lines(20)
        scene.advance(30.0)
        scene.everything_fails = False
        scene.advance(30.0)
        assert (scene.pauses(), scene.succeeded()) == (set(), 20)
        scene.everything_fails = True
        scene.add_lines(8)
        scene.advance(300.0)
        assert (scene.pauses(), scene.recorder.errors) == ({None}, [])
        scene.everything_fails = False
        scene.advance(30.0)
        assert scene.succeeded() == 28


@pytest.mark.rule("D3", "An upstream that answers 500 to everyone is paused and costs no line.")
@pytest.mark.parametrize("status", [500, 501, 502, 504, 529])
def test_a_gateway_that_fails_for_everyone_costs_no_line(status: int) -> None:
    with closing(Scene(status=status)) as scene:
        scene.everything_fails = True
        scene.add_lines(200)
        scene.advance(300.0)
        assert scene.pauses() == {None}
        assert len(scene.requests) < 150
        scene.everything_fails = False
        scene.advance(60.0)
        assert (scene.succeeded(), scene.recorder.errors) == (200, [])


@pytest.mark.rule("D3", "An upstream that accepts nobody's credentials is paused and costs no line.")
@pytest.mark.parametrize("status", [401, 403])
def test_wrong_credentials_cost_no_line_and_the_log_says_what_to_do(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """D3: the operator changes the key, and the lines run."""
    with closing(Scene(status=status)) as scene:
        scene.everything_fails = True
        scene.add_lines(200)
        scene.advance(300.0)
        assert [pause.detail for pause in scene.breakers.pauses] == [f"http_{status}"]
        assert "check its API key" in caplog.text
        scene.everything_fails = False
        scene.advance(60.0)
        assert (scene.succeeded(), scene.recorder.errors) == (200, [])


@pytest.mark.rule("D2", "A line that alone gets 401 fails with authentication_error after its attempts.")
def test_a_single_line_that_gets_401_fails_after_its_attempts() -> None:
    """D2, D3: among others that succeed it is the line that is refused."""
    with closing(Scene(status=401)) as scene:
        scene.failing_projects = {"odd"}
        scene.add_lines(1, "odd")
        scene.add_lines(2000, "a")
        scene.advance(60.0)
        (error,) = scene.recorder.errors
        assert b"authentication_error" in error
        assert b"[legacy:http_401]" in error
        assert [request.project for request in scene.requests].count("odd") == 4
        assert scene.succeeded(project="a") == 2000


@pytest.mark.rule("D3", "After the patience is over, every 503 spends an attempt, however quickly it comes.")
def test_lines_of_an_upstream_that_refuses_everything_for_longer_than_the_patience_end() -> None:
    """D3: such an upstream does not refuse what exceeds a limit."""
    with closing(Scene(patience_seconds=10)) as scene:
        scene.failure_seconds = LATENCY_SECONDS / 10
        scene.add_lines(500)
        scene.advance(20.0)
        scene.everything_fails = True
        scene.add_lines(500)
        scene.advance(60.0)
        assert (scene.succeeded(), len(scene.recorder.errors)) == (500, 500)
