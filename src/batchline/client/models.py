"""Of the API's objects, what a client looks at."""

from msgspec import Raw, Struct, field
from msgspec.json import Decoder

TERMINAL = frozenset({"completed", "failed", "expired", "cancelled"})


class RemoteFile(Struct, frozen=True):
    id: str


class Counts(Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def done(self) -> int:
        return self.completed + self.failed


class LineFault(Struct, frozen=True):
    message: str
    line: int | None = None


class Faults(Struct, frozen=True):
    data: list[LineFault] = field(default_factory=list)


class TokenCounts(Struct, frozen=True):
    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0


class RemoteBatch(Struct, frozen=True):
    id: str
    status: str
    request_counts: Counts = Counts()
    errors: Faults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    usage: Raw = Raw(b"null")

    @property
    def is_over(self) -> bool:
        return self.status in TERMINAL

    @property
    def tokens(self) -> TokenCounts:
        return _tokens.decode(self.usage) or TokenCounts()


_tokens = Decoder(TokenCounts | None)
file_decoder = Decoder(RemoteFile)
batch_decoder = Decoder(RemoteBatch)
