"""What an organization has left, as a process knows it: SPEC D4."""

import pytest

from batchline.pipeline.budget import Budget, Budgets


def budget(funds: int) -> tuple[Budgets, Budget]:
    budgets = Budgets(metered=True)
    one = budgets.of("org")
    one.tell(funds, read_at=budgets.moment)
    return budgets, one


def test_it_is_spent_when_answers_took_all_there_was() -> None:
    """Recorded or not."""
    _, one = budget(10)
    one.owe(9)
    assert not one.spent
    one.owe(1)
    assert one.spent


def test_an_answer_that_is_lost_gives_its_money_back() -> None:
    _, one = budget(10)
    one.owe(10)
    one.forgive(4)
    assert not one.spent


def test_a_record_tells_what_is_left() -> None:
    """Others spend from the same balance."""
    _, one = budget(10)
    one.owe(3)
    with one.recording():
        pass
    one.paid(3, left=0)
    assert one.spent


@pytest.mark.rule("D4", "A balance that was read before a record is not believed after it.")
def test_a_balance_read_beside_a_record_is_not_believed() -> None:
    """It may have what was recorded in it or not: believed, the same answer would count twice, or not at all."""
    budgets, one = budget(10)
    one.owe(8)
    before = budgets.moment
    with one.recording():
        during = budgets.moment
        one.tell(2, read_at=before)
        assert not one.spent
    one.paid(8, left=2)
    for stale in (before, during):
        one.tell(100, read_at=stale)
    one.owe(2)
    assert one.spent
    one.tell(100, read_at=budgets.moment)
    assert not one.spent


def test_a_record_of_another_organization_disturbs_nothing() -> None:
    budgets, one = budget(0)
    before = budgets.moment
    with budgets.of("other").recording():
        pass
    one.tell(5, read_at=before)
    assert not one.spent


def test_nobody_runs_out_where_nobody_is_metered() -> None:
    """F2."""
    free = Budgets(metered=False).of("org")
    free.tell(-5, read_at=0)
    free.owe(7)
    assert not free.spent


def test_an_organization_has_one_budget() -> None:
    budgets = Budgets(metered=True)
    assert budgets.of("org") is budgets.of("org")
    assert budgets.of("org") is not budgets.of("other")
    assert not budgets.of("unheard of").spent
