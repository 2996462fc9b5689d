"""The throughput of an upstream, measured by rounds of requests."""

from heapq import heapify, heappop, heappush
from itertools import pairwise

import pytest

from batchline.pipeline.dispatch.limiter.rounds import Measure, Round


def complete(round_: Round, answers: list[tuple[int, float]]) -> bool:
    """Put requests into a round and answer all of them; return whether the round is complete then."""
    added = [answer for answer in answers if round_.add(answer[0])]
    return [round_.end(*answer) for answer in added][-1]


def test_throughput_is_what_is_in_flight_divided_by_the_latency() -> None:
    """Little's law: with 10 in flight that take 2 s each, 5 are answered in a second."""
    measure = Measure(10, [(10, 2.0)] * 20)
    assert (measure.rate, measure.load, measure.latency) == (5.0, 10.0, 2.0)
    assert measure.error == 0.0


def test_latencies_that_vary_make_a_measure_less_certain_and_more_of_them_more_certain() -> None:
    few, many = (Measure(10, [(10, 1.0), (10, 3.0)] * count) for count in (10, 1000))
    assert few.variation == many.variation == 0.5
    assert few.error == pytest.approx(10 * many.error)


def test_a_round_is_complete_when_enough_of_it_has_ended() -> None:
    """Waiting for the last of them would wait for the slowest request of all."""
    round_ = Round(10, size=10, full=False, part=0.6)
    assert all(round_.add(number) for number in range(1, 11))
    assert [round_.end(number, 1.0) for number in range(1, 7)] == [False] * 5 + [True]


def test_only_so_many_belong_to_a_round() -> None:
    round_ = Round(4, size=4, full=False, part=1.0)
    assert [round_.add(1) for _ in range(6)] == [True] * 4 + [False] * 2


def test_what_started_beside_free_slots_shows_nothing_about_the_limit() -> None:
    round_ = Round(100, size=8, full=True, part=1.0)
    assert not round_.add(50)
    assert round_.add(95)


def test_a_request_without_an_answer_makes_place_for_another() -> None:
    round_ = Round(2, size=2, full=False, part=1.0)
    assert complete(round_, [(1, 1.0)]) is False
    assert round_.add(2)
    round_.remove()
    assert round_.add(2)
    assert round_.end(2, 1.0)


def test_a_limit_that_was_not_reached_was_not_measured() -> None:
    idle, busy = (Round(100, size=8, full=False, part=1.0) for _ in range(2))
    complete(idle, [(10, 1.0)] * 8)
    complete(busy, [(number, 1.0) for number in range(93, 101)])
    assert (idle.is_used, busy.is_used) == (False, True)


def test_requests_that_queue_take_longer_the_later_they_start() -> None:
    """An upstream that shares its capacity lets all of them take as long."""
    queued, shared, equal = (Round(32, size=32, full=False, part=1.0) for _ in range(3))
    complete(queued, [(number, 0.1 * number) for number in range(1, 33)])
    complete(shared, [(number, 1.0 + 0.5 * (number % 2)) for number in range(1, 33)])
    complete(equal, [(number, 1.0) for number in range(1, 33)])
    assert queued.correlation > 0.99
    assert abs(shared.correlation) < 0.1
    assert equal.correlation == 0.0


def test_of_requests_that_queued_the_last_ones_show_the_throughput() -> None:
    """The first ones found free slots and were quick, with few beside them."""
    round_ = Round(32, size=32, full=False, part=1.0)
    complete(round_, [(number, 0.2 * -(-number // 4)) for number in range(1, 33)])
    assert round_.last_measure.rate == pytest.approx(20.0, rel=0.05)
    assert round_.last_measure.load > round_.measure.load


class Waves:
    """An engine with 16 slots that ends all of them together once a second, with a number of requests in flight."""

    def __init__(self, in_flight: int) -> None:
        self._waiting = [0.0] * in_flight
        self.answers: list[tuple[float, float]] = []
        """When each answer came, and the latency of its request."""

    def run(self, seconds: int) -> None:
        heapify(self._waiting)
        for second in range(1, seconds + 1):
            for _ in range(16):
                self.answers.append((float(second), second - heappop(self._waiting)))
            for _ in range(16):
                heappush(self._waiting, float(second))


@pytest.mark.parametrize("first", range(0, 64, 7))
def test_a_round_is_not_fooled_by_waves(first: int) -> None:
    """Wherever in a wave a round begins, it measures the 16 answers a second that all waves together have.

    Answers counted by time would show nothing in most tenths of a second, and 160 a second in the others.
    """
    engine = Waves(32)
    engine.run(30)
    answers = engine.answers[64 + first : 64 + first + 32]
    assert {later[0] - earlier[0] for earlier, later in pairwise(answers)} == {0.0, 1.0}
    round_ = Round(32, size=32, full=True, part=1.0)
    assert complete(round_, [(32, latency) for _, latency in answers])
    assert round_.measure.rate == pytest.approx(16.0)
    assert round_.measure.error < 0.01
