"""Notes that the store is available, so that leases which were not renewed meanwhile may end."""

from batchline.ports import ShardStore

NOTES_PER_LEASE = 6
"""The number of notes in the length of a lease that the store is available. A gap of half a lease counts as an outage,
in which no lease ends. So leases end as long as the store takes less than a third of a lease for a note."""


class LeaseWatch:
    """Notes that the store is available. It does nothing else, which would delay a note and look like an outage."""

    def __init__(self, *, store: ShardStore, owner: str, lease_seconds: float) -> None:
        self._store, self._owner, self._lease_seconds = store, owner, lease_seconds

    async def step(self) -> bool:
        """Note that the store is available now."""
        await self._store.watch_leases(owner=self._owner, lease=self._lease_seconds)
        return False
