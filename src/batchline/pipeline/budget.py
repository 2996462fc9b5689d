"""Keeps the money that each organization has left, as far as this process knows.

It is the last balance that was read, minus the cost of the answers since then, minus the estimates that are held for
requests in flight. So within one process an overdraft is at most the error of these estimates, however seldom the
balance is read.

Processes do not know the amounts that others hold. So each holds at most its share of the balance at a time. One
request alone may exceed that share. Together they overdraw by at most the error of the estimates, and one request for
each further process.

A batch may have a limit of its own (``max_cost``), and a project a budget for each day, which an operator may set at
any time. Both are further budgets that its lines are paid from. A process knows the charges of others after a second at
most, so together they overdraw by at most the cost of the requests in flight.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Protocol

from batchline.domain.estimates import Estimate
from batchline.domain.outcomes import COST_LIMIT_REACHED, DAY_BUDGET_SPENT, OUT_OF_QUOTA, Failure
from batchline.domain.records import Balances

_DAY_SECONDS = 86_400


class ProjectCosts(Protocol):
    """Reads the charges of projects."""

    async def cost_of_project(self, project_id: str, *, since: int) -> int:
        """Return the nano-units that a project was charged since ``since``, which is a full hour."""


class Budgets:
    """The budgets of all organizations that this process has spent for.

    ``processes`` is the number of processes that may spend from the same balances. ``day_limits`` has the nano-units
    that single projects may spend in a day by the settings file. A limit of the project in the store comes first.
    """

    def __init__(self, *, metered: bool, processes: int = 1, day_limits: Mapping[str, int] = {}) -> None:
        self.metered, self.processes = metered, processes
        self._day_limits = day_limits
        self.sequence = 0
        """A number that grows with every record that ends. A balance comes with the number from before it was read."""
        self._by_organization: dict[str, Budget] = {}
        self._days: dict[str, Budget] = {}

    def of(self, organization_id: str) -> "Budget":
        """Return the budget of an organization."""
        return self._by_organization.setdefault(organization_id, Budget(self))

    def of_project(self, organization_id: str, project_id: str) -> "Budget | LimitedBudget":
        """Return the budget that synchronous calls of a project are paid from."""
        return self._limited(organization_id, project_id, None)

    def of_batch(self, organization_id: str, project_id: str, *, cost_left: int | None) -> "Budget | LimitedBudget":
        """Return the budget that the lines of a batch are paid from. The batch may still cost ``cost_left``."""
        limit = None
        if cost_left is not None:
            limit = Budget(self, failure=COST_LIMIT_REACHED, of_batch=True)
            limit.update_balance(cost_left, read_at=self.sequence)
        return self._limited(organization_id, project_id, limit)

    async def refresh_days(self, costs: ProjectCosts, day_limits: Mapping[str, int | None], *, at: int) -> None:
        """Take over the budgets that projects have for each day, and read their charges of today.

        ``day_limits`` has the nano-units from the store, or None if the settings file decides.
        """
        if not self.metered:
            return
        for project_id, stored in sorted(day_limits.items()):
            limit = self._day_limits.get(project_id) if stored is None else stored
            day, read_at = self._day_of(project_id), self.sequence
            recorded_before = day.recorded_cost
            if limit is None:
                day.remove_limit()
                continue
            cost = await costs.cost_of_project(project_id, since=at - at % _DAY_SECONDS)
            day.update_balance(limit - cost, read_at=read_at)
            day.narrow_balance(limit - cost, recorded_meanwhile=day.recorded_cost - recorded_before)

    def _day_of(self, project_id: str) -> "Budget":
        day = self._days.get(project_id)
        if day is None:
            day = self._days[project_id] = Budget(self, failure=DAY_BUDGET_SPENT, limited=False)
        return day

    def _limited(self, organization_id: str, project_id: str, batch: "Budget | None") -> "Budget | LimitedBudget":
        budget = self.of(organization_id)
        return LimitedBudget(budget, batch=batch, day=self._day_of(project_id)) if self.metered else budget


class Budget:
    """The rest of a balance: that of an organization, the ``max_cost`` of a batch, or a project's budget for a day.

    Lines fail with ``failure`` if nothing is left. ``of_batch`` says that only lines of one batch are paid from it. A
    budget that is not ``limited`` has enough for every line, until it gets a balance.
    """

    def __init__(
        self, budgets: Budgets, *, failure: Failure = OUT_OF_QUOTA, of_batch: bool = False, limited: bool = True
    ) -> None:
        self._budgets = budgets
        self.failure, self.of_batch = failure, of_batch
        self.limited = limited
        self.held = 0
        """The amount that requests in flight may cost."""
        self._balance: int | None = None
        self.unrecorded_cost = 0
        """The cost of answers that are not recorded yet."""
        self.recorded_cost = 0
        """The cost of all answers that this process has recorded."""
        self._records_in_progress = 0
        self._last_record = 0

    @property
    def refusal(self) -> Failure | None:
        """The failure of lines because nothing is left; None if they may start, as always if nothing is metered."""
        if self._budgets.metered and self._balance is not None and self._balance <= self.unrecorded_cost:
            return self.failure
        return None

    def hold(self, estimate: Estimate) -> "int | Budget":
        """Hold the estimated cost of a request, and return the amount, or this budget if too little is left now.

        For a request without a limit of its output, a usual output is assumed, or all that is left if that is less.
        """
        amount = self.room_for(estimate)
        if amount is None:
            return self
        self.held += amount
        return amount

    def room_for(self, estimate: Estimate) -> int | None:
        """Return the amount that could be held for a request; None if too little is left for it now."""
        if not self.limited:
            return estimate.likely
        if not self._budgets.metered or self._balance is None or not estimate.likely:
            return 0
        room = self._balance - self.unrecorded_cost
        if self.held:
            room = room // self._budgets.processes - self.held
        return None if room <= 0 or room < estimate.least else min(estimate.likely, room)

    def release(self, amount: int) -> None:
        """Release an amount, because its request has ended."""
        self.held -= amount

    def update_balance(self, balance: int, *, read_at: int) -> None:
        """Take over a balance, unless a record was in progress when it was read.

        Such a balance may or may not include that record, and the record brings a balance of its own.
        """
        if not self._records_in_progress and self._last_record <= read_at:
            self._balance, self.limited = balance, True

    def narrow_balance(self, balance: int, *, recorded_meanwhile: int) -> None:
        """Move the balance to the nearest one that a reading allows, which may include any records since it began.

        A budget whose records bring no balance needs this: while answers come fast, a record is always in progress.
        """
        least, most = balance - recorded_meanwhile, balance + self.unrecorded_cost
        self._balance = least if self._balance is None else min(max(self._balance, least), most)
        self.limited = True

    def remove_limit(self) -> None:
        """Let every line start from now on."""
        self._balance, self.limited = None, False

    def update(self, left: Balances, *, read_at: int) -> None:
        """Take over the balance of the organization, unless a record was in progress when it was read."""
        self.update_balance(left.funds, read_at=read_at)

    def add_cost(self, cost: int) -> None:
        """Count the cost of an answer that is not recorded yet."""
        self.unrecorded_cost += cost

    def remove_cost(self, cost: int) -> None:
        """Forget the cost of an answer that will not be recorded here, because another worker holds its shard now."""
        self.unrecorded_cost -= cost

    def on_recorded(self, cost: int, left: Balances) -> None:
        """Move a cost from unrecorded to recorded, with the balance that the record left."""
        self.settle(cost, balance=left.funds)

    def settle(self, cost: int, *, balance: int | None) -> None:
        """Move a cost from unrecorded to recorded, with the balance after it, or None if that is not known."""
        self.unrecorded_cost -= cost
        self.recorded_cost += cost
        if balance is not None:
            self._balance = balance
        elif self._balance is not None:
            self._balance -= cost

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Mark that a record is in progress."""
        self._records_in_progress += 1
        try:
            yield
        finally:
            self._records_in_progress -= 1
            self._budgets.sequence += 1
            self._last_record = self._budgets.sequence


class LimitedBudget:
    """The budget of an organization for lines that are under limits too. It is used like a budget.

    Nearly all batches have no limit. So each method first does what these need, without a loop.
    """

    def __init__(self, budget: Budget, *, batch: Budget | None, day: Budget) -> None:
        self._budget, self._batch, self._day = budget, batch, day
        self._accounts = [account for account in (budget, batch, day) if account is not None]

    @property
    def refusal(self) -> Failure | None:
        """The failure of lines because nothing is left or a limit is reached; None if they may start."""
        refusal = self._budget.refusal
        if refusal is None and self._batch is not None:
            refusal = self._batch.refusal
        return self._day.refusal if refusal is None and self._day.limited else refusal

    def hold(self, estimate: Estimate) -> int | Budget:
        """Hold the estimated cost of a request, and return the amount, or a budget that has too little left."""
        if self._batch is None and not self._day.limited:
            held = self._budget.hold(estimate)
            if isinstance(held, int):
                self._day.held += held
            return held
        amounts = []
        for account in self._accounts:
            room = account.room_for(estimate)
            if room is None:
                return account
            amounts.append(room)
        for account in self._accounts:
            account.held += min(amounts)
        return min(amounts)

    def release(self, amount: int) -> None:
        """Release an amount, because its request has ended."""
        self._budget.held -= amount
        self._day.held -= amount
        if self._batch is not None:
            self._batch.held -= amount

    def update(self, left: Balances, *, read_at: int) -> None:
        """Take over balances, unless a record was in progress when they were read."""
        self._budget.update(left, read_at=read_at)
        if self._batch is not None and left.cost_left is not None:
            self._batch.update_balance(left.cost_left, read_at=read_at)

    def add_cost(self, cost: int) -> None:
        """Count the cost of an answer that is not recorded yet."""
        self._budget.unrecorded_cost += cost
        self._day.unrecorded_cost += cost
        if self._batch is not None:
            self._batch.unrecorded_cost += cost

    def remove_cost(self, cost: int) -> None:
        """Forget the cost of an answer that will not be recorded here."""
        self.add_cost(-cost)

    def on_recorded(self, cost: int, left: Balances) -> None:
        """Move a cost from unrecorded to recorded, with the balances that the record left."""
        self._budget.on_recorded(cost, left)
        self._day.settle(cost, balance=None)
        if self._batch is not None:
            self._batch.settle(cost, balance=left.cost_left)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Mark that a record is in progress."""
        with ExitStack() as stack:
            for account in self._accounts:
                stack.enter_context(account.recording())
            yield
