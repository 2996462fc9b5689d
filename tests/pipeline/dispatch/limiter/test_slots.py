"""As many requests in flight on average as a limit says, which may be a fraction."""

from math import inf

import pytest

from batchline.pipeline.dispatch.limiter.slots import Slots

LATENCY_SECONDS = 1.0


def slots(limit: float, *, latency: float = LATENCY_SECONDS) -> Slots:
    made = Slots()
    made.on_answers([latency])
    made.set_limit(limit)
    return made


def fill(made: Slots, now: float) -> int:
    """Start as many as may be in flight, one after another, with long pauses, and return how many there are."""
    in_flight = 0
    while made.free(in_flight, now) > 0:
        in_flight += 1
        made.on_start(now, 1, in_flight)
        now += 100.0
    return in_flight


def test_as_many_may_start_as_slots_are_free() -> None:
    made = slots(8)
    assert made.free(3, 0.0) == 5
    assert made.free(8, 0.0) == 0
    assert made.free(12, 0.0) < 0


def test_starts_are_spaced_more_evenly_after_refusals_and_less_so_when_there_are_none() -> None:
    """Some upstreams refuse any two that come sooner after each other than their rate allows."""

    def next_start(made: Slots) -> float:
        made.on_start(100.0, 1, 1)
        return made.next_free(1, 100.0) - 100.0

    made = slots(10)
    usual = next_start(made)
    assert usual == pytest.approx(LATENCY_SECONDS / 20)
    for _ in range(10):
        made.slow_down()
    assert next_start(made) == pytest.approx(LATENCY_SECONDS / 10.5)
    for _ in range(100):
        made.speed_up()
    assert next_start(made) == pytest.approx(usual)


def test_a_fraction_is_kept_on_average() -> None:
    made, numbers = slots(7.3), []
    for _ in range(1000):
        numbers.append(7 + made.free(7, 1e6))
        made.on_start(0.0, 1, 8)
    assert set(numbers) == {7, 8}
    assert sum(numbers) / 1000 == pytest.approx(7.3, abs=0.01)


def test_below_one_starts_are_spaced_by_time() -> None:
    """With 0.25 in flight and answers after a second, one starts every four seconds."""
    made = slots(0.25)
    assert made.free(0, 0.0) == 1
    made.on_start(0.0, 1, 1)
    assert (made.free(0, 3.9), made.free(0, 4.0)) == (0, 1)
    assert made.next_free(0, 1.0) == 4.0
    assert (made.free(1, 100.0), made.next_free(1, 100.0)) == (0, inf)


@pytest.mark.rule("D9", "Slots that are free at once are not taken at once, since that would be a burst.")
def test_starts_follow_each_other_at_twice_the_mean_rate_at_most() -> None:
    """With 10 in flight for a second each, 20 start in a second at most."""
    made = slots(10)
    made.on_start(0.0, 1, 1)
    assert [made.free(1, now) for now in (0.0, 0.049, 0.05, 0.1, 0.3, 9.0)] == [0, 0, 1, 2, 6, 9]
    assert made.next_free(1, 0.0) == 0.05


def test_slots_are_full_if_the_limit_is_reached_and_not_while_starts_are_spaced() -> None:
    """Only then may more be tried."""
    made = slots(10)
    made.on_start(0.0, 1, 1)
    assert (made.free(1, 0.0), made.is_full(1, 0.0), made.is_full(10, 0.0)) == (0, False, True)
    made = slots(0.25)
    made.on_start(0.0, 1, 1)
    assert (made.is_full(0, 1.0), made.is_full(0, 4.0)) == (True, False)


def test_a_refused_request_takes_its_slot_as_long_as_an_answer() -> None:
    """Otherwise the next one would start at once, and the limit would not limit the rate."""
    made = slots(2)
    made.on_start(0.0, 2, 2)
    made.on_refusal(0.0)
    assert made.free(1, 0.9) == 0
    assert made.next_free(1, 0.9) == LATENCY_SECONDS
    assert made.free(1, 1.0) == 1


def test_a_new_limit_forgets_what_was_refused_before() -> None:
    made = slots(2)
    made.on_start(0.0, 2, 2)
    made.on_refusal(0.0)
    assert made.most_taken == 2
    made.set_limit(4)
    assert (made.free(1, 0.9), made.most_taken) == (3, 0)


def test_refused_requests_count_as_taken() -> None:
    made = slots(4)
    made.on_start(0.0, 2, 2)
    made.on_refusal(0.0)
    made.on_start(0.5, 2, 3)
    assert (made.most_taken, made.started) == (4, 4)


def test_one_must_end_first_if_all_slots_are_in_use() -> None:
    made = slots(2)
    made.on_start(0.0, 2, 2)
    assert made.next_free(2, 0.5) == inf


def test_the_latency_is_that_of_the_last_answers() -> None:
    made = Slots()
    assert made.latency_seconds == 0.0
    assert made.usual_seconds > 0
    made.on_answers([2.0])
    assert made.usual_seconds == made.latency_seconds == 2.0
    for _ in range(200):
        made.on_answers([4.0])
    assert made.usual_seconds == pytest.approx(4.0, abs=0.02)


@pytest.mark.parametrize("limit", [1, 5, 64])
def test_no_more_than_the_limit_are_in_flight(limit: int) -> None:
    assert fill(slots(limit), 0.0) == limit


def test_evenly_spaced_starts_come_one_by_one_however_many_are_in_flight() -> None:
    made = slots(10)
    made.space_evenly()
    made.on_start(100.0, 1, 50)
    assert made.next_free(50, 100.0) == pytest.approx(100.0 + LATENCY_SECONDS / 10)
    assert made.free(50, 100.0 + 0.9 * LATENCY_SECONDS / 10) == 0
    assert made.is_full(50, 100.0)
    assert made.free(50, 200.0) == 1


def test_even_spaces_do_not_follow_the_latency() -> None:
    """A limit on the rate has nothing to do with how long answers take."""
    made = slots(10)
    made.space_evenly()
    for _ in range(100):
        made.on_answers([5 * LATENCY_SECONDS])
    made.on_start(100.0, 1, 1)
    assert made.next_free(1, 100.0) == pytest.approx(100.0 + LATENCY_SECONDS / 10)
    made.space_freely()
    assert made.free(3, 200.0) == 7


def test_a_refused_start_takes_no_space_of_a_later_one() -> None:
    made = slots(10)
    made.space_evenly()
    made.on_start(100.0, 1, 1)
    made.on_refusal(100.0)
    assert made.free(0, 100.0 + LATENCY_SECONDS / 10) == 1


def test_timers_that_are_late_do_not_lower_the_rate() -> None:
    """With 5 ms between two starts and a timer every 7 ms, every second or third time two start."""
    made, counts = slots(10, latency=0.1), list[int]()
    made.on_start(0.0, 1, 1)
    for tick in range(1, 101):
        counts.append(made.free(1, 0.007 * tick))
        made.on_start(0.007 * tick, counts[-1], 1)
    assert set(counts) == {1, 2}
    assert sum(counts) == pytest.approx(100 * 7 / 5, abs=1)


def test_evenly_spaced_starts_do_not_catch_up() -> None:
    """An upstream that wants them even refuses those that come too soon."""
    made = slots(10, latency=0.1)
    made.space_evenly()
    made.on_start(0.0, 1, 1)
    made.on_start(0.019, 1, 1)
    assert made.next_free(1, 0.019) == pytest.approx(0.029)
