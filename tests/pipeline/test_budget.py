"""What an organization has left, as far as a process knows (D4)."""

import asyncio

import pytest

from batchline.domain.estimates import FREE, Estimate
from batchline.domain.outcomes import COST_LIMIT_REACHED, DAY_BUDGET_SPENT, OUT_OF_QUOTA
from batchline.domain.records import Balances
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
    assert one.refusal is None
    one.add_cost(1)
    assert one.refusal is OUT_OF_QUOTA


def test_the_cost_of_an_answer_that_is_not_recorded_is_removed() -> None:
    _, one = budget(10)
    one.add_cost(10)
    one.remove_cost(4)
    assert one.refusal is None


def test_a_record_brings_the_new_balance() -> None:
    """Other processes spend from the same balance."""
    _, one = budget(10)
    one.add_cost(3)
    with one.recording():
        pass
    one.on_recorded(3, Balances(funds=0))
    assert one.refusal is OUT_OF_QUOTA


@pytest.mark.rule("D4", "A balance that was read before a record is not believed after it.")
def test_a_balance_read_during_a_record_is_ignored() -> None:
    """It may or may not include the record: if it were used, an answer would count twice, or not at all."""
    budgets, one = budget(10)
    one.add_cost(8)
    before = budgets.sequence
    with one.recording():
        during = budgets.sequence
        one.update_balance(2, read_at=before)
        assert one.refusal is None
    one.on_recorded(8, Balances(funds=2))
    for stale in (before, during):
        one.update_balance(100, read_at=stale)
    one.add_cost(2)
    assert one.refusal is OUT_OF_QUOTA
    one.update_balance(100, read_at=budgets.sequence)
    assert one.refusal is None


def test_a_record_of_another_organization_does_not_matter() -> None:
    budgets, one = budget(0)
    before = budgets.sequence
    with budgets.of("other").recording():
        pass
    one.update_balance(5, read_at=before)
    assert one.refusal is None


def test_without_metering_a_budget_is_never_spent() -> None:
    """F2."""
    free = Budgets(metered=False).of("org")
    free.update_balance(-5, read_at=0)
    free.add_cost(7)
    assert free.refusal is None


def test_an_organization_has_one_budget() -> None:
    budgets = Budgets(metered=True)
    assert budgets.of("org") is budgets.of("org")
    assert budgets.of("org") is not budgets.of("other")
    assert budgets.of("unknown").refusal is None


def test_what_is_held_is_not_left_for_others() -> None:
    """D4: until it is released."""
    _, one = budget(10)
    assert one.hold(Estimate(6, 6)) == 6
    assert one.hold(Estimate(5, 5)) is one
    assert one.hold(Estimate(4, 4)) == 4
    one.release(6)
    assert one.hold(Estimate(5, 5)) == 5


def test_the_cost_of_answers_leaves_less_to_hold() -> None:
    _, one = budget(10)
    one.add_cost(6)
    assert one.hold(Estimate(5, 5)) is one


def test_a_request_without_a_limit_holds_what_is_left() -> None:
    """D4: a guess keeps nobody from spending the rest, but nobody else spends it at the same time."""
    _, one = budget(10)
    assert one.hold(Estimate(3, 1000)) == 10
    assert one.hold(Estimate(0, 1000)) is one
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
    assert one.hold(Estimate(1, 1)) is one
    one.release(90)
    held = [one.hold(Estimate(10, 10)) for _ in range(4)]
    assert held == [10, 10, one, one]
    assert one.hold(Estimate(1, 1000)) == 5


@pytest.mark.rule("G8", "What was charged and what lines in flight may cost never exceeds the limit.")
def test_a_batch_may_start_lines_until_its_limit_is_held_by_those_in_flight() -> None:
    budgets, organization = budget(1000)
    one = budgets.of_batch("org", "project", cost_left=25)
    assert [one.hold(Estimate(10, 10)) for _ in range(2)] == [10, 10]
    short = one.hold(Estimate(10, 10))
    assert isinstance(short, Budget)
    assert (short.failure, short.held, short.of_batch) == (COST_LIMIT_REACHED, 20, True)
    assert one.hold(Estimate(0, 10)) == 5, "a line without a limit takes what is left"
    assert (organization.refusal, organization.held) == (None, 25)
    for amount in (10, 10, 5):
        one.release(amount)
        one.add_cost(8)
    with one.recording():
        pass
    one.on_recorded(24, Balances(funds=976, cost_left=1))
    one.add_cost(1)
    assert (one.refusal, organization.refusal) == (COST_LIMIT_REACHED, None)


@pytest.mark.rule("G8", "What other processes were charged counts too.")
def test_a_limit_is_reached_by_what_others_were_charged() -> None:
    budgets, _ = budget(1000)
    one = budgets.of_batch("org", "project", cost_left=25)
    one.update(Balances(funds=1000, cost_left=1), read_at=budgets.sequence)
    assert one.refusal is None
    one.add_cost(1)
    with one.recording():
        one.update(Balances(funds=999, cost_left=25), read_at=budgets.sequence)
    one.on_recorded(1, Balances(funds=999, cost_left=0))
    assert one.refusal is COST_LIMIT_REACHED


class Costs:
    def __init__(self, cost: int) -> None:
        self.cost, self.since = cost, 0

    async def cost_of_project(self, project_id: str, *, since: int) -> int:
        assert project_id == "limited"
        self.since = since
        return self.cost


def test_a_project_may_spend_its_budget_of_a_day_and_goes_on_the_next_day() -> None:
    budgets = Budgets(metered=True, day_limits={"limited": 100})
    budgets.of("org").update_balance(1000, read_at=0)
    batches = [budgets.of_batch("org", "limited", cost_left=None) for _ in range(2)]
    costs, noon = Costs(60), 10 * 86_400 + 43_200
    asyncio.run(budgets.refresh_days(costs, {"limited": None, "other": None}, at=noon))
    assert costs.since == 10 * 86_400
    assert [one.refusal for one in batches] == [None, None]
    assert batches[0].hold(Estimate(40, 40)) == 40
    batches[0].release(40)
    batches[0].add_cost(40)
    assert [one.refusal for one in batches] == [DAY_BUDGET_SPENT, DAY_BUDGET_SPENT]
    assert budgets.of_batch("org", "other", cost_left=None).hold(Estimate(900, 900)) == 900
    assert budgets.of_project("org", "limited").refusal is DAY_BUDGET_SPENT
    batches[0].remove_cost(40)
    costs.cost = 0
    asyncio.run(budgets.refresh_days(costs, {"limited": None}, at=noon + 86_400))
    assert costs.since == 11 * 86_400
    assert batches[1].refusal is None


@pytest.mark.rule("G8", "A budget that an operator sets counts for batches that run already.")
def test_a_budget_that_is_set_later_counts_for_lines_in_flight_too() -> None:
    budgets, organization = budget(1000)
    one = budgets.of_batch("org", "limited", cost_left=None)
    costs = Costs(60)
    asyncio.run(budgets.refresh_days(costs, {"limited": None}, at=86_400))
    assert one.hold(Estimate(30, 30)) == 30
    asyncio.run(budgets.refresh_days(costs, {"limited": 100}, at=86_400))
    assert isinstance(one.hold(Estimate(20, 20)), Budget), "of the 40 that are left, 30 are held"
    one.release(30)
    one.add_cost(30)
    assert one.refusal is None
    asyncio.run(budgets.refresh_days(costs, {"limited": 80}, at=86_400))
    assert one.refusal is DAY_BUDGET_SPENT
    asyncio.run(budgets.refresh_days(costs, {"limited": None}, at=86_400))
    assert (one.refusal, organization.held) == (None, 0)


def test_the_budget_of_the_store_comes_before_that_of_the_settings() -> None:
    budgets = Budgets(metered=True, day_limits={"limited": 100})
    budgets.of("org").update_balance(1000, read_at=0)
    one = budgets.of_project("org", "limited")
    asyncio.run(budgets.refresh_days(Costs(60), {"limited": 50}, at=86_400))
    assert one.refusal is DAY_BUDGET_SPENT
    asyncio.run(budgets.refresh_days(Costs(60), {"limited": None}, at=86_400))
    assert one.hold(Estimate(40, 40)) == 40


@pytest.mark.rule("G8", "A budget of a day counts what other processes spend, however fast answers are recorded.")
def test_a_budget_of_a_day_is_read_while_records_are_in_progress() -> None:
    budgets, _ = budget(1000)
    one = budgets.of_batch("org", "limited", cost_left=None)
    with one.recording():
        asyncio.run(budgets.refresh_days(Costs(0), {"limited": 100}, at=86_400))
        assert isinstance(one.hold(Estimate(101, 101)), Budget), "it has a limit from now on"
        one.add_cost(10)
        asyncio.run(budgets.refresh_days(Costs(50), {"limited": 100}, at=86_400))
        assert one.hold(Estimate(50, 50)) == 50, "others have spent 40 or 50"
        one.release(50)
        assert isinstance(one.hold(Estimate(51, 51)), Budget)
        asyncio.run(budgets.refresh_days(Costs(50), {"limited": 200}, at=86_400))
        assert one.hold(Estimate(140, 140)) == 140, "the limit was raised"


def test_a_budget_of_a_day_is_not_spent_by_a_record_that_is_counted_twice() -> None:
    """A record that is in progress may be in the charges of the day already, or not yet."""
    budgets, _ = budget(1000)
    one = budgets.of_batch("org", "limited", cost_left=None)
    asyncio.run(budgets.refresh_days(Costs(0), {"limited": 100}, at=86_400))
    one.add_cost(60)
    for cost in (60, 0, 60):
        with one.recording():
            asyncio.run(budgets.refresh_days(Costs(cost), {"limited": 100}, at=86_400))
            assert one.refusal is None
    one.on_recorded(60, Balances(funds=940))
    assert one.hold(Estimate(40, 40)) == 40
