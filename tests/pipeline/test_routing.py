"""Which upstream takes the next synchronous call, and how many calls it has."""

import pytest

from batchline.pipeline.routing import SyncRouter
from tests.support.clocks import SettableClock

BOTH = ("first", "second")


def test_the_upstream_with_the_fewest_calls_is_chosen() -> None:
    router = SyncRouter(clock=SettableClock())
    assert router.choose(BOTH) == "first"
    with router.call("first", "p"):
        assert router.choose(BOTH) == "second"
        with router.call("second", "p"), router.call("second", "p"):
            assert router.choose(BOTH) == "first"
    assert [router.calls(name).total for name in BOTH] == [0, 0]


def test_calls_are_counted_by_project() -> None:
    router = SyncRouter(clock=SettableClock())
    calls = router.calls("first")
    with router.call("first", "p"), router.call("first", "p"), router.call("first", "q"):
        assert (calls.total, calls.by_project) == (3, {"p": 2, "q": 1})
    assert (calls.total, calls.by_project) == (0, {})


def test_an_upstream_that_failed_is_avoided_for_ten_seconds() -> None:
    """Even if the other is busier; but if all failed, the least busy one is tried."""
    clock = SettableClock()
    router = SyncRouter(clock=clock)
    router.on_failure("first")
    with router.call("second", "p"):
        assert router.choose(BOTH) == "second"
        router.on_failure("second")
        assert router.choose(BOTH) == "first"
        clock.advance(10)
        assert router.choose(BOTH) == "first"
    assert router.choose(("first",)) == "first"


def test_the_end_of_a_call_is_reported_once_it_is_counted() -> None:
    """The dispatcher starts a line in the slot that is free again; a call that fails frees it too."""
    router = SyncRouter(clock=SettableClock())
    left: list[int] = []
    router.watch("first", on_call_ended=lambda: left.append(router.calls("first").total), on_answer=lambda _: None)
    with router.call("second", "p"):
        pass
    assert left == []
    with pytest.raises(ZeroDivisionError), router.call("first", "p"), router.call("first", "p"):
        print(1 / 0)
    assert left == [1, 0]


def test_an_answer_is_reported_with_its_model_to_who_watches_the_upstream() -> None:
    """D3: it ends a pause of the upstream, and nobody need watch one."""
    router, answered = SyncRouter(clock=SettableClock()), list[str]()
    router.watch("first", on_call_ended=lambda: None, on_answer=answered.append)
    router.on_answer("first", "m")
    router.on_answer("second", "n")
    assert answered == ["m"]
