"""Fills a store with what a test needs: keys, files, batches and shards in any state."""

from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate, count
from typing import Any
from uuid import uuid4

from msgspec.structs import replace

from batchline.domain.bitmap import unsettled
from batchline.domain.records import Batch, Charge, File, Lane, NewShard, Owner, Segment, Shard, ShardProgress
from batchline.domain.states import BatchStatus
from batchline.ports import FinalizeLease, NewBatch, NewKey, Store

NOW = 1_800_000_000
DAY = 86_400
LEASE = 30.0
ME, OTHER = "me", "other"
CHAT = "/v1/chat/completions"
BYTES_A_LINE = 100


class World:
    """A store under test.

    ``pass_time`` moves the clock that decides about the store's leases, while the store is available and leases are
    watched. ``lose_time`` moves it while the store is unavailable. After ``die`` the store can detect that a process is
    dead. ``set_time`` sets the clock that decides what has expired. ``remember`` copies the rows of the store, and
    returns a function that brings them back, as a loss of the last commits would.
    """

    def __init__(
        self,
        store: Store,
        *,
        pass_time: Callable[[float], Awaitable[None]],
        lose_time: Callable[[float], Awaitable[None]],
        die: Callable[[str], Awaitable[None]],
        set_time: Callable[[int], Awaitable[None]],
        remember: Callable[[], Awaitable[Callable[[], Awaitable[None]]]] | None = None,
    ) -> None:
        self.store = store
        self.pass_time, self.lose_time = pass_time, lose_time
        self.die = die
        self.set_time = set_time
        self._remember = remember
        self._numbers = count(1)
        self._holders: dict[tuple[str, int, int], str] = {}

    async def remember(self) -> Callable[[], Awaitable[None]]:
        """Copy the rows of the store, and return a function that brings them back."""
        assert self._remember is not None
        return await self._remember()

    async def owner(self, project: str = "alpha", organization: str = "default") -> Owner:
        """Create a key of a project."""
        key_id = f"key_{uuid4().hex}"
        return await self.store.create_key(
            NewKey(
                key_id=key_id,
                digest=key_id.encode(),
                hint="bl-…",
                project=project,
                project_id=str(uuid4()),
                organization=organization,
                organization_id=str(uuid4()),
                at=NOW,
            )
        )

    def file(self, owner: Owner, **changes: Any) -> File:
        number = next(self._numbers)
        file = File(
            id=f"file-{number:04}",
            project_id=owner.project_id,
            filename=f"{number}.jsonl",
            purpose="batch",
            bytes=number,
            created_at=NOW,
            expires_at=NOW + 30 * DAY,
            is_error=False,
            object_key=f"uploads/file-{number:04}",
        )
        return replace(file, **changes)

    async def stored(self, owner: Owner, **changes: Any) -> File:
        """Create a stored file."""
        file = self.file(owner, **changes)
        await self.store.begin_upload(file, owner=ME, lease=LEASE)
        await self.store.finish_upload(file, owner=ME)
        return file

    def new_batch(self, owner: Owner, *, idempotency_key: str | None = None, **changes: Any) -> NewBatch:
        batch = Batch(
            id=f"batch_{next(self._numbers):04}",
            project_id=owner.project_id,
            key_id=owner.key_id,
            endpoint=CHAT,
            input_file_id="file-in",
            metadata=b"{}",
            status=BatchStatus.VALIDATING,
            created_at=NOW,
            expires_at=NOW + DAY,
            epoch=1,
        )
        return NewBatch(batch=replace(batch, **changes), digest=b"same thing", idempotency_key=idempotency_key)

    async def validating(self, owner: Owner | None = None, *, holder: str = ME, **changes: Any) -> Batch:
        new = self.new_batch(owner or await self.owner(), **changes)
        assert await self.store.begin_batch(new, owner=holder, lease=LEASE, since=NOW - DAY) is None
        return new.batch

    async def running(
        self, owner: Owner | None = None, *, shards: Sequence[int] = (4,), model: str = "m", **changes: Any
    ) -> Batch:
        """Create a batch in progress, with shards of so many lines each."""
        batch = await self.validating(owner, **changes)
        await self.store.start_batch(
            batch.id, epoch=1, shards=cut(shards, model=model), total=sum(shards), work_key=f"work/{batch.id}/1", at=NOW
        )
        return await self.seen(batch)

    async def seen(self, batch: Batch) -> Batch:
        """Return the batch as it is now."""
        found = await self.store.batch(batch.project_id, batch.id)
        assert found is not None
        return found

    async def claim(
        self,
        *,
        holder: str = ME,
        lines: int = 10_000,
        bytes: int = 1 << 30,
        alone: bool = True,
        without: Sequence[Lane] = (),
        at: int = NOW,
    ) -> list[Shard]:
        claim = await self.store.claim(
            owner=holder, lease=LEASE, lines=lines, bytes=bytes, alone=alone, without=without, at=at
        )
        assert {batch.id for batch in claim.batches} == {shard.batch_id for shard in claim.shards}
        self._holders |= dict.fromkeys(map(key, claim.shards), holder)
        return claim.shards

    async def rescue(self, *alive: str) -> int:
        """Rescue the shards of all owners but the named ones, or but ``ME``, and return their number."""
        await self.store.watch_leases(owner=ME, lease=LEASE)
        return await self.store.rescue(live_owners=lambda: alive or (ME,))

    async def expire(self, *, at: int) -> list[str]:
        """Stop the batches that are past their window at that time."""
        await self.set_time(at)
        return await self.store.expire()

    async def expire_files(self, *, owner: str, at: int, limit: int) -> list[str]:
        """Expire files at that time."""
        await self.set_time(at)
        return await self.store.expire_files(owner=owner, limit=limit)

    async def record(
        self,
        shard: Shard,
        positions: Sequence[int],
        *,
        failed: int = 0,
        charges: Sequence[Charge] = (),
        at: int = NOW,
    ) -> Shard:
        """Record lines of a shard, the last ``failed`` of them as failed, and return the shard with its new bitmap."""
        after, progress = moved_on(shard, positions, failed=failed)
        await self.store.record(
            shard.batch_id,
            owner=self.holder(shard),
            progress=[progress],
            segment=segment(len(positions), failed=failed),
            charges=charges,
            at=at,
        )
        return after

    def holder(self, shard: Shard) -> str:
        """Return who claimed a shard, or ``ME``."""
        return self._holders.get(key(shard), ME)

    async def record_all(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            await self.record(shard, unsettled(shard.settled, shard.lines))

    async def finish(self, *, holder: str = ME, at: int = NOW + 100) -> FinalizeLease:
        finish = await self.store.lease_finalizable(owner=holder, lease=LEASE, at=at)
        assert finish is not None
        return finish

    async def publish(self, finish: FinalizeLease, *, at: int = NOW + 200, files: Sequence[File] = ()) -> BatchStatus:
        batch = finish.batch
        return await self.store.publish(
            batch.id,
            epoch=finish.epoch,
            owner=finish.owner,
            files=files,
            completed=batch.completed,
            failed=batch.total - batch.completed,
            at=at,
        )

    async def ended(self, owner: Owner, **changes: int) -> Batch:
        """Return a batch that has ended, with an output file, an error file and their order."""
        batch = await self.running(owner, shards=[2])
        await self.record_all(await self.claim())
        leased = await self.finish()
        files = [
            self.file(
                owner,
                purpose="batch_output",
                is_error=kind == "error",
                object_key=f"results/{batch.id}/2-me-{kind}",
                **changes,
            )
            for kind in ("output", "error")
        ]
        await self.store.publish(
            batch.id, epoch=leased.epoch, owner=ME, files=files, order=b"order", completed=1, failed=1, at=NOW
        )
        return await self.seen(batch)


def cut(shards: Sequence[int], *, model: str = "m") -> list[NewShard]:
    lines_before = accumulate(shards, initial=0)
    return [
        NewShard(offset=BYTES_A_LINE * before, length=BYTES_A_LINE * lines, lines=lines, model=model)
        for before, lines in zip(lines_before, shards, strict=False)
    ]


def moved_on(shard: Shard, positions: Sequence[int], *, failed: int = 0) -> tuple[Shard, ShardProgress]:
    bits = int.from_bytes(shard.settled, "little") | sum(1 << position for position in positions)
    settled = bits.to_bytes(len(shard.settled), "little")
    progress = ShardProgress(
        n=shard.n,
        epoch=shard.epoch,
        former=shard.settled,
        settled=settled,
        completed=len(positions) - failed,
        failed=failed,
        done=bits == (1 << shard.lines) - 1,
    )
    return replace(shard, settled=settled), progress


def segment(lines: int, *, failed: int = 0) -> Segment:
    return Segment(output_bytes=lines - failed, error_bytes=failed, data=b"+" * (lines - failed) + b"-" * failed)


def key(shard: Shard) -> tuple[str, int, int]:
    return shard.batch_id, shard.n, shard.epoch
