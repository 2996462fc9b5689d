"""The fields of the API's objects that the client uses."""

from msgspec import Raw, Struct, field
from msgspec.json import Decoder

TERMINAL_STATUSES = frozenset({"completed", "failed", "expired", "cancelled"})


class RemoteFile(Struct, frozen=True):
    """A file on the server."""

    id: str


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
    output_file_id: str | None = None
    error_file_id: str | None = None
    usage: Raw = Raw(b"null")

    @property
    def is_terminal(self) -> bool:
        """Whether the batch has ended."""
        return self.status in TERMINAL_STATUSES

    @property
    def tokens(self) -> TokenCounts:
        """The tokens used, zero if the server reports none."""
        return _tokens.decode(self.usage) or TokenCounts()


class RemoteWait(Struct, frozen=True):
    """Why lines of a batch wait. Which fields are set depends on the reason."""

    reason: str
    upstream: str = ""
    model: str | None = None
    detail: str = ""
    until: int = 0
    rate: float | None = None
    in_flight: int = 0
    limit: int = 0
    by_other_projects: int = 0
    lines: int = 0
    workers: int = 0
    code: str = ""
    message: str = ""


class RemoteProgress(Struct, frozen=True):
    """The progress of a batch on the server."""

    waiting_for: RemoteWait | None = None


_tokens = Decoder(TokenCounts | None)
file_decoder = Decoder(RemoteFile)
batch_decoder = Decoder(RemoteBatch)
progress_decoder = Decoder(RemoteProgress)
