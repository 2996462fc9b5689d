"""The shares of a cap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchline.domain.fleet import share_of


@given(
    cap=st.integers(0, 40),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(0, 3)), max_size=60),
)
def test_whoever_comes_and_goes_the_cap_holds(cap: int, steps: list[tuple[int, int, int]]) -> None:
    """F2: what may be in flight to an upstream, and what still is after a share became smaller, is never over its cap:
    no worker gets slots that another still uses."""
    allowed: dict[str, int] = {}
    reserved: dict[str, int] = {}
    in_flight: dict[str, int] = {}
    for n, wanted, sync_calls in steps:
        owner = f"worker {n}"
        # It may have started as many as it was allowed, and those from before may not have ended.
        in_flight[owner] = min(wanted, max(allowed.get(owner, 0), in_flight.get(owner, 0)))
        share = share_of(
            cap,
            workers=sorted({*allowed, owner}),
            owner=owner,
            in_flight=in_flight[owner],
            reserved_by_others=sum(slots for other, slots in reserved.items() if other != owner),
            sync_calls=sync_calls,
        )
        allowed[owner], reserved[owner] = share.allowed, share.reserved
        assert sum(max(allowed[other], in_flight.get(other, 0)) for other in allowed) <= cap


def test_after_everybody_spoke_twice_shares_are_even() -> None:
    """F2: a worker that comes late gets as much as the others, give or take one."""
    shares = {"a": 10, "b": 0, "c": 0}
    for _ in range(2):
        for owner in shares:
            others = sum(slots for other, slots in shares.items() if other != owner)
            share = share_of(
                10, workers=list(shares), owner=owner, in_flight=0, reserved_by_others=others, sync_calls=0
            )
            shares[owner] = share.allowed
    assert sorted(shares.values()) == [3, 3, 4]


def test_calls_that_somebody_waits_for_leave_less() -> None:
    share = share_of(10, workers=["a", "b"], owner="a", in_flight=0, reserved_by_others=0, sync_calls=4)
    assert share.allowed == 3


@pytest.mark.rule("D8", "Calls that another process answers leave half of the slots to lines.")
@pytest.mark.parametrize(("cap", "allowed"), [(8, 4), (1, 1)])
def test_calls_leave_half_of_a_cap_however_many_they_are(cap: int, allowed: int) -> None:
    share = share_of(cap, workers=["a"], owner="a", in_flight=0, reserved_by_others=0, sync_calls=40)
    assert share.allowed == allowed
