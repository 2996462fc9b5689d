"""The fields of the API's objects that the client uses."""

from decimal import Decimal

from msgspec import Raw, Struct, field
from msgspec.json import Decoder

from batchline.domain.wait_text import AnyWait

TERMINAL_STATUSES = frozenset({"completed", "failed", "expired", "cancelled"})


class RemoteFile(Struct, frozen=True):
    """A file on the server."""

    id: str
    bytes: int = 0
    created_at: int = 0
    filename: str = ""
    purpose: str = ""
    expires_at: int | None = None


class RemotePage(Struct, frozen=True):
    """A page of a list. Its objects are kept as the server sent them."""

    data: list[Raw]
    has_more: bool = False
    last_id: str | None = None


class RemoteModel(Struct, frozen=True):
    """A model on the server."""

    id: str
    owned_by: str = ""


class Counts(Struct, frozen=True):
    """The lines of a batch by outcome."""

    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def done(self) -> int:
        """The number of lines that have an outcome."""
        return self.completed + self.failed


class LineFault(Struct, frozen=True):
    """A fault of the input that validation found."""

    message: str
    line: int | None = None


class Faults(Struct, frozen=True):
    """The list of faults of a failed batch."""

    data: list[LineFault] = field(default_factory=list)


class TokenCounts(Struct, frozen=True):
    """The tokens that a batch used."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0


class RemoteBatch(Struct, frozen=True):
    """A batch on the server."""

    id: str
    status: str
    request_counts: Counts = Counts()
    errors: Faults | None = None
    input_file_id: str = ""
    output_file_id: str | None = None
    error_file_id: str | None = None
    usage: Raw = Raw(b"null")
    endpoint: str = ""
    model: str | None = None
    metadata: Raw = Raw(b"null")
    created_at: int = 0
    in_progress_at: int | None = None
    expires_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelled_at: int | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether the batch has ended."""
        return self.status in TERMINAL_STATUSES

    @property
    def ended_at(self) -> int | None:
        """The time at which the batch ended, or None if it has not."""
        return self.completed_at or self.failed_at or self.expired_at or self.cancelled_at

    @property
    def tokens(self) -> TokenCounts:
        """The tokens used, zero if the server reports none."""
        return _tokens.decode(self.usage) or TokenCounts()


class RemoteEta(Struct, frozen=True):
    """Seconds until the end of a batch."""

    seconds: int
    low: int = 0
    high: int = 0


class ErrorSample(Struct, frozen=True):
    """A line that failed."""

    custom_id: str = ""
    message: str = ""


class ErrorCount(Struct, frozen=True):
    """The lines that failed with one code."""

    code: str
    count: int
    sample: ErrorSample = ErrorSample()


class RemoteProgress(Struct, frozen=True):
    """The progress of a batch on the server."""

    batch_id: str = ""
    status: str = ""
    request_counts: Counts = Counts()
    rate: float = 0.0
    eta: RemoteEta | None = None
    waiting_for: AnyWait | None = None
    in_flight: int = 0
    concurrency: int = 0
    errors: list[ErrorCount] = field(default_factory=list)
    reused: int = 0
    cost: float = 0.0
    saved: float = 0.0
    max_cost: float | None = None
    parent_batch_id: str | None = None
    child_batch_ids: list[str] = field(default_factory=list)


class RemoteUsage(Struct, frozen=True):
    """The usage of one model in one bucket of time. Amounts are in units."""

    start_time: int
    model: str
    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cost: Decimal = Decimal(0)
    reused: int = 0
    saved: Decimal = Decimal(0)


class UsagePage(Struct, frozen=True):
    """The usage of a project over a period."""

    data: list[RemoteUsage]


class CheckedModel(Struct, frozen=True):
    """The lines of one model in a file that was checked."""

    model: str | None
    lines: int
    enabled: bool = True
    input_tokens: int | None = None
    output_tokens_at_most: int | None = None
    cost_at_most: float | str | None = None
    estimated: bool = False
    counted_lines: int = 0


class SecondsRange(Struct, frozen=True):
    """The seconds that a file will take, at best and at worst."""

    low: float
    high: float


class RemoteCheck(Struct, frozen=True):
    """The result of the check of a file."""

    valid: bool
    lines: int
    errors: Faults | None = None
    models: list[CheckedModel] = field(default_factory=list)
    duplicates: int = 0
    seconds: SecondsRange | None = None
    estimated: bool = False


_tokens = Decoder(TokenCounts | None)
file_decoder = Decoder(RemoteFile)
batch_decoder = Decoder(RemoteBatch)
page_decoder = Decoder(RemotePage)
model_decoder = Decoder(RemoteModel)
progress_decoder = Decoder(RemoteProgress)
check_decoder = Decoder(RemoteCheck)
usage_decoder = Decoder(UsagePage)
object_decoder = Decoder(dict[str, Raw])
