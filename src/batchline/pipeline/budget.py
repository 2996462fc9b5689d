"""Keeps what each organization has left, as far as this process knows.

That is the last balance that was read, less the cost of what was answered since, and less what is held for requests in
flight. So within one process an overdraft is at most what the estimates of these requests missed, however seldom the
balance is read.

Processes do not know what others hold. So each holds at most its share of the balance at a time, but always one
request, whatever that may cost. Together they overdraw by at most what the estimates missed and one request for each
further process.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from batchline.domain.estimates import Estimate


class Budgets:
    """The budgets of all organizations that this process has spent for.

    ``processes`` is how many processes may spend from the same balances.
    """

    def __init__(self, *, metered: bool, processes: int = 1) -> None:
        self.metered, self.processes = metered, processes
        self.sequence = 0
        """Grows with every record that ends. A balance is passed on with the number from before it was read."""
        self._by_organization: dict[str, Budget] = {}

    def of(self, organization_id: str) -> "Budget":
        return self._by_organization.setdefault(organization_id, Budget(self))


class Budget:
    """What one organization has left."""

    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets
        self.held = 0
        """The amount that requests in flight may cost."""
        self._balance: int | None = None
        self._unrecorded_cost = 0
        self._records_in_progress = 0
        self._last_record = 0

    @property
    def spent(self) -> bool:
        """Whether nothing is left. Never true if the service is not metered."""
        return self._budgets.metered and self._balance is not None and self._balance <= self._unrecorded_cost

    def hold(self, estimate: Estimate) -> int | None:
        """Hold what a request may cost, and return how much that is; None if too little is left for it now.

        A request without a limit of its output takes a usual one, or all that is left if that is less.
        """
        if not self._budgets.metered or self._balance is None or not estimate.likely:
            return 0
        room = self._balance - self._unrecorded_cost
        if self.held:
            room = room // self._budgets.processes - self.held
        if room <= 0 or room < estimate.least:
            return None
        amount = min(estimate.likely, room)
        self.held += amount
        return amount

    def release(self, amount: int) -> None:
        """Hold an amount no longer: its request has ended."""
        self.held -= amount

    def update_balance(self, balance: int, *, read_at: int) -> None:
        """Take over a balance, unless a record was in progress when it was read.

        Such a balance may or may not include that record, and the record brings a balance of its own.
        """
        if not self._records_in_progress and self._last_record <= read_at:
            self._balance = balance

    def add_cost(self, cost: int) -> None:
        """Count the cost of an answer that is not recorded yet."""
        self._unrecorded_cost += cost

    def remove_cost(self, cost: int) -> None:
        """Forget the cost of an answer that will not be recorded here, because another worker holds its shard now."""
        self._unrecorded_cost -= cost

    def on_recorded(self, cost: int, *, balance: int) -> None:
        """Move a cost from unrecorded to recorded, with the balance that the record left."""
        self._unrecorded_cost -= cost
        self._balance = balance

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
