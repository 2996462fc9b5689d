"""What an organization has left, as a process knows it: SPEC D4."""

import pytest

from batchline.pipeline.budget import Budget, Budgets


def budget(funds: int) -> tuple[Budgets, Budget]:
    budgets = Budgets(metered=True)
    one = budgets.of("org")
    one.update_balance(funds, read_at=budgets.sequence)
    return budgets, one


def test_it_is_spent_when_answers_took_all_there_was() -> None:
    """Recorded or not."""
    _, one = budget(10)
    one.add_cost(9)
    assert not one.spent
    one.add_cost(1)
    assert one.spent


def test_an_answer_that_is_lost_gives_its_money_back() -> None:
    _, one = budget(10)
    one.add_cost(10)
    one.remove_cost(4)
    assert not one.spent


def test_a_record_tells_what_is_left() -> None:
    """Others spend from the same balance."""
    _, one = budget(10)
    one.add_cost(3)
    with one.recording():
        pass
    one.on_recorded(3, balance=0)
    assert one.spent


@pytest.mark.rule("D4", "A balance that was read before a record is not believed after it.")
def test_a_balance_read_beside_a_record_is_not_believed() -> None:
    """It may have what was recorded in it or not: believed, the same answer would count twice, or not at all."""
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


def test_a_record_of_another_organization_disturbs_nothing() -> None:
    budgets, one = budget(0)
    before = budgets.sequence
    with budgets.of("other").recording():
        pass
    one.update_balance(5, read_at=before)
    assert not one.spent


def test_nobody_runs_out_where_nobody_is_metered() -> None:
    """F2."""
    free = Budgets(metered=False).of("org")
    free.update_balance(-5, read_at=0)
    free.add_cost(7)
    assert not free.spent


def test_an_organization_has_one_budget() -> None:
    budgets = Budgets(metered=True)
    assert budgets.of("org") is budgets.of("org")
    assert budgets.of("org") is not budgets.of("other")
    assert not budgets.of("unheard of").spent
