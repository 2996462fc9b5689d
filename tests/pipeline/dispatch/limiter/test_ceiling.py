"""How many requests of a model its upstream accepts at once, learned from refusals."""

from collections.abc import Callable

from batchline.pipeline.dispatch.limiter.ceiling import Ceiling

LATENCY_SECONDS, REFUSAL_SECONDS = 0.1, 0.002


def answer(ceiling: Ceiling, in_flight: int, now: float, *, times: int = 1) -> None:
    for _ in range(times):
        ceiling.on_answer(in_flight, started=now - LATENCY_SECONDS, now=now)


def refuse(ceiling: Ceiling, in_flight: int, now: float) -> bool:
    """Report a refusal as the limit of a model does, and return whether it was about the number."""
    started = now - REFUSAL_SECONDS
    if not ceiling.explains(in_flight, started=started):
        return False
    ceiling.on_refusal(in_flight, started=started, now=now)
    return True


def keep_full(ceiling: Ceiling, accepts: Callable[[float], int], *, since: float, until: float) -> dict[float, int]:
    """Have as many in flight as the ceiling allows, in rounds of one latency, and return the ceiling over time."""
    limits, now = dict[float, int](), since
    while now < until:
        now = round(now + LATENCY_SECONDS, 3)
        assert ceiling.limit is not None
        limits[now] = limit = ceiling.limit
        slots = accepts(now)
        answer(ceiling, min(limit, slots), now, times=min(limit, slots))
        if limit > slots:
            refuse(ceiling, limit, now)
    return limits


def test_nothing_is_held_back_while_nothing_was_refused() -> None:
    ceiling = Ceiling()
    answer(ceiling, 500, 1.0)
    assert ceiling.limit is None


def test_a_refused_number_is_too_high() -> None:
    ceiling = Ceiling()
    answer(ceiling, 8, 1.0, times=20)
    assert refuse(ceiling, 12, 1.1)
    assert ceiling.limit == 11
    assert refuse(ceiling, 9, 1.1)
    assert ceiling.limit == 8


def test_a_refusal_of_a_number_that_was_accepted_lately_is_not_about_the_number() -> None:
    """It is about the rate, then."""
    ceiling = Ceiling()
    answer(ceiling, 50, 1.0)
    assert not refuse(ceiling, 50, 1.1)
    assert not refuse(ceiling, 3, 1.1)
    assert ceiling.limit is None


def test_a_number_that_was_accepted_long_ago_may_be_refused_now() -> None:
    """The upstream may have shrunk."""
    ceiling = Ceiling()
    answer(ceiling, 50, 1.0)
    for second in range(2, 12):
        answer(ceiling, 5, float(second))
    assert refuse(ceiling, 30, 12.0)
    assert ceiling.limit == 29


def test_one_at_a_time_is_always_possible() -> None:
    """A refusal of a single request cannot be about the number."""
    ceiling = Ceiling()
    assert not refuse(ceiling, 1, 1.0)
    refuse(ceiling, 2, 1.0)
    assert ceiling.limit == 1


def test_answers_with_more_in_flight_show_that_a_refusal_was_not_about_the_number() -> None:
    """They were on their way when the refusal came."""
    ceiling = Ceiling()
    answer(ceiling, 8, 1.0)
    refuse(ceiling, 20, 1.1)
    assert ceiling.limit == 19
    for in_flight in range(40, 50):
        ceiling.on_answer(in_flight, started=1.05, now=1.2)
    assert ceiling.limit is None


def test_a_ceiling_is_found_and_kept() -> None:
    """If the upstream accepts 8 at once, it has 8, and now and then a few more are tried."""
    ceiling = Ceiling()
    answer(ceiling, 8, 0.9, times=8)
    refuse(ceiling, 9, 1.0)
    limits = keep_full(ceiling, lambda _: 8, since=1.0, until=31.0)
    later = [limit for now, limit in limits.items() if now > 3.0]
    assert min(later) == 8
    assert max(later) == 9
    assert sum(limit > 8 for limit in later) < 0.2 * len(later)


def test_a_ceiling_that_is_lifted_is_noticed() -> None:
    """Ten times as many are accepted, and used, within 5 seconds."""
    ceiling = Ceiling()
    answer(ceiling, 16, 0.9, times=16)
    refuse(ceiling, 17, 1.0)
    keep_full(ceiling, lambda _: 16, since=1.0, until=10.0)
    limits = keep_full(ceiling, lambda _: 160, since=10.0, until=20.0)
    assert max(limit for now, limit in limits.items() if now < 15.0) >= 160
    assert min(limit for now, limit in limits.items() if now > 15.0) >= 155


def test_a_refused_ceiling_can_be_forgotten() -> None:
    ceiling = Ceiling()
    refuse(ceiling, 20, 1.0)
    ceiling.reset()
    assert ceiling.limit is None
