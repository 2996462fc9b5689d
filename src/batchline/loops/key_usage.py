"""Note when keys were last used: gathered in memory, written now and then, since nothing hangs on it."""

from batchline.ports import Accounts, Clock


class KeyUsage:
    def __init__(self, *, accounts: Accounts, clock: Clock) -> None:
        self._accounts, self._clock = accounts, clock
        self._unwritten: dict[str, int] = {}

    def mark(self, key_id: str) -> None:
        self._unwritten[key_id] = int(self._clock.now())

    async def step(self) -> bool:
        if self._unwritten:
            key_usage, self._unwritten = self._unwritten, {}
            await self._accounts.touch_keys(key_usage)
        return False
