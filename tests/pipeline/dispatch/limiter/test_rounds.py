"""The throughput of an upstream, measured by rounds of requests."""

from heapq import heapify, heappop, heappush
from itertools import pairwise

import pytest

from batchline.pipeline.dispatch.limiter.rounds import Measure, Round


def complete(round_: Round, answers: list[tuple[int, float]], *, answered: int | None = None) -> bool:
    """Put requests into a round and answer the first of them, or all; return whether the round is complete then."""
    added = [answer for answer in answers if round_.add("m", answer[0], 0.0)]
    complete = [round_.end("m", answer[0], answer[0], answer[1]) for answer in added[:answered]][-1]
    round_.scale({"m": 1.0})
    return complete


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
    round_ = Round(10, size=10, full=False, part=0.6, since=0.0)
    assert all(round_.add("m", number, 0.0) for number in range(1, 11))
    assert [round_.end("m", number, number, 1.0) for number in range(1, 7)] == [False] * 5 + [True]


def test_only_so_many_belong_to_a_round() -> None:
    round_ = Round(4, size=4, full=False, part=1.0, since=0.0)
    assert [round_.add("m", 1, 0.0) for _ in range(6)] == [True] * 4 + [False] * 2


def test_what_started_beside_free_slots_shows_nothing_about_the_limit() -> None:
    round_ = Round(100, size=8, full=True, part=1.0, since=0.0)
    assert not round_.add("m", 50, 0.0)
    assert round_.add("m", 95, 0.0)


def test_a_request_without_an_answer_makes_place_for_another() -> None:
    round_ = Round(2, size=2, full=False, part=1.0, since=0.0)
    assert complete(round_, [(1, 1.0)]) is False
    assert round_.add("m", 2, 0.0)
    round_.remove("m")
    assert round_.add("m", 2, 0.0)
    assert round_.end("m", 2, 2, 1.0)


def test_a_round_is_overtaken_by_answers_to_twice_as_many_that_started_after_it() -> None:
    """Its own requests are those of a slow model then. Answers to requests from before it say nothing."""
    round_ = Round(4, size=4, full=False, part=0.6, since=0.0)
    assert all(round_.add("m", number, 1.0) for number in range(1, 4))
    assert not any(round_.overtake(2.0) for _ in range(99)), "more may start"
    assert round_.add("m", 4, 3.0)
    assert not any(round_.overtake(2.0) for _ in range(99))
    assert [round_.overtake(3.5) for _ in range(8)] == [False] * 7 + [True]


def test_a_limit_that_was_not_reached_was_not_measured() -> None:
    idle, busy = (Round(100, size=8, full=False, part=1.0, since=0.0) for _ in range(2))
    complete(idle, [(10, 1.0)] * 8)
    complete(busy, [(number, 1.0) for number in range(93, 101)])
    assert (idle.is_used, busy.is_used) == (False, True)


def test_requests_that_queue_take_longer_the_later_they_start() -> None:
    """An upstream that shares its capacity lets all of them take as long."""
    queued, shared, equal = (Round(32, size=32, full=False, part=1.0, since=0.0) for _ in range(3))
    complete(queued, [(number, 0.1 * number) for number in range(1, 33)])
    complete(shared, [(number, 1.0 + 0.5 * (number % 2)) for number in range(1, 33)])
    complete(equal, [(number, 1.0) for number in range(1, 33)])
    assert queued.correlation > 0.99
    assert abs(shared.correlation) < 0.1
    assert equal.correlation == 0.0


def test_of_requests_that_queued_the_last_ones_show_the_throughput() -> None:
    """The first ones found free slots and were quick, with few beside them."""
    round_ = Round(32, size=32, full=False, part=1.0, since=0.0)
    complete(round_, [(number, 0.2 * -(-number // 4)) for number in range(1, 33)])
    assert round_.last_measure.rate == pytest.approx(20.0, rel=0.05)
    assert round_.last_measure.load > round_.measure.load


@pytest.mark.parametrize("limit", [32, 128])
def test_an_engine_that_answers_in_waves_seems_as_fast_at_any_limit(limit: int) -> None:
    """A part of a wave seems slow, and the more so the fewer waves there are: a higher limit would seem better."""
    round_ = Round(limit, size=limit, full=False, part=0.6, since=0.0)
    waves = [(number, 0.2 * -(-number // 16)) for number in range(1, limit + 1)]
    assert complete(round_, waves, answered=int(0.6 * limit) + 1)
    assert round_.last_measure.rate == pytest.approx(80.0, rel=0.02)


Requests = tuple[int, int, float]
"""The number of requests of a model, how many of the model were in flight when they started, and their latency."""


def round_of(models: dict[str, Requests], usual: dict[str, float]) -> Round:
    """Return a complete round of requests, measured by what is usual."""
    in_flight = sum(of_model for _, of_model, _ in models.values())
    requests = [
        (model, of_model, latency) for model, (number, of_model, latency) in models.items() for _ in range(number)
    ]
    round_ = Round(in_flight, size=len(requests), full=False, part=1.0, since=0.0)
    for model, _, _ in requests:
        round_.add(model, in_flight, 0.0)
    for model, of_model, latency in requests:
        round_.end(model, in_flight, of_model, latency)
    round_.scale(usual)
    return round_


def test_two_models_of_unequal_speed_in_one_round_show_the_same_throughput_whatever_their_parts() -> None:
    """Otherwise a round with more requests of the slow model would seem to be slower."""
    usual = dict[str, float]()
    even = round_of({"quick": (10, 5, 0.1), "slow": (10, 5, 2.0)}, usual).measure
    assert usual == pytest.approx({"quick": 0.1, "slow": 2.0})
    quick = round_of({"quick": (19, 5, 0.1), "slow": (1, 5, 2.0)}, usual).measure
    assert quick.rate == pytest.approx(even.rate)
    assert quick.variation == pytest.approx(0.0)


def test_a_model_that_takes_twice_as_long_as_usual_is_slower() -> None:
    usual = dict[str, float]()
    before = round_of({"quick": (10, 5, 0.1), "slow": (10, 5, 2.0)}, usual).measure
    after = round_of({"quick": (10, 5, 0.2), "slow": (10, 5, 4.0)}, usual).measure
    assert after.rate == pytest.approx(before.rate / 2)


def test_a_model_that_queues_does_not_hide_that_another_has_room_for_more() -> None:
    """With four times as many in flight, one answers as many as before, and the other four times as many."""
    usual = dict[str, float]()
    few = round_of({"queues": (16, 16, 1.0), "free": (16, 16, 1.0)}, usual).measure
    many = round_of({"queues": (64, 64, 4.0), "free": (64, 64, 1.0)}, usual).measure
    assert (few.rate, many.rate) == pytest.approx((16.0 + 16.0, 16.0 + 64.0))
    assert many.load == 128
    assert many.variation == pytest.approx(0.0)


def test_a_round_waits_for_the_model_that_has_half_of_the_requests_in_flight() -> None:
    """It has few of the starts if its answers take long, and the quick answers alone would show nothing about it."""
    round_ = Round(20, size=20, full=False, part=0.6, since=0.0)
    for number in range(20):
        round_.add("slow" if number % 10 == 0 else "quick", 20, 0.0)
    assert not any(round_.end("quick", 20, 10, 0.1) for _ in range(18))
    assert [round_.end("slow", 20, 10, 2.0) for _ in range(2)] == [False, True]


def test_a_round_does_not_wait_for_a_model_that_has_hardly_any_requests_in_flight() -> None:
    round_ = Round(20, size=20, full=False, part=0.6, since=0.0)
    for number in range(20):
        round_.add("slow" if number == 0 else "quick", 20, 0.0)
    assert [round_.end("quick", 20, 19, 0.1) for _ in range(12)] == [False] * 11 + [True]


def test_what_starts_beside_the_requests_of_a_higher_limit_shows_nothing_about_the_limit() -> None:
    round_ = Round(20, size=8, full=True, part=1.0, since=0.0)
    assert [round_.add("m", in_flight, 0.0) for in_flight in (40, 24, 23, 20)] == [False, False, True, True]


def test_a_round_is_unused_if_too_few_are_in_flight_for_long() -> None:
    round_ = Round(100, size=4, full=True, part=1.0, since=0.0)
    for unused in [False] * 4 + [True]:
        assert not round_.add("m", 50, 0.0)
        assert round_.is_unused is unused


def test_what_is_usual_is_remembered_for_so_many_models_only() -> None:
    usual = {f"model {number}": 1.0 for number in range(5000)}
    round_of({"m": (10, 10, 0.1)}, usual)
    assert usual == pytest.approx({"m": 0.1})


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
    round_ = Round(32, size=32, full=True, part=1.0, since=0.0)
    assert complete(round_, [(32, latency) for _, latency in answers])
    assert round_.measure.rate == pytest.approx(16.0)
    assert round_.measure.error < 0.01
