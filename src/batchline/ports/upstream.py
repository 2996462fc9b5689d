"""Defines what the pipeline needs of an upstream: answers, streams, token counts, and the engine's queue length."""

from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

from batchline.domain.engine_queue import QueueLength
from batchline.domain.replies import Reply

if TYPE_CHECKING:
    # The processes that validate files use these ports too, and would wait for the import.
    import asyncio


class Stream(Protocol):
    """A 2xx answer of server-sent events while it arrives. Reading slowly slows the upstream down."""

    request_id: str | None

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield pieces as they arrive. Raise StreamBroken if the answer breaks off or stalls."""


class Upstream(Protocol):
    """A server that answers the lines of batches."""

    def post(self, path: str, body: bytes) -> "asyncio.Future[Reply] | Coroutine[Any, Any, Reply]":
        """Make one attempt. If a future is returned, the attempt has begun already.

        Every failure is a reply, never an exception. Cancelling the attempt ends it.
        """


class SyncUpstream(Upstream, Protocol):
    """An upstream for synchronous calls, whose client waits for the answer."""

    async def get(self, path: str) -> Reply:
        """Make one GET request."""

    def stream(self, path: str, body: bytes) -> AbstractAsyncContextManager[Stream | Reply]:
        """Post as ``post`` does, but provide an answer of events as a stream before it is complete.

        Leaving the context before the end of the stream ends the request.
        """


class Tokens(Protocol):
    """Counts the tokens of inputs, with the upstream's own tokenizer if it offers one."""

    async def count(self, body: bytes) -> int | Reply:
        """Return the number of input tokens of a chat request, or the reply of an upstream that failed to count."""

    async def count_exactly(self, body: bytes) -> int | None:
        """Return the number by the upstream's own tokenizer; None if it has none, fails, or rejects the chat."""


class EngineQueue(Protocol):
    """Reads the queue length of the inference engine behind an upstream."""

    async def read(self) -> QueueLength | Reply | None:
        """Return the queue length, the reply of an engine that is failing, or None if the engine does not report one.

        None means that there is nothing to wait for; a reply means that a later read may succeed.
        """
