"""Keeps what each organization has left, as far as this process knows.

That is the last balance that was read, less the cost of what was answered since, and less what is held for requests in
flight. So within one process an overdraft is at most what the estimates of these requests missed, however seldom the
balance is read.

Processes do not know what others hold. So each holds at most its share of the balance at a time, but always one
request, whatever that may cost. Together they overdraw by at most what the estimates missed and one request for each
further process.

A batch may have a limit of its own (``max_cost``), and a project a budget for each day. Both are further budgets that
its lines are paid from. A process knows what others were charged a second later at most, so together they overdraw by
at most what was in flight.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Protocol

from batchline.domain.estimates import Estimate
from batchline.domain.outcomes import COST_LIMIT_REACHED, DAY_BUDGET_SPENT, OUT_OF_QUOTA, Failure
from batchline.domain.records import Balances

_DAY_SECONDS = 86_400


class ProjectCosts(Protocol):
    """Knows what projects were charged."""

    async def cost_of_project(self, project_id: str, *, since: int) -> int:
        """Return the nano-units that a project was charged since a full hour."""


class Budgets:
    """The budgets of all organizations that this process has spent for.

    ``processes`` is how many processes may spend from the same balances. ``day_limits`` has the nano-units that single
    projects may spend in a day.
    """

    def __init__(self, *, metered: bool, processes: int = 1, day_limits: Mapping[str, int] = {}) -> None:
        self.metered, self.processes = metered, processes
        self._day_limits = day_limits if metered else {}
        self.sequence = 0
        """Grows with every record that ends. A balance is passed on with the number from before it was read."""
        self._by_organization: dict[str, Budget] = {}
        self._days: dict[str, Budget] = {}

    def of(self, organization_id: str) -> "Budget":
        """Return the budget of an organization."""
        return self._by_organization.setdefault(organization_id, Budget(self))

    def of_project(self, organization_id: str, project_id: str) -> "Budget | LimitedBudget":
        """Return what synchronous calls of a project are paid from."""
        return self._limited(organization_id, None, self._day_of(project_id))

    def of_batch(self, organization_id: str, project_id: str, *, cost_left: int | None) -> "Budget | LimitedBudget":
        """Return what the lines of a batch are paid from, if it may still cost so much."""
        limit = None
        if cost_left is not None:
            limit = Budget(self, failure=COST_LIMIT_REACHED, of_batch=True)
            limit.update_balance(cost_left, read_at=self.sequence)
        return self._limited(organization_id, limit, self._day_of(project_id))

    async def refresh_days(self, costs: ProjectCosts, project_ids: Iterable[str], *, at: int) -> None:
        """Read what those of the projects that have a budget for each day were charged today."""
        for project_id in sorted(self._day_limits.keys() & set(project_ids)):
            day, read_at = self._day_of(project_id), self.sequence
            cost = await costs.cost_of_project(project_id, since=at - at % _DAY_SECONDS)
            if day is not None:
                day.update_balance(self._day_limits[project_id] - cost, read_at=read_at)

    def _day_of(self, project_id: str) -> "Budget | None":
        if project_id not in self._day_limits:
            return None
        return self._days.setdefault(project_id, Budget(self, failure=DAY_BUDGET_SPENT))

    def _limited(self, organization_id: str, batch: "Budget | None", day: "Budget | None") -> "Budget | LimitedBudget":
        budget = self.of(organization_id)
        return budget if batch is None and day is None else LimitedBudget(budget, batch=batch, day=day)


class Budget:
    """What is left of a balance: that of an organization, the ``max_cost`` of a batch, or a project's budget for a day.

    ``failure`` is how lines fail if nothing is left. ``of_batch`` says that only lines of one batch are paid from it.
    """

    def __init__(self, budgets: Budgets, *, failure: Failure = OUT_OF_QUOTA, of_batch: bool = False) -> None:
        self._budgets = budgets
        self.failure, self.of_batch = failure, of_batch
        self.held = 0
        """The amount that requests in flight may cost."""
        self._balance: int | None = None
        self._unrecorded_cost = 0
        self._records_in_progress = 0
        self._last_record = 0

    @property
    def refusal(self) -> Failure | None:
        """How lines fail because nothing is left; None if they may start. Never set if the service is not metered."""
        if self._budgets.metered and self._balance is not None and self._balance <= self._unrecorded_cost:
            return self.failure
        return None

    def hold(self, estimate: Estimate) -> "int | Budget":
        """Hold what a request may cost, and return how much that is; the budget itself if too little is left now.

        A request without a limit of its output takes a usual one, or all that is left if that is less.
        """
        amount = self.room_for(estimate)
        if amount is None:
            return self
        self.held += amount
        return amount

    def room_for(self, estimate: Estimate) -> int | None:
        """Return how much could be held for a request; None if too little is left for it now."""
        if not self._budgets.metered or self._balance is None or not estimate.likely:
            return 0
        room = self._balance - self._unrecorded_cost
        if self.held:
            room = room // self._budgets.processes - self.held
        return None if room <= 0 or room < estimate.least else min(estimate.likely, room)

    def release(self, amount: int) -> None:
        """Hold an amount no longer: its request has ended."""
        self.held -= amount

    def update_balance(self, balance: int, *, read_at: int) -> None:
        """Take over a balance, unless a record was in progress when it was read.

        Such a balance may or may not include that record, and the record brings a balance of its own.
        """
        if not self._records_in_progress and self._last_record <= read_at:
            self._balance = balance

    def update(self, left: Balances, *, read_at: int) -> None:
        """Take over the balance of the organization, unless a record was in progress when it was read."""
        self.update_balance(left.funds, read_at=read_at)

    def add_cost(self, cost: int) -> None:
        """Count the cost of an answer that is not recorded yet."""
        self._unrecorded_cost += cost

    def remove_cost(self, cost: int) -> None:
        """Forget the cost of an answer that will not be recorded here, because another worker holds its shard now."""
        self._unrecorded_cost -= cost

    def on_recorded(self, cost: int, left: Balances) -> None:
        """Move a cost from unrecorded to recorded, with the balance that the record left."""
        self.settle(cost, balance=left.funds)

    def settle(self, cost: int, *, balance: int | None) -> None:
        """Move a cost from unrecorded to recorded, with what is left after it, or None if the record does not say."""
        self._unrecorded_cost -= cost
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
    """The budget of an organization for lines that are under limits too. It is used like a budget."""

    def __init__(self, budget: Budget, *, batch: Budget | None, day: Budget | None) -> None:
        self._budget, self._batch = budget, batch
        self._limits = [limit for limit in (batch, day) if limit is not None]

    @property
    def refusal(self) -> Failure | None:
        """How lines fail because nothing is left or a limit is reached; None if they may start."""
        refusals = [self._budget.refusal, *(limit.refusal for limit in self._limits)]
        return next((refusal for refusal in refusals if refusal is not None), None)

    def hold(self, estimate: Estimate) -> int | Budget:
        """Hold what a request may cost, and return how much that is, or one of the budgets that has too little left."""
        amounts = []
        for account in (self._budget, *self._limits):
            room = account.room_for(estimate)
            if room is None:
                return account
            amounts.append(room)
        for account in (self._budget, *self._limits):
            account.held += min(amounts)
        return min(amounts)

    def release(self, amount: int) -> None:
        """Hold an amount no longer: its request has ended."""
        for account in (self._budget, *self._limits):
            account.release(amount)

    def update(self, left: Balances, *, read_at: int) -> None:
        """Take over balances, unless a record was in progress when they were read."""
        self._budget.update(left, read_at=read_at)
        if self._batch is not None and left.cost_left is not None:
            self._batch.update_balance(left.cost_left, read_at=read_at)

    def add_cost(self, cost: int) -> None:
        """Count the cost of an answer that is not recorded yet."""
        for account in (self._budget, *self._limits):
            account.add_cost(cost)

    def remove_cost(self, cost: int) -> None:
        """Forget the cost of an answer that will not be recorded here."""
        for account in (self._budget, *self._limits):
            account.remove_cost(cost)

    def on_recorded(self, cost: int, left: Balances) -> None:
        """Move a cost from unrecorded to recorded, with the balances that the record left."""
        self._budget.on_recorded(cost, left)
        for limit in self._limits:
            limit.settle(cost, balance=left.cost_left if limit is self._batch else None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Mark that a record is in progress."""
        with ExitStack() as stack:
            for account in (self._budget, *self._limits):
                stack.enter_context(account.recording())
            yield
