"""When an upstream counts as unavailable, how it is probed, and which faults spend nothing (D3, D5)."""

from itertools import cycle, islice, pairwise

import pytest

from batchline.domain.progress import Pause
from batchline.pipeline.dispatch.circuit_breaker import CircuitBreaker
from batchline.telemetry.metrics import Metrics
from tests.support.clocks import ChosenRandom, SettableClock

PATIENCE = 3600.0
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
            self.breaker.on_unavailable(line, "refused")

    def starts(self) -> bool:
        """Start an attempt if one may start now, as the dispatcher does, and return whether it did."""
        self.breaker.end_pause_if_overdue()
        if self.breaker.paused and self.breaker.seconds_to_probe:
            return False
        if self.breaker.paused:
            self.breaker.begin_probe()
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
    bench.breaker.on_unavailable(15 % lines, "refused")
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
    bench.breaker.on_real_answer()
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
        bench.breaker.on_real_answer()


def test_only_the_last_sixteen_count() -> None:
    """D3: lines that were tried long ago do not make four of two."""
    bench = Bench()
    for line in ("long ago", "before", *["now"] * 15, "and now"):
        bench.breaker.on_unavailable(line, "refused")
    assert not bench.breaker.paused


def test_an_open_gate_lets_everything_through() -> None:
    bench = Bench()
    assert all(bench.starts() for _ in range(1000))


@pytest.mark.rule("D3", "A paused upstream is probed every 1 to 15 s.")
@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_probes_come_every_one_to_fifteen_seconds(chance: float) -> None:
    """D3: one at a time, less and less often, and never not at all."""
    probes = paused(chance=chance).probes(300)
    gaps = [later - earlier for earlier, later in pairwise(probes)]
    assert probes[0] == pytest.approx(1 + chance, abs=0.11)
    assert all(0.99 <= gap <= 15.1 for gap in gaps)
    assert all(later >= earlier - 0.11 for earlier, later in pairwise(gaps))
    assert gaps[-1] == pytest.approx(7.5 * (1 + chance), abs=0.11)


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
    assert bench.breaker.seconds_to_probe == 4.0


def test_gone_answers_to_probes_leave_it_paused() -> None:
    """D3: and do not bring the next probe nearer."""
    bench = paused()
    bench.clock.advance(2.0)
    assert bench.starts()
    bench.unavailable(40, lines=9)
    assert bench.breaker.paused
    assert bench.breaker.seconds_to_probe == 4.0


@pytest.mark.rule("D3", "The first real answer ends the pause.")
def test_the_first_real_answer_ends_the_pause() -> None:
    """D3: everything may start at once, and a new pause needs sixteen new answers and begins with short waits."""
    bench = paused()
    bench.probes(100)
    bench.breaker.on_real_answer()
    assert not bench.breaker.paused
    assert all(bench.starts() for _ in range(100))
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
    bench.breaker.on_real_answer()
    bench.unavailable(16, lines=4)
    assert bench.breaker.paused


def test_patience_is_for_each_pause() -> None:
    """D3: an upstream that came back in between is waited for anew."""
    bench = paused(patience=100.0)
    bench.clock.advance(90)
    bench.breaker.on_real_answer()
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
    bench.breaker.on_real_answer()
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
    bench.breaker.on_unavailable("line", "http_503")
    assert bench.breaker.paused, "a proxy answers like this while the upstream starts again"
    bench.breaker.on_unavailable("line", "http_429", throttled=True)
    assert not bench.breaker.paused
    assert bench.reasons() == set()
    bench.unavailable(16, lines=4)
    bench.breaker.on_unavailable("line", "http_429", throttled=True)
    assert bench.breaker.paused


def test_an_outage_is_no_crash() -> None:
    """D3: not even when the pause before it was one."""
    bench = Bench()
    bench.breaker.on_crash()
    bench.breaker.on_real_answer()
    bench.unavailable(16, lines=4)
    assert bench.forgiven() == EVERYTHING


@pytest.mark.rule("D3", "Why it is paused stands in the metrics.")
def test_the_reason_stands_in_the_metrics_while_it_lasts() -> None:
    """D3."""
    bench = Bench(patience=50)
    assert bench.reasons() == set()
    bench.unavailable(16, lines=4)
    assert bench.reasons() == {"refused"}
    bench.breaker.on_real_answer()
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
    bench.breaker.on_real_answer()
    bench.breaker.on_real_answer()
    assert [record.getMessage() for record in caplog.records] == [
        "upstream unavailable, pausing dispatch",
        "upstream available again, resuming dispatch",
    ]
    assert vars(caplog.records[0])["reason"] == "refused"
