"""The records of the store, as frozen values: files, batches, shards, segments, keys, charges."""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.json import Decoder
from msgspec.json import encode as encode_json

from batchline.domain.checksum import Checksum
from batchline.domain.errors import Damaged
from batchline.domain.states import BatchStatus, FileState, Hold, Reuse, ShardState, Stop
from batchline.domain.usage import NOTHING, Usage, total

BATCH = "batch"
BATCH_OUTPUT = "batch_output"
OTHER_PURPOSES = ("assistants", "assistants_output", "evals", "fine-tune", "fine-tune-results", "user_data", "vision")
"""The purposes of OpenAI's files that no file of this service has. A list of such files is empty."""

READ_SCOPE, BATCH_SCOPE, INFERENCE_SCOPE = "read", "batch", "inference"
ALL_SCOPES = "batch,inference,read"
"""Scopes are kept as text, sorted and separated by commas."""


class Owner(Struct, frozen=True, kw_only=True):
    """The key that authenticated a request, with its project and organization."""

    key_id: str
    project_id: str
    organization_id: str
    scopes: str = ALL_SCOPES
    """The scopes of the key."""
    funds: int = 0
    """Nano-units that the organization has left, free credits included."""
    daily_budget: int | None = None
    """Nano-units that the project may spend in a day, or None if the settings file decides."""

    def may(self, scope: str) -> bool:
        """Return whether the key has a scope."""
        return scope in self.scopes.split(",")


class Session(Struct, frozen=True, kw_only=True):
    """A person who is signed in to the console with a key."""

    owner: Owner
    project: str
    organization: str
    key_name: str
    key_hint: str
    expires_at: int


class AdminSession(Struct, frozen=True, kw_only=True):
    """The administrator, signed in to the console."""

    project: Session | None
    """The project that is open, with the administrator's key in it."""
    expires_at: int


class Organization(Struct, frozen=True, kw_only=True):
    id: str
    name: str
    created_at: int
    balance: int
    """Nano-units, like all money; below zero after an overdraft."""
    credits: int


class OrganizationBooks(Struct, frozen=True, kw_only=True):
    """The money of an organization, and the sums of its ledger entries."""

    id: str
    name: str
    balance: int
    credits: int
    booked_balance: int
    booked_credits: int


class Project(Struct, frozen=True, kw_only=True):
    id: str
    name: str
    organization_id: str
    organization: str
    created_at: int
    daily_budget: int | None = None
    """Nano-units that it may spend in a day, or None if the settings file decides."""


class Deletion(Struct, frozen=True, kw_only=True):
    """The outcome of deleting a key, a project or an organization: it is done unless something stands in its way."""

    open_batches: list[str] = []
    """Batches that have not ended, the oldest first; at most a few of them."""
    projects: list[str] = []
    """The names of projects that were not deleted before their organization."""
    balance: int = 0
    """Nano-units of paid money that are left, or below zero that are owed."""

    @property
    def is_done(self) -> bool:
        return not (self.open_batches or self.projects or self.balance)


class QueueState(Struct, frozen=True, kw_only=True):
    """The work that is open in a store."""

    lines: int
    """Lines in shards that no worker holds."""
    open_batches: dict[str, int]
    """Batches that have not ended, by status."""
    oldest_created_at: int | None
    """Creation of the oldest batch with lines that no worker holds."""
    nearest_expires_at: int | None
    """End of the window of the batch that expires first, among those with unfinished lines."""


class Charge(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The usage of answers of one model, and their cost."""

    model: str
    requests: int
    usage: Usage
    cost: int
    reused: int = 0
    """Lines that took an earlier answer, without a request."""
    saved: int = 0
    """The amount that they would have cost."""


_charges = Decoder(list[Charge])


def by_model(charges: Iterable[Charge]) -> list[Charge]:
    """Sum charges by model, sorted by model: the order in which every transaction locks the rows of the sums."""
    groups: dict[str, list[Charge]] = {}
    for charge in charges:
        groups.setdefault(charge.model, []).append(charge)
    return [
        Charge(
            model=model,
            requests=sum(charge.requests for charge in group),
            usage=total([charge.usage for charge in group]),
            cost=sum(charge.cost for charge in group),
            reused=sum(charge.reused for charge in group),
            saved=sum(charge.saved for charge in group),
        )
        for model, group in sorted(groups.items())
    ]


class LedgerEntry(Struct, frozen=True, kw_only=True):
    """One change of an organization's balance; negative if money was spent."""

    at: int
    kind: str
    balance: int
    credits: int
    project: str | None
    model: str
    batch_id: str | None
    requests: int


class UsageEntry(Struct, frozen=True, kw_only=True):
    """The usage of one model by a project over a period, and its cost."""

    organization: str
    project: str
    project_id: str
    model: str
    batch_id: str | None
    since: int
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    cost: int
    reused: int
    """Lines that took an earlier answer."""
    saved: int
    """The amount that they would have cost."""


class ProjectUsage(Struct, frozen=True, kw_only=True):
    """The usage of one model by a project in one bucket of time."""

    start: int
    model: str
    lines: int
    """The answers to lines of batches."""
    requests: int
    """All answers: those to lines, and those to synchronous calls."""
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    cost: int
    reused: int
    """Lines that took an earlier answer."""
    saved: int
    """The amount that they would have cost."""


class Key(Struct, frozen=True, kw_only=True):
    id: str
    project_id: str
    project: str
    organization_id: str
    organization: str
    hint: str
    name: str
    scopes: str
    created_at: int
    expires_at: int | None
    last_used_at: int | None
    revoked_at: int | None


class File(Struct, frozen=True, kw_only=True):
    id: str
    project_id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int
    is_error: bool
    object_key: str
    checksum: int | None = None
    """The checksum of a result file. An upload has none, and neither has a file of a version before checksums."""


class InspectedFile(File, frozen=True, kw_only=True):
    """A file in any state."""

    state: FileState


class InputFault(Struct, frozen=True):
    """One error in an input file; ``line`` is None if no single line is at fault."""

    message: str
    line: int | None = None


class Batch(Struct, frozen=True, kw_only=True):
    id: str
    project_id: str
    key_id: str
    endpoint: str
    input_file_id: str
    metadata: bytes
    status: BatchStatus
    created_at: int
    expires_at: int
    errors: bytes | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    model: str | None = None
    """The model of all lines, or None if they name several."""
    stop: Stop | None = None
    epoch: int = 0
    parent_batch_id: str | None = None
    """The batch whose failed lines this one runs again. It is known where one batch is read, but not in lists."""
    hold: Hold | None = None
    """None if the batch was created without a hold."""
    held_at: int | None = None
    output_lifetime: int | None = None
    """Seconds after which its result files expire, or None for as long as all files are kept."""
    max_cost: int | None = None
    """The nano-units that it may cost, or None without a limit."""
    reuse: Reuse | None = None
    """None if the batch was created without reuse."""

    @property
    def is_held(self) -> bool:
        """Whether no line of it starts until its owner releases it."""
        return self.hold is Hold.HELD and self.status is BatchStatus.IN_PROGRESS and self.stop is None

    @property
    def usage(self) -> Usage:
        """The tokens of all recorded lines."""
        return Usage(
            input_tokens=self.input_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            reasoning_tokens=self.reasoning_tokens,
        )


SHARED_LANE = ""
"""The model of shards whose lines name no model, or one of those that get no shards of their own."""


class NewShard(Struct, frozen=True, kw_only=True):
    """Consecutive lines in a work file, as validation divided it. They name one model, except in the shared lane."""

    offset: int
    length: int
    lines: int
    model: str
    checksum: int | None = None


class Shard(Struct, frozen=True, kw_only=True):
    """Leased lines: ``settled`` has a bit set for every line that is recorded or belongs to another shard."""

    batch_id: str
    n: int
    offset: int
    length: int
    lines: int
    model: str
    settled: bytes
    epoch: int
    strikes: int
    checksum: int | None = None
    """The checksum of the shard's part of the work file, or None if a version before checksums wrote it."""


class InspectedShard(Shard, frozen=True, kw_only=True):
    """A shard with its state and counts."""

    state: ShardState
    owner: str | None
    completed: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int

    @property
    def usage(self) -> Usage:
        """The tokens of the recorded lines."""
        return Usage(
            input_tokens=self.input_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            reasoning_tokens=self.reasoning_tokens,
        )


class Lane(Struct, frozen=True, kw_only=True):
    """Lines of a project and a model; None stands for every project or model."""

    model: str | None
    project_id: str | None


class LeasedBatch(Struct, frozen=True, kw_only=True):
    """The facts about a batch that a worker needs to run its lines."""

    id: str
    project_id: str
    organization_id: str
    endpoint: str
    expires_at: int
    work_key: str
    key_revoked: bool
    funds: int
    """Nano-units that the organization has left."""
    daily_budget: int | None = None
    """Nano-units that the project may spend in a day, or None if the settings file decides."""
    cost_left: int | None = None
    """Nano-units that the batch may still cost, or None without a limit."""


class Bill(Struct, frozen=True, kw_only=True):
    """The cost of a batch, and the amount that it saved, in nano-units."""

    cost: int = 0
    reused: int = 0
    """Lines that took an earlier answer."""
    saved: int = 0
    """The amount that they would have cost."""


class Balances(Struct, frozen=True, kw_only=True):
    """The nano-units that are left after a record."""

    funds: int
    """Those of the organization, which may be below zero."""
    cost_left: int | None = None
    """Those that the batch may still cost, or None without a limit."""


class ShardProgress(Struct, frozen=True, kw_only=True):
    """The lines that one flush adds to a shard.

    The write is void unless the shard still has this epoch and ``former`` is still its bitmap. The database may have
    gone back to an earlier state meanwhile, in which lines that are recorded as far as this process knows are not.
    """

    n: int
    epoch: int
    former: bytes
    settled: bytes
    completed: int
    failed: int
    usage: Usage = NOTHING
    done: bool


class Segment(Struct, frozen=True, kw_only=True):
    """Recorded lines of a batch: output lines first, then error lines; small segments are stored in the row itself.

    ``lines``, ``checksum`` and ``charges`` are None if a version before checksums recorded it.
    """

    id: int = 0
    output_bytes: int
    error_bytes: int
    object_key: str | None = None
    data: bytes | None = None
    lines: int | None = None
    checksum: int | None = None
    charges: bytes | None = None
    """The charges for its lines, as JSON. They are given back if the segment is lost."""
    layout: bytes | None = None
    """The lines that it has, or had before a repair emptied it (``domain/result_order.py``)."""

    @property
    def is_emptied(self) -> bool:
        """Whether a repair removed its bytes."""
        return self.output_bytes + self.error_bytes == 0

    @property
    def cost(self) -> int:
        """The cost of its lines in nano-units; 0 if a version before checksums recorded it."""
        return sum(charge.cost for charge in _charges.decode(self.charges or b"[]"))

    @property
    def place(self) -> str:
        """The place of its bytes: the key of its object, or the number of its row."""
        return self.object_key or f"row {self.id} of segments"

    def verify(self, read: Checksum) -> None:
        """Raise Damaged unless the bytes that were read are those that were recorded."""
        if read.bytes != self.output_bytes + self.error_bytes or self.checksum not in (None, read.value):
            raise Damaged(self.place)


class RepairedShard(Struct, frozen=True, kw_only=True):
    """A shard as it is after a repair: its bitmap and counts say what the readable segments hold."""

    n: int
    settled: bytes
    completed: int
    failed: int
    usage: Usage = NOTHING
    state: ShardState


def escape_line_breaks(line: bytes) -> bytes:
    """Escape the characters that ``str.splitlines()`` and the SDK's ``iter_lines()`` treat as line ends.

    U+2028, U+2029 and U+0085 may occur raw in JSON strings, and nowhere else in valid JSON.
    """
    if line.isascii():
        return line
    return (
        line.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029").replace(b"\xc2\x85", b"\\u0085")
    )


def json_text(value: str) -> bytes:
    """Return a string as JSON that stays on one line, however a client splits lines."""
    return escape_line_breaks(encode_json(value))


class SchemaVersions(Struct, frozen=True, kw_only=True):
    """The version of the tables in the database, and the version that the program is written for."""

    database: int
    program: int
