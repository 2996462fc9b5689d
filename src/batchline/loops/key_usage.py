"""Records the last use of each key. Uses are collected in memory and written every few seconds."""

from batchline.domain.errors import StoreDown
from batchline.ports import Accounts, Clock


class KeyUsage:
    """The last use of each key. Nothing depends on it, so the uses of the last seconds may be lost in a crash."""

    def __init__(self, *, accounts: Accounts, clock: Clock) -> None:
        self._accounts, self._clock = accounts, clock
        self._unwritten: dict[str, int] = {}

    def mark(self, key_id: str) -> None:
        """Note that a key was used now."""
        self._unwritten[key_id] = int(self._clock.now())

    async def step(self) -> bool:
        """Write the uses since the last step. Raise StoreDown, and keep them for the next step."""
        if self._unwritten:
            key_usage, self._unwritten = self._unwritten, {}
            try:
                await self._accounts.touch_keys(key_usage)
            except StoreDown:
                self._unwritten = key_usage | self._unwritten
                raise
        return False
