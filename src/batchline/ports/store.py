"""Defines what the service needs of its store: accounts, money, files, batches, shards and the fleet.

Times named ``at``, ``since`` and ``until`` are Unix seconds. ``owner`` names the process that holds a lease, and
``lease`` is the lease's length in seconds. A method that says "Raise LeaseLost" changes nothing in that case: the row
belongs to another process now, or is no longer in the state that the lease was taken for.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from batchline.domain.fleet import Report
from batchline.domain.identity import Identity
from batchline.domain.progress import LineErrors, ProgressSample
from batchline.domain.records import (
    ALL_SCOPES,
    AdminSession,
    Balances,
    Batch,
    Bill,
    Charge,
    Deletion,
    File,
    InspectedFile,
    InspectedShard,
    Key,
    Lane,
    LeasedBatch,
    LedgerEntry,
    NewShard,
    Organization,
    OrganizationBooks,
    Owner,
    Project,
    ProjectUsage,
    QueueState,
    RepairedShard,
    SchemaVersions,
    Segment,
    Session,
    Shard,
    ShardProgress,
    UsageEntry,
)
from batchline.domain.reuse import Source, StoredIndex
from batchline.domain.states import BatchStatus, Stop
from batchline.domain.usage import Usage
from batchline.domain.webhooks import Delivery, SendResult, Webhook


class NewKey(Struct, frozen=True, kw_only=True):
    """A key to create.

    Its project and organization are looked up by name; those that do not exist are created with the ids given here.
    """

    key_id: str
    digest: bytes
    hint: str
    project: str
    project_id: str
    organization: str
    organization_id: str
    at: int
    name: str = ""
    scopes: str = ALL_SCOPES
    expires_at: int | None = None


class Accounts(Protocol):
    """Organizations, projects and API keys."""

    async def owner_of(self, digest: bytes, project_id: str | None) -> Owner | None:
        """Return the owner of a key that is neither revoked nor expired, if the key belongs to the project.

        With None as the project, the key's own project is taken.
        """

    async def create_key(self, new: NewKey) -> Owner:
        """Create a key, and its project and organization if none of that name exist."""

    async def is_valid_key(self, key_id: str) -> bool:
        """Return whether a key exists and is neither revoked nor expired."""

    async def keys(self) -> list[Key]:
        """Return every key, oldest first."""

    async def organizations(self) -> list[Organization]:
        """Return every organization, oldest first."""

    async def projects(self) -> list[Project]:
        """Return every project, oldest first."""

    async def touch_keys(self, key_usage: Mapping[str, int]) -> None:
        """Record when keys were last used."""

    async def revoke_key(self, key_id: str, *, at: int) -> bool:
        """Revoke a key; return False if there is no such key or it was revoked before."""

    async def rotate_key(self, key_id: str, *, digest: bytes, hint: str) -> bool:
        """Give a key a new secret; return False if there is no such key or it is revoked."""

    async def rename_key(self, key_id: str, *, name: str) -> bool:
        """Give a key another name; return False if there is no such key."""

    async def change_key(self, key: Key, *, name: str, scopes: str, expires_at: int | None) -> bool:
        """Change a key; return False if it is revoked, or no longer as it was read."""

    async def rename_project(self, project_id: str, *, name: str) -> bool:
        """Give a project another name; return False if another project of its organization has that name."""

    async def rename_organization(self, organization_id: str, *, name: str) -> bool:
        """Give an organization another name; return False if another one has that name."""

    async def set_daily_budget(self, project_id: str, *, daily_budget: int | None) -> bool:
        """Set the nano-units that a project may spend in a day; None leaves it to the settings file.

        Return False if there is no such project.
        """

    async def delete_key(self, key_id: str, *, at: int) -> Deletion:
        """Delete a key, unless batches that it created have not ended."""

    async def delete_project(self, project_id: str, *, at: int) -> Deletion:
        """Delete a project with its keys, files and webhooks, unless batches of it have not ended.

        Its batches, and what it used, stay in the ledger of its organization.
        """

    async def delete_organization(self, organization_id: str, *, at: int) -> Deletion:
        """Delete an organization, unless it has projects or a balance. Its ledger stays."""


class SessionStore(Protocol):
    """Sessions of the console. Each ends with its key, and after a time."""

    async def open_session(self, digest: bytes, *, key_id: str, expires_at: int) -> bool:
        """Open a session of a key; return False if the key is not valid. ``digest`` is the hash of its secret."""

    async def session(self, digest: bytes) -> Session | None:
        """Return a session that has not ended."""

    async def close_session(self, digest: bytes) -> None:
        """End a session."""

    async def open_admin_session(self, digest: bytes, *, expires_at: int) -> None:
        """Open a session of the administrator. ``digest`` is a hash of its secret and of the administrator's token."""

    async def admin_session(self, digest: bytes) -> AdminSession | None:
        """Return a session of the administrator that has not ended."""

    async def open_in_admin_session(self, digest: bytes, *, key_id: str | None) -> None:
        """Set the key of the project that the administrator has open; None closes it."""

    async def close_admin_session(self, digest: bytes) -> None:
        """End a session of the administrator."""


class Ledger(Protocol):
    """Money and what it was spent on. An organization's entries sum to its balance and its credits."""

    async def start_metering(self, free_credits: int | None, *, at: int) -> None:
        """Set the credits that organizations start with.

        New organizations get them from now on, and those that never had money get them now. With None, no
        organization gets any.
        """

    async def set_funds(
        self, organization_id: str, *, balance: int | None, credits: int | None, at: int
    ) -> Organization | None:
        """Set the balance, the credits or both; return None if there is no such organization."""

    async def grant(self, organization_id: str, *, balance: int, credits: int, at: int) -> Organization | None:
        """Add to the balance and the credits, beside charges that are made at the same time.

        Return None if there is no such organization.
        """

    async def charge(self, owner: Owner, charge: Charge, *, at: int) -> int:
        """Charge a synchronous call, and return the nano-units that are left, which may be below zero.

        Credits are taken first.
        """

    async def cost_of_project(self, project_id: str, *, since: int) -> int:
        """Return the nano-units that a project was charged since a full hour."""

    async def bills(self, batches: Sequence[Batch]) -> list[Bill]:
        """Return what each of these batches was charged, and what it saved, in the same order."""

    async def entries(self, organization_id: str) -> list[LedgerEntry]:
        """Return an organization's entries, oldest first."""

    async def usage(self, *, since: int, until: int, project_id: str | None = None) -> list[UsageEntry]:
        """Return the usage by hour, project, model and batch, oldest first."""

    async def organization(self, organization_id: str) -> Organization | None:
        """Return an organization with its money."""

    async def project_usage(
        self, project_id: str, *, model: str | None, since: int, until: int, bucket_seconds: int, limit: int
    ) -> list[ProjectUsage]:
        """Return the usage of a project by bucket and model, oldest first; of one model if it is named."""


class Files(Protocol):
    """Uploads, results and their lifetime."""

    async def begin_upload(self, file: File, *, owner: str, lease: float) -> None:
        """Insert the row of an upload before its first byte is written."""

    async def renew_upload(self, file_id: str, *, owner: str, lease: float) -> None:
        """Renew the lease on an upload. Raise LeaseLost."""

    async def finish_upload(self, file: File, *, owner: str) -> None:
        """Make the file visible. Raise LeaseLost if the upload was abandoned meanwhile."""

    async def abandon_upload(self, file_id: str, *, owner: str) -> None:
        """Mark an upload as abandoned, so that its object can be deleted."""

    async def file(self, project_id: str, file_id: str, *, at: int) -> File | None:
        """Return a file that is stored and not expired."""

    async def files(
        self, project_id: str, *, purpose: str | None, ascending: bool, after: str | None, limit: int, at: int
    ) -> list[File] | None:
        """Return a page of files, or None if ``after`` names no file that this project ever had."""

    async def stored_bytes(self, project_id: str) -> int:
        """Return the size of all files of a project, inputs and results, that are not deleted and not yet expired."""

    async def stored_bytes_of_organization(self, organization_id: str) -> int:
        """Return the same for all projects of an organization."""

    async def delete_file(self, project_id: str, file_id: str, *, at: int) -> File | None:
        """Delete a file and return it, or None if there is none."""

    async def expire_files(self, *, owner: str, limit: int) -> list[str]:
        """Mark files past their expiry and uploads of dead processes; return the keys of the objects to delete.

        The store's own clock decides what is past its expiry.
        """

    async def referenced_keys(self, object_keys: Sequence[str]) -> set[str]:
        """Return those keys of uploads and results that a row still refers to."""

    async def known_keys(self, object_keys: Sequence[str]) -> set[str]:
        """Return those keys of uploads and results that a row names, also if its file was removed."""


class NewBatch(Struct, frozen=True, kw_only=True):
    """A batch to create."""

    batch: Batch
    digest: bytes
    """A hash over the file, the endpoint and the metadata. Two creates with the same digest are the same create."""
    idempotency_key: str | None = None


class CreateRecord(Struct, frozen=True, kw_only=True):
    """A create that was persisted, and its answer once it has one."""

    batch_id: str
    digest: bytes
    answer_status: int | None
    answer_body: bytes | None


class BatchSnapshot(Struct, frozen=True, kw_only=True):
    """The progress of a batch at one moment."""

    batch: Batch
    models: list[str]
    """The models of lines that are not recorded yet and may still run."""
    errors: list[LineErrors]
    """The most frequent first. Their counts sum to the number of failed lines."""
    samples: list[ProgressSample]
    """Oldest first, none older than five minutes. Empty once the batch's work is deleted."""
    child_batch_ids: list[str]
    """The batches that run failed lines of it again, oldest first."""
    bill: Bill


class Batches(Protocol):
    """Batches as their owners see them."""

    async def begin_batch(self, new: NewBatch, *, owner: str, lease: float, since: int) -> CreateRecord | None:
        """Insert a batch as ``validating`` and return None.

        If the project used the same idempotency key after ``since``, insert nothing and return the earlier create.
        """

    async def find_create(self, project_id: str, idempotency_key: str, *, since: int) -> CreateRecord | None:
        """Return the create that a project made with an idempotency key after ``since``."""

    async def find_unanswered_create(self, *, key_id: str, digest: bytes, since: int) -> CreateRecord | None:
        """Return this key's newest create with the same digest if its answer was never fully sent."""

    async def create_record(self, batch_id: str) -> CreateRecord | None:
        """Return the create of a batch."""

    async def mark_answered(self, batch_id: str) -> None:
        """Record that the answer to the create was fully sent."""

    async def renew_batch(self, batch_id: str, *, epoch: int, owner: str, lease: float) -> None:
        """Renew the lease on a batch that is being validated or finalized. Raise LeaseLost."""

    async def start_batch(
        self,
        batch_id: str,
        *,
        epoch: int,
        shards: Sequence[NewShard],
        total: int,
        work_key: str,
        sent_as: bytes | None = None,
        at: int,
    ) -> CreateRecord:
        """Move a batch from ``validating`` to ``in_progress`` with its shards and the answer to the create.

        ``sent_as`` says how its models are sent to their upstreams, if not as they are.

        Raise LeaseLost if the batch was cancelled meanwhile or was ended by another process.
        """

    async def fail_batch(self, batch_id: str, *, epoch: int, errors: bytes, answer: bytes, at: int) -> CreateRecord:
        """Move a batch from ``validating`` to ``failed`` with the answer to the create.

        Raise LeaseLost if the batch was cancelled meanwhile or was ended by another process.
        """

    async def drop_batch(self, batch_id: str, *, epoch: int) -> None:
        """Delete a ``validating`` batch whose input file turned out not to exist."""

    async def batch(self, project_id: str, batch_id: str) -> Batch | None:
        """Return a batch with its current counts."""

    async def snapshot(self, project_id: str, batch_id: str) -> BatchSnapshot | None:
        """Return a batch and its progress, all as of the same moment."""

    async def batches(
        self,
        project_id: str,
        *,
        after: str | None,
        limit: int,
        status: str | None = None,
        created_after: int | None = None,
        created_before: int | None = None,
        model: str | None = None,
        text: str | None = None,
    ) -> list[Batch] | None:
        """Return a page, newest first, or None if ``after`` names no batch of this project.

        ``text`` is looked for in ids and metadata; A to Z are the same as a to z. ``status`` may be ``Hold.HELD`` too.
        """

    async def open_batches(self, *, limit: int) -> list[Batch]:
        """Return batches of all projects that have not ended, oldest first."""

    async def cancel_batch(self, project_id: str, batch_id: str, *, at: int) -> tuple[Batch, bool] | None:
        """Cancel a batch if its state allows it, and return the batch as it is afterwards and whether this ended it.

        A ``validating`` batch becomes ``cancelled`` at once; a later one becomes ``cancelling``. Return None if there
        is no such batch.
        """

    async def model_rates(self, project_id: str, model: str, *, since: int, limit: int) -> list[float]:
        """Return the lines per second of a project's last completed batches that have only this model."""

    async def release_batch(self, project_id: str, batch_id: str) -> tuple[Batch, bool] | None:
        """Let the lines of a held batch run, and return the batch and whether it was held; None if there is none.

        It is not held again.
        """


class Claim(Struct, frozen=True, kw_only=True):
    """Shards that were leased, and their batches."""

    batches: list[LeasedBatch]
    shards: list[Shard]


class BatchSignal(Struct, frozen=True, kw_only=True):
    """The reasons that may stop the lines of a batch: a stop, a hold, a revoked key, or missing funds."""

    batch_id: str
    stop: Stop | None
    held: bool = False
    """Whether no line of it starts until its owner releases it."""
    key_revoked: bool
    funds: int
    daily_budget: int | None = None
    """Nano-units that its project may spend in a day, or None if the settings file decides."""
    cost_left: int | None = None
    """Nano-units that the batch may still cost, or None without a limit."""


class FinalizeLease(Struct, frozen=True, kw_only=True):
    """A lease on a batch with no line left to run, for writing its output files."""

    batch: Batch
    epoch: int
    owner: str
    work_key: str
    leftovers: list[Shard]
    """Shards with lines that never ran."""
    following: list[Shard] = []
    """Shards whose lines wait for an answer that they can take. If there are any, the batch is not finalized yet."""
    failures: int = 0
    """The number of times that finalizing it failed."""
    repairs: int = 0
    """The number of times that damage of it was repaired."""


class RepairChanges(Struct, frozen=True, kw_only=True):
    """The changes of a repair to a batch: its shards, the segments that are lost or replaced, and errors by code."""

    shards: list[RepairedShard]
    removed: dict[int, bytes | None]
    """The ids of segments that are lost or replaced, each with the layout of those lines that keep their place."""
    lost: list[int]
    """Those of them whose charges are given back."""
    added: list[Segment]
    errors: list[LineErrors]
    """All errors of the batch by code, in place of those that were counted before."""


class DividedShard(Struct, frozen=True, kw_only=True):
    """The changes of a reuse to a shard: lines that took an answer, that may run, and that go on waiting."""

    n: int
    completed: int
    """The lines that took an answer."""
    done: bytes
    """The bitmap of the shard with all lines settled."""
    settled: bytes | None
    """The bitmap in which only the lines that may run are not settled; None if there are none."""
    following: bytes | None
    """The bitmap in which only the lines that go on waiting are not settled; None if there are none."""


class ReuseChanges(Struct, frozen=True, kw_only=True):
    """The changes that a step of a reuse makes to a batch."""

    shards: list[DividedShard]
    segments: list[Segment]
    charges: list[Charge]
    sources: list[str]
    """The output files that answers were copied from."""


class ReuseStore(Protocol):
    """Indexes of earlier answers, and the lines that take them."""

    async def reuse_sources(self, project_id: str, *, endpoint: str, since: int, at: int, limit: int) -> list[Source]:
        """Return ended batches of a project whose output files are stored, newest first."""

    async def add_index(self, batch_id: str, index: StoredIndex) -> bool:
        """Store the index of a batch, unless it has one or its output file was removed, and return whether it did."""

    async def drop_index(self, batch_id: str) -> None:
        """Forget an index that cannot be read."""

    async def end_reuse_step(self, leased: FinalizeLease, changes: ReuseChanges, *, at: int) -> bool:
        """Record the lines that took an answer, let others run, and end the lease on the batch.

        Change nothing and return False if one of the sources was deleted or has expired meanwhile. Raise LeaseLost.
        """


class KnownBatch(Struct, frozen=True, kw_only=True):
    """The state of a batch that decides which of its objects are needed."""

    active: bool
    """Whether the batch is not terminal."""
    has_work: bool
    """Whether its row refers to a work file, which an active batch may not do yet."""


class ShardStore(Protocol):
    """Leases on shards and batches, and the writes that need such a lease."""

    async def claim(
        self, *, owner: str, lease: float, lines: int, bytes: int, alone: bool, without: Sequence[Lane] = (), at: int
    ) -> Claim:
        """Lease open shards, earliest deadline first, until they hold that many lines or bytes.

        Shards of the lanes ``without`` are left out. A shard that two workers died on is leased by itself, and only to
        a worker that holds nothing else (``alone``).
        """

    async def renew_shards(self, *, owner: str, lease: float) -> set[tuple[str, int, int]]:
        """Renew every lease that this owner still holds; return them as (batch, shard, epoch)."""

    async def signals(self, batch_ids: Sequence[str]) -> list[BatchSignal]:
        """Return the current signals of batches that a worker holds shards of. A batch that does not exist has none."""

    async def record(
        self,
        batch_id: str,
        *,
        owner: str,
        progress: Sequence[ShardProgress],
        segment: Segment,
        errors: Sequence[LineErrors] = (),
        charges: Sequence[Charge] = (),
        at: int,
    ) -> Balances:
        """Record a segment, the progress of its shards, its errors by code and its charges, all or nothing.

        A batch that was created with a hold may be held by that: then no shard of it can be claimed any more.
        Return what is left. Raise LeaseLost, also if the bitmap of a shard is not the
        one that its holder saw last.
        """

    async def cost_of_project(self, project_id: str, *, since: int) -> int:
        """Return the nano-units that a project was charged since a full hour."""

    async def held_shards(self, batch_id: str, *, owner: str) -> list[Shard]:
        """Return the shards of a batch that an owner has leased, with their bitmaps."""

    async def release(self, batch_id: str, *, owner: str, shards: Sequence[tuple[int, int]]) -> None:
        """Give up the leases on shards, named as (shard, epoch), that are not done. This is no strike.

        Nothing changes for shards that the owner does not hold.
        """

    async def close_shard(self, batch_id: str, n: int, *, epoch: int, owner: str) -> None:
        """Close a leased shard whose lines cannot be read. A repair decides about them when the batch is drained."""

    async def watch_leases(self, *, owner: str, lease: float) -> None:
        """Note that this process can use the store, which it does several times in the length of a lease.

        If no process did so for half a lease, the store was unavailable and no process could renew. Then no lease ends
        before its owner had a whole lease of time to renew it.
        """

    async def rescue(self, *, live_owners: Callable[[], Sequence[str]]) -> int:
        """Reopen the shards of dead processes and return their number.

        Each of these shards gets a strike: it is split, and one with a single line left is closed at its third strike.
        ``live_owners`` is called, from any thread, at a moment when no process can claim. None of the owners it
        returns is dead; in a data folder every other owner is.
        """

    async def fail_interrupted(self, *, owner: str, errors: bytes, answer: bytes, at: int) -> list[Batch]:
        """Fail batches whose validating process died, and return them."""

    async def expire(self) -> list[str]:
        """Stop batches that are past their completion window by the store's own clock, and return their ids."""

    async def lease_finalizable(self, *, owner: str, lease: float, at: int) -> FinalizeLease | None:
        """Lease a batch that has no open or leased shard left; move it to ``finalizing`` unless it was stopped."""

    async def defer_finalize(self, leased: FinalizeLease, *, seconds: float) -> None:
        """Let no process try to finalize a batch for so long, and after batches that never failed. Raise LeaseLost."""

    async def stop_failed(self, batch_id: str) -> Batch | None:
        """Stop a batch by hand and return it as it is afterwards, or None if there is none.

        No line of it starts any more. Once it is drained, every line without a result fails. A batch that is being
        validated, or is terminal, does not change.
        """

    async def batch_shards(self, batch_id: str) -> list[Shard]:
        """Return all shards of a batch."""

    async def repair_batch(self, leased: FinalizeLease, changes: RepairChanges, *, at: int) -> None:
        """Repair a batch in one transaction, give back the charges of lost segments, and end the lease.

        Shards that become open run again, unless the batch was stopped meanwhile, which closes them. Without any, the
        batch can be finalized at once. Raise LeaseLost.
        """

    async def queue_state(self) -> QueueState:
        """Return what is open in the whole store: lines that no worker holds, and batches that have not ended."""

    async def segments(self, batch_id: str, *, after: int, limit: int) -> list[Segment]:
        """Return a page of a batch's segments, in the order in which they were recorded."""

    async def publish(
        self,
        batch_id: str,
        *,
        epoch: int,
        owner: str,
        files: Sequence[File],
        order: bytes | None = None,
        completed: int,
        failed: int,
        errors: Sequence[LineErrors] = (),
        at: int,
    ) -> BatchStatus:
        """Publish the files, final counts and terminal state of a batch in one transaction.

        ``order`` is the order of the lines in the files, if there are any. ``errors`` are those of lines that were not
        recorded before. Raise LeaseLost.
        """

    async def prunable(self, *, retention: int, without: Collection[str] = (), limit: int) -> list[str]:
        """Return the ids of batches that ended ``retention`` seconds ago or earlier and whose work still exists.

        The work of a batch is its shards, its segments and its work file. Batches in ``without`` are left out.
        """

    async def delete_work(self, batch_id: str) -> None:
        """Delete the shards, segments and samples of a terminal batch, and the reference to its work file."""

    async def known_batches(self, batch_ids: Sequence[str]) -> dict[str, KnownBatch]:
        """Return those of the batches that have a row, by id."""


class ResultsSnapshot(Struct, frozen=True, kw_only=True):
    """The places of the results of a batch at one moment: in its segments while it runs, then in its files."""

    batch: Batch
    segments: list[Segment] = []
    """The next segments of a batch that is not terminal, in the order in which they were recorded."""
    emptied: list[bytes] = []
    """The layouts of all segments of such a batch that a repair emptied."""
    order: bytes | None = None
    """The order of the lines in the files of a terminal batch, or None if an earlier version wrote these."""
    files: dict[str, File] = {}
    """The files of a terminal batch that are stored and not expired, by id."""


class Work(Struct, frozen=True, kw_only=True):
    """A batch's own copy of its lines."""

    key: str
    shards: list[Shard]


class Results(Protocol):
    """The results of batches, and which batches run the failed lines of others again."""

    async def results(
        self, project_id: str, batch_id: str, *, after: int, limit: int, at: int
    ) -> ResultsSnapshot | None:
        """Return where the results of a batch are: segments numbered above ``after``, or files not expired at ``at``.

        A segment with a higher number becomes visible later: a reader that is past a number misses none below it.
        """

    async def add_order(self, batch_id: str, order: bytes) -> None:
        """Store the order of result files that an earlier version wrote, unless another process did."""

    async def work_of(self, batch_id: str) -> Work | None:
        """Return where a batch's own copy of its lines is, or None if it was deleted."""

    async def lineage(self, project_id: str, batch_id: str) -> list[Batch] | None:
        """Return a batch and all batches that run failed lines of it again, or of these, in the order of creation."""


class CapSharing(Protocol):
    """Caps on lines in flight that several processes share."""

    async def heartbeat(self, report: Report, *, caps: Mapping[str, int], lease: float) -> dict[str, int]:
        """Store what a process reports for the length of the lease, and return its shares of the caps.

        A share is the number of lines that the process may have in flight to an upstream with a cap. The shares of all
        processes never sum to more than the cap.
        """

    async def leave(self, owner: str) -> None:
        """Remove a process, so that the others can use its shares."""


class Fleet(CapSharing, Protocol):
    """Processes that work on the same batches."""

    async def reports(self) -> list[Report]:
        """Return the latest report of each live process."""


class IdentityStore(Protocol):
    """Keeps the identity of the database and of the objects that belong to it."""

    async def identity(self) -> Identity:
        """Return the ids of the database and of its objects."""

    async def name_database(self, database_id: str) -> Identity:
        """Store the id of the database, unless there is one already, and return the ids as they are afterwards."""

    async def bind_objects(self, objects_id: str) -> Identity:
        """Store the id of the objects, unless there is one already, and return the ids as they are afterwards."""

    async def renew_identity(self, *, database_id: str, objects_id: str) -> None:
        """Replace both ids."""

    async def needs_objects(self) -> bool:
        """Return whether a row refers to an object."""


class Sighted(Struct, frozen=True, kw_only=True):
    """The result of recording objects without a row."""

    first: int
    """The number of objects that were seen for the first time."""
    due: list[str]
    """The keys of objects that were first seen long enough ago."""
    ignored: int
    """The number of objects that were not recorded because too many others are."""


class Sightings(Protocol):
    """Objects without a row that sweeps have seen. The store's clock decides how long ago that was."""

    async def sight(self, object_keys: Sequence[str], *, age: int, limit: int) -> Sighted:
        """Record that objects were seen. Those seen first at least ``age`` seconds ago are due.

        At most ``limit`` objects are recorded in all.
        """

    async def forget(self, object_keys: Sequence[str]) -> None:
        """Remove what was recorded of objects that were deleted."""

    async def forget_unseen(self, *, age: int) -> None:
        """Remove what was recorded of objects that were not seen in the last ``age`` seconds."""


class InspectedBatch(Struct, frozen=True, kw_only=True):
    """All rows about a batch, as of one moment."""

    batch: Batch
    """Its counts are those of its own row, which an active batch does not have yet."""
    work_key: str | None
    drained: bool
    owner: str | None
    failures: int
    repairs: int
    shards: list[InspectedShard]
    segments: list[Segment]
    """Without their data."""
    files: dict[str, InspectedFile]
    """Its input and its results, by id."""
    failed_by_code: int
    """The sum of its errors by code."""
    booked_requests: int
    booked_usage: Usage
    """The sums of its ledger entries."""
    unclaimable: list[int]
    """The numbers of open shards that no claim finds."""


class UnsettledShard(Struct, frozen=True, kw_only=True):
    """A shard that has bits set for lines without a result: ``former`` is its bitmap, ``settled`` the right one."""

    n: int
    epoch: int
    leased: bool
    former: bytes
    settled: bytes


class Inspection(Protocol):
    """Reads and corrections for a check of all stored data. Ids are in the order of their bytes."""

    async def inspected_ids(self, *, after: str, limit: int) -> list[str]:
        """Return a page of the ids of all batches."""

    async def inspect_batch(self, batch_id: str) -> InspectedBatch | None:
        """Return all rows about a batch, as of the same moment."""

    async def inspect_files(self, *, after: str, limit: int) -> list[InspectedFile]:
        """Return a page of all files, in any state."""

    async def inspect_file(self, file_id: str) -> InspectedFile | None:
        """Return a file in any state."""

    async def named_results(self, batch_ids: Sequence[str]) -> set[str]:
        """Return the ids of the result files that these batches name."""

    async def books_of(self, organization_id: str) -> OrganizationBooks | None:
        """Return the money of an organization and the sums of its ledger, as of the same moment."""

    async def set_to_ledger(self, organization_id: str) -> None:
        """Set the balance and the credits of an organization to the sums of its ledger."""

    async def correct_drained(self, batch_id: str) -> None:
        """Set whether an active batch is drained by the states of its shards."""

    async def correct_times(self, batch_id: str) -> None:
        """Move the times of a batch that are earlier than those before them."""

    async def close_ended_shards(self, batch_id: str) -> None:
        """Close the shards of an ended batch that could still run."""

    async def open_missing_lanes(self, batch_id: str) -> None:
        """Open the lanes of shards that no claim finds, and shards that are withheld although the batch is not held."""

    async def hand_over(self, batch_id: str, shards: Sequence[UnsettledShard]) -> None:
        """Let the service repair an active batch once it is drained.

        The shards are closed with lines that have no result, which a repair looks at. Raise LeaseLost if one of them
        changed since it was read. A batch that could not be finalized is tried again at once.
        """

    async def correct_counts(
        self, batch: Batch, *, completed: int, failed: int, usage: Usage, errors: Sequence[LineErrors]
    ) -> None:
        """Set the counts, tokens and errors by code of an ended batch. Raise LeaseLost if it changed."""


class Webhooks(Protocol):
    """Webhooks, and the deliveries of events to them. The end of a batch writes its deliveries by itself."""

    async def create_webhook(self, webhook: Webhook) -> None:
        """Store a webhook."""

    async def webhooks(self) -> list[Webhook]:
        """Return every webhook, oldest first."""

    async def webhook(self, webhook_id: str) -> Webhook | None:
        """Return a webhook."""

    async def rotate_webhook(self, webhook_id: str, *, secret: str) -> bool:
        """Give a webhook a new secret; return False if there is no such webhook."""

    async def delete_webhook(self, webhook_id: str) -> bool:
        """Delete a webhook and its deliveries; return False if there is no such webhook."""

    async def deliveries(self, webhook_id: str, *, limit: int) -> list[Delivery]:
        """Return the last deliveries to a webhook, newest first."""

    async def claim_deliveries(
        self, *, lease: int, in_flight: Mapping[str, str], per_project: int, limit: int
    ) -> list[tuple[Webhook, Delivery]]:
        """Begin an attempt of the first due delivery to each webhook, except to those that are being called.

        ``in_flight`` has these, with the project of each. A project gets no more attempts than make it ``per_project``
        with them, and the project that has the fewest comes first. Without ``end_attempt``, each is due again after
        ``lease`` seconds.
        """

    async def end_attempt(self, delivery: Delivery, result: SendResult, *, retry_in: int | None) -> None:
        """Store the result of an attempt: the event is delivered, due again after a while, or given up.

        A receiver that is gone disables its webhook. A result that comes too late changes nothing.
        """

    async def resend_delivery(self, webhook_id: str, delivery_id: int) -> bool:
        """Let an ended delivery be tried again, as if it were new.

        Return False if there is none, if it has not ended, or if its webhook is disabled.
        """

    async def delete_old_deliveries(self, *, age: int) -> None:
        """Delete what ended ``age`` seconds ago or earlier, and what can never be delivered."""


class Store(
    Accounts,
    SessionStore,
    Ledger,
    Files,
    Batches,
    ShardStore,
    Results,
    ReuseStore,
    Fleet,
    IdentityStore,
    Sightings,
    Inspection,
    Webhooks,
    Protocol,
):
    """Everything that the service keeps in its database."""

    async def check(self) -> None:
        """Commit a small write. Raise StoreDown."""

    async def schema_versions(self) -> SchemaVersions:
        """Return the version of the database's tables, and the version that this program expects. Raise StoreDown."""
