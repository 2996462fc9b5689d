"""When an upstream or a model counts as unavailable, how it is probed, and which faults spend nothing (D3, D5)."""

from itertools import cycle, islice, pairwise

import pytest

from batchline.domain.outcomes import Retryable
from batchline.domain.progress import Pause
from batchline.pipeline.dispatch.circuit_breaker import Breakers, CircuitBreaker
from batchline.telemetry.metrics import Metrics
from tests.support.clocks import ChosenRandom, SettableClock
from tests.support.jobs import make_jobs

PATIENCE = 3600.0
LANE = ("project", "model")
EVERYTHING = {"refused", "broken", "timeout", "http_429", "http_502", "http_503", "http_504"}
"""The kinds of faults of an upstream that is unavailable."""


class Bench:
    def __init__(self, *, patience: float = PATIENCE, chance: float = 1.0) -> None:
        self.clock, self.metrics = SettableClock(), Metrics()
        self.breaker = CircuitBreaker(
            "gpu", clock=self.clock, random=ChosenRandom(chance), patience_seconds=patience, metrics=self.metrics
        )

    def unavailable(self, answers: int, *, lines: int) -> None:
        for line in islice(cycle(range(lines)), answers):
            self.fault(line)

    def fault(
        self,
        line: object,
        reason: str = "refused",
        *,
        throttled: bool = False,
        fails_alone: bool = False,
        fails_first: bool = False,
    ) -> None:
        self.breaker.end_probe(line)
        self.breaker.on_unavailable(line, reason, throttled=throttled, fails_alone=fails_alone, fails_first=fails_first)
        self.breaker.pause_if_unavailable(self.breaker.answers_to_pause)

    def starts(self) -> bool:
        """Start an attempt if one may start now, as the dispatcher does, and return whether it did.

        A probe is refused at once.
        """
        self.breaker.end_pause_if_overdue()
        if self.breaker.paused and self.breaker.seconds_to_probe:
            return False
        if self.breaker.paused:
            self.breaker.begin_probe(LANE, "probe")
            self.breaker.end_probe("probe")
            self.breaker.on_unavailable("probe", "refused")
        return True

    def probes(self, seconds: float, *, step: float = 0.05) -> list[float]:
        """When attempts were let through, in seconds from now, if one is always ready."""
        started, admitted = self.clock.steady(), []
        while (passed := self.clock.steady() - started) < seconds:
            if self.starts():
                admitted.append(passed)
            self.clock.advance(step)
        return admitted

    def forgiven(self) -> set[str]:
        """The kinds of faults that spend nothing now."""
        return {kind for kind in EVERYTHING if self.breaker.forgives(kind)}

    def reasons(self) -> set[str]:
        """What /metrics says of the pause of this upstream."""
        family = next(one for one in self.metrics.registry.collect() if one.name == "batchline_upstream_paused")
        assert all(sample.labels["upstream"] == "gpu" for sample in family.samples)
        return {sample.labels["reason"] for sample in family.samples if sample.value}


def paused(**options: float) -> Bench:
    bench = Bench(**options)
    bench.unavailable(16, lines=4)
    assert bench.breaker.paused
    return bench


@pytest.mark.rule("D3", "16 gone answers from 4 lines pause an upstream.")
@pytest.mark.parametrize("lines", [4, 5, 16])
def test_sixteen_gone_answers_from_four_lines_pause_it(lines: int) -> None:
    """D3: the sixteenth does, not the fifteenth."""
    bench = Bench()
    bench.unavailable(15, lines=lines)
    assert not bench.breaker.paused
    bench.fault(15 % lines)
    assert bench.breaker.paused


def test_a_pause_tells_of_itself_until_it_is_over() -> None:
    """D3: for the progress; the moment it began stays, however long it takes."""
    bench = Bench()
    assert bench.breaker.pause is None
    began = int(bench.clock.now())
    bench.unavailable(16, lines=4)
    bench.clock.advance(100)
    bench.unavailable(16, lines=4)
    assert bench.breaker.pause == Pause(upstream="gpu", detail="refused", since=began)
    bench.breaker.on_real_answers()
    assert bench.breaker.pause is None


@pytest.mark.rule("D3", "Three lines alone never pause an upstream.")
def test_three_lines_never_pause_it() -> None:
    """D3: they may be the ones to blame."""
    bench = Bench()
    bench.unavailable(200, lines=3)
    assert not bench.breaker.paused
    assert bench.starts()


def test_a_real_answer_between_begins_the_count_anew() -> None:
    """D3: the last sixteen answers must all say that it is unavailable."""
    bench = Bench()
    for _ in range(5):
        bench.unavailable(15, lines=5)
        assert not bench.breaker.paused
        bench.breaker.on_real_answers()


def test_only_the_last_sixteen_count() -> None:
    """D3: lines that were tried long ago do not make four of two."""
    bench = Bench()
    for line in ("long ago", "before", *["now"] * 15, "and now"):
        bench.fault(line)
    assert not bench.breaker.paused


def test_an_open_gate_lets_everything_through() -> None:
    bench = Bench()
    assert all(bench.starts() for _ in range(1000))


@pytest.mark.rule("D3", "A paused upstream is probed every 1 to 5 s.")
@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_probes_come_every_one_to_five_seconds(chance: float) -> None:
    """D3: one at a time, less and less often, and never not at all."""
    probes = paused(chance=chance).probes(300)
    gaps = [later - earlier for earlier, later in pairwise(probes)]
    assert probes[0] == pytest.approx(1 + chance, abs=0.11)
    assert all(0.99 <= gap <= 5.1 for gap in gaps)
    assert all(later >= earlier - 0.11 for earlier, later in pairwise(gaps))
    assert gaps[-1] == pytest.approx(2.5 * (1 + chance), abs=0.11)


def test_the_wait_for_the_next_probe_is_known() -> None:
    """D3: what a sleeper needs to wake in time."""
    bench = paused()
    assert bench.breaker.seconds_to_probe == 2.0
    bench.clock.advance(1.75)
    assert bench.breaker.seconds_to_probe == 0.25
    assert not bench.starts()
    bench.clock.advance(0.25)
    assert bench.breaker.seconds_to_probe == 0.0
    assert bench.starts()
    assert not bench.starts(), "one probe"
    assert bench.breaker.seconds_to_probe == 2.0


def test_the_time_between_probes_grows_with_the_pause() -> None:
    """D3: so that a pause is hardly longer than it must be, and an upstream that is gone for long is asked seldom."""
    waits = [after - before for before, after in pairwise(paused().probes(60))]
    assert all(wait <= next_wait + 0.05 for wait, next_wait in pairwise(waits))
    assert waits[0] == pytest.approx(2.0, abs=0.1)
    assert waits[-1] == pytest.approx(5.0, abs=0.1)


def test_probes_become_rare_while_earlier_ones_have_no_reply() -> None:
    """D3: a slow server would never be done with what it was sent if a probe every 5 s added to it."""
    bench, begun = paused(), list[int]()
    end = bench.clock.steady() + 1200
    while bench.clock.steady() < end:
        bench.clock.advance(bench.breaker.seconds_to_probe)
        bench.breaker.begin_probe(LANE, len(begun))
        begun.append(len(begun))
    assert len(begun) == 11
    for line in begun:
        assert bench.breaker.seconds_to_probe > 5
        bench.fault(line)
    assert bench.breaker.seconds_to_probe == 5


def test_gone_answers_to_probes_leave_it_paused() -> None:
    """D3: and do not bring the next probe nearer."""
    bench = paused()
    bench.clock.advance(2.0)
    assert bench.starts()
    bench.unavailable(40, lines=9)
    assert bench.breaker.paused
    assert bench.breaker.seconds_to_probe == 2.0


@pytest.mark.rule("D3", "The first real answer ends the pause.")
def test_the_first_real_answer_ends_the_pause() -> None:
    """D3: everything may start at once, and a new pause needs sixteen new answers and begins with short waits."""
    bench = paused()
    bench.probes(100)
    bench.breaker.on_real_answers()
    assert not bench.breaker.paused
    assert all(bench.starts() for _ in range(100))
    bench.clock.advance(60)
    bench.unavailable(15, lines=15)
    assert not bench.breaker.paused
    bench.unavailable(1, lines=1)
    assert bench.breaker.paused
    assert bench.breaker.seconds_to_probe == 2.0


@pytest.mark.rule("D3", "Patience ends the pause, and faults count again.")
@pytest.mark.rule("D3", "What fails while an upstream is paused spends nothing.")
def test_patience_ends_the_pause() -> None:
    """D3: after it faults count again, however many there are, until the first real answer."""
    bench = paused(patience=100.0)
    bench.probes(99)
    assert bench.breaker.paused
    assert bench.forgiven() == EVERYTHING
    bench.clock.advance(100)
    assert bench.starts()
    assert not bench.breaker.paused
    assert bench.forgiven() == set()
    bench.unavailable(100, lines=10)
    bench.breaker.on_crash()
    assert not bench.breaker.paused
    bench.breaker.on_real_answers()
    bench.unavailable(16, lines=4)
    assert bench.breaker.paused


@pytest.mark.rule("D3", "Lines that fail alone pause the upstream for half a minute at most.")
def test_lines_that_fail_alone_pause_for_a_short_time_and_then_no_more() -> None:
    bench = Bench()
    for line in range(16):
        bench.fault(line, fails_alone=True)
    assert bench.breaker.paused
    bench.clock.advance(29.9)
    bench.breaker.end_pause_if_overdue()
    assert bench.breaker.paused
    bench.clock.advance(0.1)
    bench.breaker.end_pause_if_overdue()
    assert (bench.breaker.paused, bench.breaker.flowing, bench.forgiven()) == (False, True, set())
    for line in range(100):
        bench.fault(line, fails_alone=True)
    assert not bench.breaker.paused
    bench.unavailable(16, lines=4)
    assert bench.breaker.paused, "faults of other lines count as ever"


@pytest.mark.parametrize(("alone", "is_short"), [(11, False), (12, True)])
def test_a_pause_is_short_only_if_most_of_its_lines_fail_alone(alone: int, is_short: bool) -> None:
    """D3: the others may have failed first when no line was left that could be answered."""
    bench = Bench()
    for line in range(16):
        bench.fault(line, fails_alone=line < alone, fails_first=line >= alone)
    bench.fault("probe", fails_alone=False)
    bench.clock.advance(60.0)
    bench.breaker.end_pause_if_overdue()
    assert bench.breaker.paused != is_short


def test_a_pause_is_long_if_a_line_fails_in_it_that_never_failed_before() -> None:
    bench = Bench()
    for line in range(16):
        bench.fault(line, fails_alone=True)
    bench.fault("probe", fails_first=True)
    bench.clock.advance(60.0)
    bench.breaker.end_pause_if_overdue()
    assert bench.breaker.paused


def test_lines_that_fail_alone_count_again_after_ten_minutes() -> None:
    bench = Bench()
    for seconds in (0.0, 30.0, 600.0):
        bench.clock.advance(seconds)
        bench.breaker.end_pause_if_overdue()
        for line in range(16):
            bench.fault(line, fails_alone=True)
        assert bench.breaker.paused == (seconds != 30.0)


def test_patience_is_for_each_pause() -> None:
    """D3: an upstream that came back in between is waited for anew."""
    bench = paused(patience=100.0)
    bench.clock.advance(90)
    bench.breaker.on_real_answers()
    bench.clock.advance(60)
    bench.unavailable(16, lines=4)
    bench.clock.advance(90)
    bench.starts()
    assert bench.breaker.paused


def test_no_patience_is_no_pause() -> None:
    """F2: a patience of nothing is a setting."""
    bench = paused(patience=0.0)
    assert all(bench.starts() for _ in range(9))
    assert bench.forgiven() == set()


def test_a_crash_pauses_at_once() -> None:
    """D5: whatever ran must not run into the restart."""
    bench = Bench()
    bench.breaker.on_crash()
    assert bench.breaker.paused
    assert not bench.starts()
    bench.breaker.on_real_answers()
    assert not bench.breaker.paused


def test_after_a_crash_only_a_refused_connection_is_forgiven() -> None:
    """D3, D5: lines spend nothing on an upstream that is not there; what breaks it again, or is told to come later by
    it, does."""
    bench = Bench()
    assert bench.forgiven() == set()
    bench.breaker.on_crash()
    assert bench.forgiven() == {"refused"}
    bench.unavailable(16, lines=4)
    assert bench.forgiven() == EVERYTHING, "it is unavailable and did not crash, so no line caused it"


@pytest.mark.rule("D3", "An upstream that says 429 after a crash is back.")
def test_an_upstream_that_asks_for_patience_has_not_crashed() -> None:
    """D3, D5: after a crash a 429 ends the pause, or its lines would be sent one by one at the pace of probes. In an
    outage it does not: that may be all that is left of the upstream."""
    bench = Bench()
    bench.breaker.on_crash()
    bench.fault("line", "http_503")
    assert bench.breaker.paused, "a proxy answers like this while the upstream starts again"
    bench.fault("line", "http_429", throttled=True)
    assert not bench.breaker.paused
    assert bench.reasons() == set()
    bench.unavailable(16, lines=4)
    bench.fault("line", "http_429", throttled=True)
    assert bench.breaker.paused


def test_an_outage_is_no_crash() -> None:
    """D3: not even when the pause before it was one."""
    bench = Bench()
    bench.breaker.on_crash()
    bench.breaker.on_real_answers()
    bench.unavailable(64, lines=4)
    assert bench.forgiven() == EVERYTHING


@pytest.mark.rule("D3", "Why it is paused stands in the metrics.")
def test_the_reason_stands_in_the_metrics_while_it_lasts() -> None:
    """D3."""
    bench = Bench(patience=50)
    assert bench.reasons() == set()
    bench.unavailable(16, lines=4)
    assert bench.reasons() == {"refused"}
    bench.breaker.on_real_answers()
    assert bench.reasons() == set()
    bench.breaker.on_crash()
    assert bench.reasons() == {"crashed"}
    bench.clock.advance(50)
    bench.starts()
    assert bench.reasons() == set()


def test_the_log_tells_of_the_pause_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """D3: once each, not once an answer."""
    caplog.set_level("INFO", "batchline")
    bench = paused()
    bench.unavailable(20, lines=4)
    bench.breaker.on_real_answers()
    bench.breaker.on_real_answers()
    assert [record.getMessage() for record in caplog.records] == [
        "upstream unavailable, pausing dispatch",
        "upstream available again, resuming dispatch",
    ]
    assert vars(caplog.records[0])["reason"] == "refused"


@pytest.mark.parametrize("status", [401, 403])
def test_the_log_says_what_to_check_if_the_credentials_are_wrong(caplog: pytest.LogCaptureFixture, status: int) -> None:
    """D3: nobody else can end this pause."""
    bench = Bench()
    for line in range(16):
        bench.fault(line, f"http_{status}")
    (record,) = caplog.records
    assert "check its API key" in record.getMessage()
    assert bench.reasons() == {f"http_{status}"}


@pytest.mark.rule("D3", "After a pause the next one, within a minute, needs four times as many answers.")
def test_soon_after_a_pause_the_next_one_needs_four_times_as_many_answers() -> None:
    """D3: the upstream answers now and then, and each pause costs its lines the time until the next probe."""
    bench = Bench()
    for needed in (16, 64, 256, 1024, 1024):
        bench.unavailable(needed - 1, lines=5)
        assert not bench.breaker.paused
        bench.unavailable(1, lines=1)
        assert bench.breaker.paused
        bench.breaker.on_real_answers()
        bench.clock.advance(59)
    bench.clock.advance(1)
    bench.unavailable(16, lines=5)
    assert bench.breaker.paused, "a minute after the last pause"


@pytest.mark.rule("D3", "The probes come from each waiting project and model in turn.")
def test_the_one_that_waits_longest_is_probed_next() -> None:
    bench, lanes = paused(), [("a", "m"), ("a", "n"), ("b", "m")]
    probed = []
    for _ in range(7):
        bench.clock.advance(bench.breaker.seconds_to_probe)
        lane = bench.breaker.next_lane(lanes)
        assert lane is not None
        bench.breaker.begin_probe(lane, lane)
        bench.fault(lane)
        probed.append(lane)
        bench.clock.advance(0.1)
        assert bench.breaker.next_lane(lanes[:2]) is None, "it is not time"
    assert probed[:3] == lanes
    assert probed == [*lanes, *lanes, lanes[0]]


def test_who_was_not_probed_yet_waits_half_a_second_and_not_for_the_next_regular_probe() -> None:
    """D3: the others may be refused for what they send, and then probes are rare."""
    bench = paused()
    assert bench.breaker.next_lane([LANE, ("b", "m")]) is None, "nobody is probed before the first probe is due"
    bench.probes(100)
    bench.clock.advance(bench.breaker.seconds_to_probe)
    assert bench.starts()
    bench.clock.advance(0.4)
    assert bench.breaker.next_lane([LANE, ("b", "m")]) is None
    bench.clock.advance(0.1)
    assert bench.breaker.next_lane([LANE]) is None
    assert bench.breaker.next_lane([LANE, ("b", "m")]) == ("b", "m")


def test_a_new_pause_forgets_who_was_probed() -> None:
    bench = paused()
    bench.clock.advance(2)
    bench.starts()
    bench.breaker.on_real_answers()
    bench.unavailable(64, lines=4)
    bench.clock.advance(bench.breaker.seconds_to_probe)
    assert bench.breaker.next_lane([LANE]) == LANE


def test_429s_pause_only_after_a_second() -> None:
    """D3: in the first second the limiter learns from them what the upstream accepts."""
    bench = Bench()
    for line in range(32):
        bench.fault(line, throttled=True)
    assert not bench.breaker.paused
    bench.clock.advance(1.0)
    bench.fault(32, throttled=True)
    assert bench.breaker.paused


class Models:
    """The circuit breakers of an upstream and its models."""

    def __init__(self, *, patience: float = PATIENCE) -> None:
        self.clock, self.metrics = SettableClock(), Metrics()
        self.breakers = Breakers(
            "gpu", clock=self.clock, random=ChosenRandom(), patience_seconds=patience, metrics=self.metrics
        )

    def unavailable(self, *models: str, answers: int = 16) -> None:
        for _ in range(answers):
            for model in models:
                self.fault(model, "refused")

    def fault(self, model: str, kind: str, *, last_attempt: bool = False) -> None:
        """Report a fault of a new line."""
        (job,) = make_jobs(1, model=model)
        fault = Retryable(kind, "It is gone.", unavailable=True)
        self.breakers.on_unavailable(job, fault, last_attempt=last_attempt)

    def pauses(self) -> set[str | None]:
        """The models that are paused; None stands for the whole upstream."""
        return {pause.model for pause in self.breakers.pauses}


@pytest.mark.rule("D3", "If other models of an upstream answer, only the unavailable one is paused.")
def test_a_model_is_paused_alone_if_others_answer() -> None:
    scene = Models()
    for _ in range(16):
        scene.fault("gone", "http_503")
        scene.breakers.on_real_answers("there")
    assert scene.pauses() == {"gone"}
    assert [scene.breakers.is_paused(model) for model in ("gone", "there", "new")] == [True, False, False]
    assert [scene.breakers.forgives(model, "http_503") for model in ("gone", "there")] == [True, False]
    (pause,) = scene.breakers.pauses
    assert pause == Pause(upstream="gpu", model="gone", detail="http_503", since=int(scene.clock.now()))
    scene.breakers.on_real_answers("gone")
    assert scene.pauses() == set()


def test_the_whole_upstream_is_paused_if_no_model_answers() -> None:
    """D3: and the pause is shown once, though each of its models is unavailable."""
    scene = Models()
    scene.unavailable("a", "b")
    assert scene.pauses() == {None}
    assert scene.breakers.paused
    assert all(scene.breakers.is_paused(model) for model in ("a", "b", "new"))


def test_an_answer_of_one_model_leaves_the_others_paused_that_had_none() -> None:
    """D3: they were as unavailable as the whole upstream seemed to be. The answer of each ends its own pause."""
    scene = Models()
    scene.unavailable("a", "b")
    scene.unavailable("seldom", answers=3)
    scene.breakers.on_real_answers("a")
    assert scene.pauses() == {"b"}
    scene.breakers.on_real_answers("b")
    assert scene.pauses() == set()


def test_patience_with_an_upstream_is_not_followed_by_patience_with_its_models() -> None:
    """D3: after it faults count again, whatever they are about."""
    scene = Models(patience=100)
    scene.unavailable("a", "b")
    scene.clock.advance(100)
    scene.breakers.end_overdue_pauses()
    scene.unavailable("a", "b", answers=100)
    assert scene.pauses() == set()
    assert not scene.breakers.forgives("a", "refused")
    scene.breakers.on_real_answers("b")
    scene.unavailable("b")
    assert scene.pauses() == {None}


def test_a_single_model_is_paused_no_more_easily_than_its_upstream() -> None:
    """D3: what is known of an upstream that answers now and then holds for its models too."""
    scene = Models()
    scene.unavailable("m")
    scene.breakers.on_real_answers("m")
    scene.unavailable("m", answers=63)
    assert scene.pauses() == set()
    scene.unavailable("m", answers=1)
    assert scene.pauses() == {None}


@pytest.mark.rule(
    "D3", "No line fails for good while the last 16 answers were all faults, however often it was paused."
)
def test_before_a_line_fails_sixteen_answers_are_enough() -> None:
    """D3: an upstream that is gone soon after a pause must not fail the few lines that a worker holds."""
    scene = Models()
    scene.unavailable("m")
    scene.breakers.on_real_answers("m")
    scene.unavailable("m", answers=14)
    for paused in (False, True):
        scene.fault("m", "refused", last_attempt=True)
        assert scene.breakers.forgives("m", "refused") is paused


def test_the_metrics_name_the_model_that_is_paused() -> None:
    """D3."""
    scene = Models()
    for _ in range(16):
        scene.fault("gone", "http_503")
        scene.breakers.on_real_answers("there")
    family = next(one for one in scene.metrics.registry.collect() if one.name == "batchline_upstream_paused")
    (sample,) = family.samples
    assert sample.labels == {"upstream": "gpu", "model": "gone", "reason": "http_503"}


def test_models_with_a_fault_now_and_then_do_not_fill_the_memory() -> None:
    """A file may name another model in each line. A model that is paused is not forgotten."""
    scene = Models()
    for _ in range(16):
        scene.fault("gone", "http_503")
        scene.breakers.on_real_answers("there")
    for line in range(3000):
        scene.fault(f"name-{line}", "http_503")
        scene.breakers.on_real_answers("there")
    assert scene.pauses() == {"gone"}
    assert len(scene.breakers._models) <= 1000
