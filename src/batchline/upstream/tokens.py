"""Counts the tokens of a chat with the routes that inference servers have for it.

::

    vLLM, SGLang   POST /tokenize with the chat                       {"count"}
    llama.cpp      POST /apply-template with the chat, {"prompt"},    {"tokens"}
                   then POST /tokenize with that prompt
    others         an estimate: one token for every four bytes of UTF-8 in the texts of the messages, rounded up,
                   and four for each message; content that is not text counts as nothing

The estimate is also used if a server that can count rejects the chat itself. It is never used if the server is
overloaded or failing: then the server's reply is returned.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from msgspec import DecodeError, Meta, Raw, Struct
from msgspec.json import Decoder, encode

from batchline.domain.replies import Answer, Fault, Reply
from batchline.ports import Clock, Upstream

_ROUTE_CACHE_SECONDS = 600.0
"""The time for which a found route is used. Then it is looked for again: another server may have replaced the first."""

_MAX_ROUTES = 256
"""The most models whose route is remembered. Clients choose the names of models where none are configured."""

_RETRYABLE_STATUSES = frozenset({408, 409, 429})
_BYTES_PER_TOKEN = 4
_TOKENS_PER_MESSAGE = 4

_Document = TypeVar("_Document")
_Route = Callable[[Upstream, bytes], Awaitable[int | Reply | None]]
"""Counts the tokens of a chat; returns None if the server has no such route, or rejects this chat."""


class UpstreamTokens:
    """Counts tokens with one upstream, and remembers for each model which route works."""

    def __init__(self, upstream: Upstream, *, clock: Clock) -> None:
        self._upstream, self._clock = upstream, clock
        self._routes: dict[str, _CachedRoute] = {}
        """By model, because one address may lead to many servers."""
        self._estimating = asyncio.Lock()

    async def count(self, body: bytes) -> int | Reply:
        """Return the number of tokens of a chat request, or the upstream's reply if it is overloaded or failing."""
        chat = _chat.decode(body)
        counted = await self._ask(chat.model, body)
        return await self._estimate(chat) if counted is None else counted

    async def count_exactly(self, body: bytes) -> int | None:
        """Return the number by the upstream's own tokenizer; None if it has none, fails, or rejects the chat."""
        try:
            model = _chat.decode(body).model
        except (DecodeError, UnicodeDecodeError, RecursionError):
            return None
        counted = await self._ask(model, body)
        return counted if isinstance(counted, int) else None

    async def _ask(self, model: str, body: bytes) -> int | Reply | None:
        """Return the number, or the upstream's reply if it fails; None if it cannot count this chat."""
        route = await self._route(model)
        if route is None or isinstance(route, Answer | Fault):
            return route
        return await route(self._upstream, body)

    async def _estimate(self, chat: "_Chat") -> int:
        """Return the estimate. Only one is made between two turns of the event loop.

        That of a chat with 100,000 messages takes 0.2 s, and a chat that is shortened needs up to 22 of them.
        """
        async with self._estimating:
            await self._clock.sleep(0)
            return _estimate(chat)

    async def _route(self, model: str) -> _Route | Reply | None:
        cached = self._routes.get(model)
        if cached is not None and self._clock.steady() < cached.expires_at:
            return cached.route
        route = await self._find_route(model)
        if not isinstance(route, Answer | Fault):
            if len(self._routes) >= _MAX_ROUTES:
                del self._routes[next(iter(self._routes))]
            self._routes[model] = _CachedRoute(route=route, expires_at=self._clock.steady() + _ROUTE_CACHE_SECONDS)
        return route

    async def _find_route(self, model: str) -> _Route | Reply | None:
        """Try the routes with a chat that every server accepts, and return the first that counts it."""
        chat = encode({"model": model, "messages": [{"role": "user", "content": "a"}]})
        for route in (_count_chat, _count_prompt):
            counted = await route(self._upstream, chat)
            if isinstance(counted, Answer | Fault):
                return counted
            if counted is not None:
                return route
        return None


class _CachedRoute(Struct, frozen=True, kw_only=True):
    route: _Route | None
    expires_at: float


async def _count_chat(upstream: Upstream, body: bytes) -> int | Reply | None:
    counted = await _post(upstream, "/tokenize", body, _counted)
    return counted.count if isinstance(counted, _Counted) else counted


async def _count_prompt(upstream: Upstream, body: bytes) -> int | Reply | None:
    rendered = await _post(upstream, "/apply-template", body, _rendered)
    if not isinstance(rendered, _Rendered):
        return rendered
    # llama.cpp itself turns the prompt of a chat into tokens in the same way.
    prompt = encode({"content": rendered.prompt, "add_special": True, "parse_special": True})
    tokenized = await _post(upstream, "/tokenize", prompt, _tokenized)
    return len(tokenized.tokens) if isinstance(tokenized, _Tokenized) else tokenized


async def _post(upstream: Upstream, path: str, body: bytes, decoder: Decoder[_Document]) -> _Document | Reply | None:
    reply = await upstream.post(path, body)
    if isinstance(reply, Fault) or _is_retryable(reply.status):
        return reply
    if not 200 <= reply.status < 300:
        return None
    try:
        return decoder.decode(reply.body)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _is_retryable(status: int) -> bool:
    return status in _RETRYABLE_STATUSES or (status >= 500 and status != 501)


def _estimate(chat: "_Chat") -> int:
    length = sum(_text_bytes(message) for message in chat.messages)
    return -(-length // _BYTES_PER_TOKEN) + _TOKENS_PER_MESSAGE * len(chat.messages)


def _text_bytes(message: Raw) -> int:
    try:
        content = _message.decode(message).content
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return 0
    texts = [content] if isinstance(content, str) else [part.text for part in content or ()]
    return sum(len(text.encode()) for text in texts if text)


class _Part(Struct):
    text: str | None = None


class _Message(Struct):
    content: str | list[_Part] | None = None


class _Chat(Struct):
    model: str = ""
    messages: list[Raw] = []


class _Counted(Struct):
    count: Annotated[int, Meta(gt=0)]


class _Rendered(Struct):
    prompt: str


class _Tokenized(Struct):
    tokens: Annotated[list[int], Meta(min_length=1)]


_chat = Decoder(_Chat)
_message = Decoder(_Message)
_counted = Decoder(_Counted)
_rendered = Decoder(_Rendered)
_tokenized = Decoder(_Tokenized)
