"""What refusals of one model mean: for a line, or for all lines of the model (D9)."""

import pytest

from batchline.domain.rate_limits import Quota, RateLimits
from batchline.pipeline.dispatch.limiter.concurrency import FIRST_LIMIT
from batchline.pipeline.dispatch.limiter.load import Start
from batchline.pipeline.dispatch.limiter.model import ModelLimit
from tests.support.starts import start_of

MANY = 1_000_000
LATENCY_SECONDS = 0.1


class Drive:
    """Reports starts, answers and refusals, a hundredth of a second after each other."""

    def __init__(self) -> None:
        self.model, self.now = ModelLimit(cap=1024), 0.0

    def start(self, in_flight: int) -> Start:
        self.now += 0.01
        self.model.on_start(self.now, 1, in_flight)
        return start_of("m", self.now, in_flight=in_flight, order=self.model.started)

    def answer(self, in_flight: int, *, project_id: str = "p", again: bool = False, times: int = 1) -> None:
        for _ in range(times):
            start = self.start(in_flight)
            self.model.on_answers([start], self.now + LATENCY_SECONDS, project_id=project_id, again=again)

    def refuse(
        self,
        in_flight: int,
        line: object,
        *,
        project_id: str = "p",
        again: bool = False,
        retry_after: float | None = None,
    ) -> float | None:
        start = self.start(in_flight)
        return self.model.on_refusal(
            start, self.now + 0.002, project_id=project_id, line=line, again=again, retry_after=retry_after
        )


def test_a_model_that_was_never_refused_is_not_limited() -> None:
    drive = Drive()
    drive.answer(500, times=10)
    assert not drive.model.is_limited
    assert drive.model.allowance(500, drive.now) > 1000
    assert (drive.model.limit, drive.model.rate, drive.model.wait(500, drive.now)) == (FIRST_LIMIT, None, 0.0)


@pytest.mark.rule("D9", "A single refusal slows nothing down.")
def test_a_single_refusal_is_no_evidence() -> None:
    """A line may be refused for what it contains."""
    drive = Drive()
    drive.answer(20, times=100)
    drive.refuse(20, "a")
    drive.answer(20, times=200)
    drive.refuse(20, "b")
    assert not drive.model.is_limited


@pytest.mark.rule("D9", "However often one line is refused, its model keeps its rate.")
def test_refusals_of_the_same_line_are_no_evidence() -> None:
    drive = Drive()
    for attempt in range(13):
        drive.answer(20, times=3)
        drive.refuse(20, "poison", again=attempt > 0)
    assert not drive.model.is_limited


@pytest.mark.rule("D9", "Lines that are refused again and again while others pass are refused for what they contain.")
def test_lines_that_never_pass_are_no_evidence_while_others_do() -> None:
    """After some of their refusals it is clear that no rate would help them."""
    drive = Drive()
    for _ in range(10):
        for line in ("a", "b", "c"):
            drive.answer(20, times=150)
            drive.refuse(20, line, again=True)
    for line in ("a", "b", "c", "a", "b", "c"):
        drive.answer(20)
        drive.refuse(20, line, again=True)
    assert not drive.model.is_limited


@pytest.mark.rule("D9", "If many of the last lines are refused, as many are in flight as were accepted.")
def test_many_refusals_limit_the_model_to_what_was_accepted() -> None:
    drive = Drive()
    drive.answer(8, times=100)
    for line in range(10):
        drive.refuse(9, line)
    assert (drive.model.is_limited, drive.model.is_refused, drive.model.limit) == (True, True, 8)
    assert drive.model.rate == pytest.approx(8 / LATENCY_SECONDS)
    assert drive.model.allowance(5, drive.now + 1.0) == 3
    assert drive.model.allowance(8, drive.now) == 0


def test_a_few_lines_that_are_refused_together_limit_nothing() -> None:
    drive = Drive()
    drive.answer(20, times=100)
    drive.refuse(20, "a")
    drive.refuse(20, "b")
    assert not drive.model.is_limited


@pytest.mark.rule("D9", "Lines that are refused when they are tried first, and pass then, limit nothing.")
def test_lines_that_are_refused_first_lift_a_limit() -> None:
    drive = Drive()
    for line in range(20):
        drive.refuse(20, line)
    assert drive.model.is_refused
    for line in range(20, 140):
        drive.refuse(20, line)
        drive.answer(20, again=True)
    assert not drive.model.is_limited


def test_a_refusal_about_a_line_has_no_cost_of_its_own() -> None:
    """Its fault decides then what it costs. A limit that is known may refuse single lines too."""
    drive = Drive()
    drive.answer(8, times=100)
    assert drive.refuse(9, 0) is None
    assert [drive.refuse(9, line) for line in range(1, 4)] == [1.0, 1.0, 1.0]
    for line in range(4, 20):
        drive.refuse(9, line)
    drive.now += 5.0
    assert drive.model.is_refused
    assert drive.refuse(3, "alone") is not None


@pytest.mark.rule("D9", "A 503 that comes much sooner than answers do is a refusal.")
def test_what_ends_much_sooner_than_answers_do_was_refused() -> None:
    drive = Drive()
    assert not drive.model.refuses_within(0.001)
    drive.answer(8, times=20)
    assert [drive.model.refuses_within(part * LATENCY_SECONDS) for part in (0.1, 0.9)] == [True, False]


@pytest.mark.rule("D9", "Announced limits hold back a model that was never refused.")
def test_an_announced_limit_is_believed_before_any_refusal() -> None:
    drive = Drive()
    limits = RateLimits(requests=Quota(remaining=3, reset_seconds=10.0))
    drive.model.on_announcement(limits, drive.start(1), drive.now)
    assert drive.model.is_limited
    assert drive.model.allowance(1, drive.now) == 3
    drive.model.on_start(drive.now, 3, 4)
    assert drive.model.allowance(4, drive.now) == 0
    assert drive.model.wait(4, drive.now) == drive.model.announced_wait(drive.now) == pytest.approx(10.0)
    assert drive.model.blocked_seconds(drive.now) == 0.0
    assert drive.model.allowance(4, drive.now + 10.1) > 1000
    assert not drive.model.is_limited


def test_the_end_of_a_block_is_known() -> None:
    """It is shown to users who ask why lines wait (D11)."""
    drive = Drive()
    drive.answer(20, times=20)
    for line in range(60):
        drive.refuse(20, line, retry_after=7.0)
    assert drive.model.blocked_seconds(drive.now) == pytest.approx(7.0, abs=0.01)
    assert drive.model.allowance(0, drive.now + 4.0) == 0
    assert drive.model.wait(0, drive.now + 6.0) == pytest.approx(drive.model.blocked_seconds(drive.now + 6.0))


@pytest.mark.rule("D9", "The refusals of a project whose lines never pass beside others' slow no other project down.")
def test_a_project_whose_lines_are_all_refused_limits_nobody() -> None:
    """Its first refusals may look like a limit. It is lifted when it is clear that they are not."""
    drive = Drive()
    for line in range(20):
        drive.refuse(20, line, project_id="refused")
    assert drive.model.is_refused
    for line in range(20, 30):
        drive.answer(20, times=4)
        cost = drive.refuse(20, line, project_id="refused", retry_after=60.0)
    assert not drive.model.is_limited
    assert cost is None
    for line in range(30, 200):
        drive.answer(20)
        drive.refuse(20, line, project_id="refused", retry_after=60.0)
    assert not drive.model.is_limited


def test_a_project_that_is_refused_for_itself_does_not_lift_the_limit_of_the_others() -> None:
    drive = Drive()
    for line in range(30):
        drive.answer(8, times=4)
        drive.refuse(8, line, project_id="refused")
    assert not drive.model.is_limited
    for line in range(30, 40):
        drive.refuse(9, line)
    assert drive.model.is_limited
    drive.answer(8)
    drive.refuse(9, 41, project_id="refused")
    assert drive.model.is_limited


@pytest.mark.rule("D9", "A Retry-After to one project does not keep another from trying a line within a second.")
def test_a_project_that_was_not_refused_may_try_a_line_in_a_block() -> None:
    drive = Drive()
    for line in range(60):
        drive.refuse(20, line, project_id="refused", retry_after=60.0)
    assert drive.model.blocked_seconds(drive.now) > 50
    now = drive.now + 1.0
    assert [drive.model.may_try(project_id, now) for project_id in ("refused", "other")] == [False, True]
    drive.now = now
    start = drive.start(1)
    assert not drive.model.may_try("other", drive.now), "it is tried"
    drive.model.on_answers([start], drive.now + LATENCY_SECONDS, project_id="other", again=False)
    assert drive.model.allowance(0, drive.now + LATENCY_SECONDS) > 0
    assert drive.model.blocked_seconds(drive.now + LATENCY_SECONDS) == 0.0
    assert not drive.model.may_try("other", drive.now + 10.0), "nothing is blocked"


@pytest.mark.rule("D9", "After an outage a model is not held back by what was refused in it.")
def test_after_an_outage_as_many_may_start_as_before() -> None:
    drive = Drive()
    drive.answer(20, times=100)
    for line in range(200):
        drive.refuse(20, line, retry_after=30.0)
    assert drive.model.is_limited
    assert drive.model.allowance(0, drive.now) == 0
    drive.model.on_outage_over(drive.now)
    assert (drive.model.blocked_seconds(drive.now), drive.model.limit) == (0.0, FIRST_LIMIT)
    assert drive.model.allowance(20, drive.now + 1.0) == 18
