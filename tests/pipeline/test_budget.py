"""What an organization has left, as far as a process knows (D4)."""

import pytest

from batchline.domain.estimates import FREE, Estimate
from batchline.pipeline.budget import Budget, Budgets


def budget(funds: int) -> tuple[Budgets, Budget]:
    budgets = Budgets(metered=True)
    one = budgets.of("org")
    one.update_balance(funds, read_at=budgets.sequence)
    return budgets, one


def test_it_is_spent_when_the_cost_of_answers_reaches_the_balance() -> None:
    """Even if the answers are not recorded yet."""
    _, one = budget(10)
    one.add_cost(9)
    assert not one.spent
    one.add_cost(1)
    assert one.spent


def test_the_cost_of_an_answer_that_is_not_recorded_is_removed() -> None:
    _, one = budget(10)
    one.add_cost(10)
    one.remove_cost(4)
    assert not one.spent


def test_a_record_brings_the_new_balance() -> None:
    """Other processes spend from the same balance."""
    _, one = budget(10)
    one.add_cost(3)
    with one.recording():
        pass
    one.on_recorded(3, balance=0)
    assert one.spent


@pytest.mark.rule("D4", "A balance that was read before a record is not believed after it.")
def test_a_balance_read_during_a_record_is_ignored() -> None:
    """It may or may not include the record: if it were used, an answer would count twice, or not at all."""
    budgets, one = budget(10)
    one.add_cost(8)
    before = budgets.sequence
    with one.recording():
        during = budgets.sequence
        one.update_balance(2, read_at=before)
        assert not one.spent
    one.on_recorded(8, balance=2)
    for stale in (before, during):
        one.update_balance(100, read_at=stale)
    one.add_cost(2)
    assert one.spent
    one.update_balance(100, read_at=budgets.sequence)
    assert not one.spent


def test_a_record_of_another_organization_does_not_matter() -> None:
    budgets, one = budget(0)
    before = budgets.sequence
    with budgets.of("other").recording():
        pass
    one.update_balance(5, read_at=before)
    assert not one.spent


def test_without_metering_a_budget_is_never_spent() -> None:
    """F2."""
    free = Budgets(metered=False).of("org")
    free.update_balance(-5, read_at=0)
    free.add_cost(7)
    assert not free.spent


def test_an_organization_has_one_budget() -> None:
    budgets = Budgets(metered=True)
    assert budgets.of("org") is budgets.of("org")
    assert budgets.of("org") is not budgets.of("other")
    assert not budgets.of("unknown").spent


def test_what_is_held_is_not_left_for_others() -> None:
    """D4: until it is released."""
    _, one = budget(10)
    assert one.hold(Estimate(6, 6)) == 6
    assert one.hold(Estimate(5, 5)) is None
    assert one.hold(Estimate(4, 4)) == 4
    one.release(6)
    assert one.hold(Estimate(5, 5)) == 5


def test_the_cost_of_answers_leaves_less_to_hold() -> None:
    _, one = budget(10)
    one.add_cost(6)
    assert one.hold(Estimate(5, 5)) is None


def test_a_request_without_a_limit_holds_what_is_left() -> None:
    """D4: a guess keeps nobody from spending the rest, but nobody else spends it at the same time."""
    _, one = budget(10)
    assert one.hold(Estimate(3, 1000)) == 10
    assert one.hold(Estimate(0, 1000)) is None
    assert one.hold(FREE) == 0


def test_without_metering_or_before_a_balance_is_known_nothing_is_held() -> None:
    free = Budgets(metered=False).of("org")
    free.update_balance(0, read_at=0)
    for one in (free, Budgets(metered=True).of("org")):
        assert one.hold(Estimate(5, 5)) == 0
        assert one.held == 0


@pytest.mark.rule("D4", "Several processes overdraw by one request each at most.")
def test_each_of_several_processes_holds_its_share_but_always_one_request() -> None:
    """D4: what all of them hold is at most the balance, and one request for each."""
    budgets = Budgets(metered=True, processes=4)
    one = budgets.of("org")
    one.update_balance(100, read_at=0)
    assert one.hold(Estimate(90, 90)) == 90
    assert one.hold(Estimate(1, 1)) is None
    one.release(90)
    held = [one.hold(Estimate(10, 10)) for _ in range(4)]
    assert held == [10, 10, None, None]
    assert one.hold(Estimate(1, 1000)) == 5
