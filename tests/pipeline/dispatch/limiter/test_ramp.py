"""With which limit a ramp goes on, and with which it ends (D9)."""

from batchline.pipeline.dispatch.limiter.latencies import Latencies
from batchline.pipeline.dispatch.limiter.ramp import Descent, Found, Ramp, Unfinished
from batchline.pipeline.dispatch.limiter.rounds import HOLD_PART, Measure, Round


class Upstream:
    """Gives a ramp complete rounds."""

    def __init__(self) -> None:
        self.latencies = Latencies()
        self.ramp = Ramp(self.latencies)

    def consider(self, limit: int, *latencies: float, seconds: float) -> int | Found | Unfinished:
        """Complete a round whose requests have these latencies in turn.

        They start together, or with all slots taken if the limit is measured a second time.
        """
        again = self.ramp.is_again
        round_ = Round(limit, size=limit, full=again, part=0.6, since=0.0)
        for number in range(1, limit + 1):
            in_flight = limit if again else number
            round_.add("m", in_flight, 0.0)
            round_.end("m", in_flight, in_flight, latencies[number % len(latencies)])
        round_.extend(HOLD_PART)
        round_.scale(self.latencies.usual)
        measure = round_.measure
        self.latencies.add(round_, measure)
        return self.ramp.consider(round_, measure, seconds, cap=1024, least=1)


def test_a_ramp_ends_where_more_in_flight_bring_little() -> None:
    upstream = Upstream()
    assert upstream.consider(32, 0.1, seconds=0.1) == 128
    assert upstream.consider(128, 0.4, seconds=0.4) == Found(32, Descent.FAR)


def test_a_limit_that_was_measured_twice_is_compared_with_the_next_one() -> None:
    """The round before, whose latencies were even, is measured again only as long as it is the last one."""
    upstream = Upstream()
    assert upstream.consider(32, 0.1, seconds=0.1) == 128
    uneven = (0.05, 0.15)
    assert upstream.consider(128, *uneven, seconds=0.2) is Unfinished.REPEAT
    assert upstream.consider(128, *uneven, seconds=0.2) == 512
    found = upstream.consider(512, *(4 * latency for latency in uneven), seconds=2.0)
    assert found == Found(128, Descent.NEAR), "512 in flight bring as much as 128"


def test_a_climb_is_not_compared_with_the_rounds_of_an_earlier_ramp() -> None:
    """The upstream has changed since. Latencies are multiples of the usual 0.1 s."""
    upstream = Upstream()
    assert upstream.consider(32, 0.1, seconds=0.1) == 128
    assert upstream.ramp.climb(Measure(64, [(64.0, 5.0)] * 64)) == 96
    assert upstream.consider(96, 0.5, 1.0, seconds=2.0) == Found(64, Descent.FAR), "96 in flight bring as much as 64"


def test_the_first_limit_is_not_measured_twice_while_slots_may_be_free() -> None:
    upstream = Upstream()
    assert upstream.consider(32, 0.05, 0.05, 0.05, 0.8, seconds=0.8) == 128


def test_a_low_limit_that_may_seem_good_by_chance_is_not_held() -> None:
    """A few requests of 32 took very long, so nobody knows how long they take on average."""
    upstream = Upstream()
    uneven = (*[0.05] * 31, 3.2)
    assert upstream.consider(32, *uneven, seconds=3.2) == 128
    found = upstream.consider(128, *(4 * latency for latency in uneven), seconds=12.8)
    assert found == Found(128, Descent.FAR)
    sure = Upstream()
    assert sure.consider(32, 0.14, 0.16, seconds=3.2) == 128
    assert sure.consider(128, 0.56, 0.64, seconds=12.8) == Found(32, Descent.FAR)
