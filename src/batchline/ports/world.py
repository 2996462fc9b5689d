"""What the pipeline needs of the machine and of upstreams."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from batchline.domain.limits import InputLimits
from batchline.domain.records import InputFault, NewShard
from batchline.domain.replies import Reply

T = TypeVar("T")


class Clock(Protocol):
    def now(self) -> float:
        """Unix time, which may jump."""

    def steady(self) -> float:
        """Seconds that only grow; they mean nothing in another process."""

    async def sleep(self, seconds: float) -> None: ...


class Random(Protocol):
    def bytes(self, count: int) -> bytes:
        """Unguessable, for keys and ids."""

    def uniform(self, low: float, high: float) -> float: ...


class Threads(Protocol):
    """Where blocking calls go so that the event loop never waits for a disk."""

    async def run(self, call: Callable[[], T]) -> T: ...


class Verdict(Struct, frozen=True, kw_only=True):
    """What validation found: the first hundred faults in file order, or the shards of the work file."""

    faults: list[InputFault]
    shards: list[NewShard]
    lines: int


class Validator(Protocol):
    async def validate(self, *, source: Path, work: Path, endpoint: str, limits: InputLimits) -> Verdict:
        """Check ``source`` in one pass and write its lines to ``work``, durably; off the event loop."""


class Stream(Protocol):
    """A 2xx answer of server-sent events while it comes. Reading slowly slows the upstream down."""

    request_id: str | None

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Pieces as they come. Raises StreamBroken when the answer breaks off or stalls."""


class Upstream(Protocol):
    def post(self, path: str, body: bytes) -> asyncio.Future[Reply] | Coroutine[Any, Any, Reply]:
        """One attempt, which a future has begun already. Every way it can go wrong is a reply, never an exception, and
        cancelling it ends it."""


class LiveUpstream(Upstream, Protocol):
    """One that somebody waits for."""

    async def get(self, path: str) -> Reply: ...

    def stream(self, path: str, body: bytes) -> AbstractAsyncContextManager[Stream | Reply]:
        """As ``post``, where an answer of events is not waited for. Leaving before its end ends the request."""


class Tokens(Protocol):
    """How long inputs are, in an upstream's own tokens where it tells."""

    async def count(self, body: bytes) -> int | Reply:
        """Tokens of a chat request's input, or what came of asking an upstream that is in trouble."""


class Writer(Protocol):
    """An object being written. It exists, whole and durable, once ``commit`` returned, and not before."""

    async def write(self, data: bytes) -> None: ...

    async def commit(self) -> None: ...

    async def abort(self) -> None: ...


class Objects(Protocol):
    """Bytes by key. Every call may raise ObjectsDown; reading may raise ObjectMissing."""

    async def put(self, key: str, data: bytes) -> None:
        """Durable when it returns."""

    async def create(self, key: str) -> Writer: ...

    async def adopt(self, path: Path, key: str) -> None:
        """Take a file of ``scratch`` as an object, durably."""

    def scratch(self) -> AbstractAsyncContextManager[Path]:
        """A path on a local disk to write to, gone afterwards unless it was adopted."""

    def local(self, key: str) -> AbstractAsyncContextManager[Path]:
        """The object as a local file, to be read by a child process."""

    async def read(self, key: str, start: int, length: int) -> bytes: ...

    def stream(self, key: str, start: int, length: int) -> AsyncIterator[bytes]: ...

    async def delete(self, key: str) -> None:
        """Also fine when it is not there."""

    async def delete_all(self, prefix: str) -> None: ...

    async def names(self, prefix: str) -> list[str]:
        """The names one level below a prefix."""

    def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        """All keys below a prefix, at most 1,000 at a time."""

    async def check(self) -> None:
        """Write, read and remove a few bytes."""
