"""What the pipeline needs of an upstream: answers, streams, and counts of tokens."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from batchline.domain.replies import Reply


class Stream(Protocol):
    """A 2xx answer of server-sent events while it comes. Reading slowly slows the upstream down."""

    request_id: str | None

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Pieces as they come. Raises StreamBroken when the answer breaks off or stalls."""


class Upstream(Protocol):
    def post(self, path: str, body: bytes) -> asyncio.Future[Reply] | Coroutine[Any, Any, Reply]:
        """One attempt, which a future has begun already. Every way it can go wrong is a reply, never an exception, and
        cancelling it ends it."""


class SyncUpstream(Upstream, Protocol):
    """One that somebody waits for."""

    async def get(self, path: str) -> Reply: ...

    def stream(self, path: str, body: bytes) -> AbstractAsyncContextManager[Stream | Reply]:
        """As ``post``, where an answer of events is not waited for. Leaving before its end ends the request."""


class Tokens(Protocol):
    """How long inputs are, in an upstream's own tokens where it tells."""

    async def count(self, body: bytes) -> int | Reply:
        """Tokens of a chat request's input, or what came of asking an upstream that is in trouble."""
