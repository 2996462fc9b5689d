"""What organizations have left, as this process knows it: the last balance that was read, less what was answered
since. So an overdraft is at most what was in flight when the money ran out, however seldom the balance is read."""

from collections.abc import Iterator
from contextlib import contextmanager


class Budgets:
    def __init__(self, *, metered: bool) -> None:
        self.metered = metered
        self.moment = 0
        """Grows with every record that ends; a balance is told with the moment before it was read."""
        self._by_organization: dict[str, Budget] = {}

    def of(self, organization_id: str) -> "Budget":
        return self._by_organization.setdefault(organization_id, Budget(self))


class Budget:
    """Of one organization."""

    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets
        self._funds: int | None = None
        self._owed = 0
        self._recording = 0
        self._recorded_at = 0

    @property
    def spent(self) -> bool:
        return self._budgets.metered and self._funds is not None and self._funds <= self._owed

    def tell(self, funds: int, *, read_at: int) -> None:
        """A balance that was read beside a record may have it or not; that record brings a balance of its own."""
        if not self._recording and self._recorded_at <= read_at:
            self._funds = funds

    def owe(self, cost: int) -> None:
        """For an answer that is not recorded yet."""
        self._owed += cost

    def forgive(self, cost: int) -> None:
        """For an answer that will not be recorded here, as its shard is somebody else's now."""
        self._owed -= cost

    def paid(self, cost: int, *, left: int) -> None:
        """A record was made, and told what is left after it."""
        self._owed -= cost
        self._funds = left

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._recording += 1
        try:
            yield
        finally:
            self._recording -= 1
            self._budgets.moment += 1
            self._recorded_at = self._budgets.moment
