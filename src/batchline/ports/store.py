"""What the system keeps its state in: accounts, files, batches and the work on them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from batchline.domain.fleet import Report
from batchline.domain.progress import LineErrors, Sample
from batchline.domain.records import (
    Batch,
    Charge,
    File,
    Key,
    Lane,
    LeasedBatch,
    LedgerEntry,
    NewShard,
    Organization,
    Owner,
    Project,
    Segment,
    Shard,
    ShardProgress,
    UsageEntry,
)
from batchline.domain.states import BatchStatus, Stop


class NewKey(Struct, frozen=True, kw_only=True):
    """A key to be made; its project and organization are found by name, or made under the ids given here."""

    key_id: str
    digest: bytes
    hint: str
    project: str
    project_id: str
    organization: str
    organization_id: str
    at: int


class Accounts(Protocol):
    async def owner_of(self, digest: bytes, project_id: str | None) -> Owner | None:
        """Whom a live key stands for, if it belongs to that project; None leaves the project to the key."""

    async def create_key(self, new: NewKey) -> Owner:
        """Make a key, and its project and organization where none of that name exist."""

    async def keys(self) -> list[Key]: ...

    async def organizations(self) -> list[Organization]: ...

    async def projects(self) -> list[Project]: ...

    async def touch_keys(self, key_usage: Mapping[str, int]) -> None:
        """When keys were last used."""

    async def revoke_key(self, key_id: str, *, at: int) -> bool: ...

    async def rotate_key(self, key_id: str, *, digest: bytes, hint: str) -> bool: ...


class Ledger(Protocol):
    """Money and what it was spent on. An organization's entries sum to its balance and its credits."""

    async def start_metering(self, free_credits: int | None, *, at: int) -> None:
        """From now on new organizations get these credits, as do those that never had money; None: nobody does."""

    async def set_funds(
        self, organization_id: str, *, balance: int | None, credits: int | None, at: int
    ) -> Organization | None:
        """Set what is given; None when there is no such organization."""

    async def charge(self, owner: Owner, charge: Charge, *, at: int) -> None:
        """For a synchronous call. Credits go first; the balance may go below zero."""

    async def entries(self, organization_id: str) -> list[LedgerEntry]:
        """Oldest first."""

    async def usage(self, *, since: int, until: int, project_id: str | None = None) -> list[UsageEntry]:
        """By hour, project, model and batch, oldest first."""


class Files(Protocol):
    async def begin_upload(self, file: File, *, owner: str, lease: float) -> None: ...

    async def renew_upload(self, file_id: str, *, owner: str, lease: float) -> None:
        """Raises LeaseLost."""

    async def finish_upload(self, file: File, *, owner: str) -> None:
        """Make the file visible. Raises LeaseLost when the upload was given up meanwhile."""

    async def abandon_upload(self, file_id: str, *, owner: str) -> None: ...

    async def file(self, project_id: str, file_id: str, *, at: int) -> File | None: ...

    async def files(
        self, project_id: str, *, purpose: str | None, ascending: bool, after: str | None, limit: int, at: int
    ) -> list[File] | None:
        """A page, or None when ``after`` names no file this project ever had."""

    async def delete_file(self, project_id: str, file_id: str, *, at: int) -> File | None: ...

    async def expire_files(self, *, owner: str, at: int, limit: int) -> list[str]:
        """Mark expired files and dead uploads; the keys of objects that must go."""

    async def kept(self, object_keys: Sequence[str]) -> set[str]:
        """Those objects of uploads and results that a row still stands for."""


class NewBatch(Struct, frozen=True, kw_only=True):
    batch: Batch
    digest: bytes
    """Of the file, the endpoint and the metadata: what makes two creates the same."""
    idempotency_key: str | None = None


class CreateRecord(Struct, frozen=True, kw_only=True):
    """A create that was persisted, and the answer it got, once it has one."""

    batch_id: str
    digest: bytes
    answer_status: int | None
    answer_body: bytes | None


class BatchSnapshot(Struct, frozen=True, kw_only=True):
    """How far a batch is, as of one moment."""

    batch: Batch
    models: list[str]
    """Those of lines that are not recorded yet and may still run."""
    errors: list[LineErrors]
    """The most frequent first. They sum to the lines that failed."""
    samples: list[Sample]
    """Oldest first, none older than five minutes; none once the work is forgotten."""


class Batches(Protocol):
    async def begin_batch(self, new: NewBatch, *, owner: str, lease: float, since: int) -> CreateRecord | None:
        """Persist a batch as ``validating``; or the earlier one with its idempotency key, made after ``since``."""

    async def created_with(self, project_id: str, idempotency_key: str, *, since: int) -> CreateRecord | None:
        """The create that a project made with an idempotency key, if it was made after ``since``."""

    async def pending_lines(self, *, key_id: str, digest: bytes, since: int) -> CreateRecord | None:
        """The newest same create by this key whose answer was never fully sent."""

    async def created(self, batch_id: str) -> CreateRecord | None: ...

    async def mark_answered(self, batch_id: str) -> None: ...

    async def renew_batch(self, batch_id: str, *, epoch: int, owner: str, lease: float) -> None:
        """Raises LeaseLost."""

    async def start_batch(
        self, batch_id: str, *, epoch: int, shards: Sequence[NewShard], total: int, work_key: str, at: int
    ) -> CreateRecord:
        """validating -> in_progress, with its shards and the answer to the create. A batch cancelled meanwhile
        stays so, and that is the answer. Raises LeaseLost."""

    async def fail_batch(self, batch_id: str, *, epoch: int, errors: bytes, answer: bytes, at: int) -> CreateRecord:
        """validating -> failed. A batch cancelled meanwhile stays so, and that is the answer. Raises LeaseLost."""

    async def drop_batch(self, batch_id: str, *, epoch: int) -> None:
        """Forget a ``validating`` batch whose input turned out not to exist."""

    async def batch(self, project_id: str, batch_id: str) -> Batch | None: ...

    async def snapshot(self, project_id: str, batch_id: str) -> BatchSnapshot | None: ...

    async def batches(
        self,
        project_id: str,
        *,
        after: str | None,
        limit: int,
        status: str | None = None,
        created_after: int | None = None,
        created_before: int | None = None,
    ) -> list[Batch] | None:
        """A page, newest first, or None when ``after`` names no batch of this project."""

    async def cancel_batch(self, project_id: str, batch_id: str, *, at: int) -> Batch | None:
        """To ``cancelling`` (from ``validating`` to ``cancelled``) where that is possible; the batch as it then is."""


class Claim(Struct, frozen=True, kw_only=True):
    batches: list[LeasedBatch]
    shards: list[Shard]


class BatchSignal(Struct, frozen=True, kw_only=True):
    """What a worker must hear of a batch it holds shards of."""

    batch_id: str
    stop: Stop | None
    key_revoked: bool
    funds: int


class FinalizeLease(Struct, frozen=True, kw_only=True):
    """A batch whose lines are over, leased to be put together."""

    batch: Batch
    epoch: int
    work_key: str
    leftovers: list[Shard]
    """Shards with lines that never ran."""


class ShardStore(Protocol):
    async def claim(
        self, *, owner: str, lease: float, lines: int, bytes: int, alone: bool, without: Sequence[Lane] = (), at: int
    ) -> Claim:
        """Lease open shards, earliest deadline first, until they hold that many lines or bytes, leaving out those of
        the lanes ``without``. One that two workers died on is leased by itself, and only to a worker that holds
        nothing else (``alone``)."""

    async def renew_shards(self, *, owner: str, lease: float) -> set[tuple[str, int, int]]:
        """Prolong and list, as (batch, shard, epoch), every shard this owner still holds."""

    async def notices(self, batch_ids: Sequence[str]) -> list[BatchSignal]: ...

    async def record(
        self,
        batch_id: str,
        *,
        progress: Sequence[ShardProgress],
        segment: Segment,
        errors: Sequence[LineErrors] = (),
        charges: Sequence[Charge] = (),
        at: int,
    ) -> int:
        """Count the lines of a segment together with it, those that failed by code, and what they cost, all or nothing;
        the nano-units that the organization has left. Raises LeaseLost."""

    async def release(self, batch_id: str, *, shards: Sequence[tuple[int, int]]) -> None:
        """Hand (shard, epoch) back, unfinished and without a strike."""

    async def rescue(self, *, live_owners: Callable[[], Sequence[str]]) -> int:
        """Reopen the shards of holders that died, which is a strike: a shard is split, and one with a single line
        left is closed at its third strike. Who is ``live_owners`` is asked, from any thread, once nobody can claim
        meanwhile: none of them is dead, and in a folder everybody else is."""

    async def fail_interrupted(self, *, owner: str, errors: bytes, answer: bytes, at: int) -> int:
        """Fail batches whose validation died."""

    async def expire(self, *, at: int) -> list[str]:
        """Stop batches that are past their window."""

    async def lease_finalizable(self, *, owner: str, lease: float, at: int) -> FinalizeLease | None:
        """Lease a batch that has no open or leased shard left; to ``finalizing``, unless it was stopped."""

    async def count_queued_lines(self) -> int:
        """Lines that no worker holds."""

    async def segments(self, batch_id: str, *, after: int, limit: int) -> list[Segment]: ...

    async def publish(
        self,
        batch_id: str,
        *,
        epoch: int,
        files: Sequence[File],
        completed: int,
        failed: int,
        errors: Sequence[LineErrors] = (),
        at: int,
    ) -> BatchStatus:
        """Files, counts and terminal state in one transaction; ``errors`` are those of lines that were not recorded
        before. Raises LeaseLost."""

    async def finished(self, *, limit: int) -> list[str]:
        """Terminal batches whose shards, segments and work file are still there."""

    async def delete_work(self, batch_id: str) -> None: ...

    async def running(self, batch_ids: Sequence[str]) -> set[str]:
        """Those that are not over yet."""


class CapSharing(Protocol):
    """Caps that several processes keep together."""

    async def heartbeat(self, report: Report, *, caps: Mapping[str, int], lease: float) -> dict[str, int]:
        """Say what a process does, for as long as the lease; how many lines it may have in flight to each upstream
        that has a cap, which together with everybody else's is never more than the cap."""

    async def leave(self, owner: str) -> None:
        """Its share is free for the others."""


class Fleet(CapSharing, Protocol):
    """Processes that work on the same batches."""

    async def reports(self) -> list[Report]:
        """What each of them does."""


class Store(Accounts, Ledger, Files, Batches, ShardStore, Fleet, Protocol):
    async def check(self) -> None:
        """Commit something. Raises StoreDown."""
