"""How many tokens a chat is to its upstream, asked by the routes that inference servers have for it.

::

    vLLM, SGLang   POST /tokenize with the chat                       {"count"}
    llama.cpp      POST /apply-template with the chat, {"prompt"},    {"tokens"}
                   then POST /tokenize with that prompt
    others         an estimate: one token for every four bytes of UTF-8 in the texts of the messages, rounded up,
                   and four for each message; what is no text counts as nothing

The estimate also stands in where a server that counts finds the chat itself wrong, and never where it is in trouble.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from msgspec import DecodeError, Meta, Raw, Struct
from msgspec.json import Decoder, encode

from batchline.domain.replies import Answer, Fault, Reply
from batchline.ports import Clock, Upstream

_MEMORY_SECONDS = 600.0
"""How long a server is taken for what it was found to be; meanwhile another may have been put in its place."""

_TROUBLE_STATUSES = frozenset({408, 409, 429})
_BYTES_PER_TOKEN = 4
_TOKENS_PER_MESSAGE = 4

_Told = TypeVar("_Told")
_Route = Callable[[Upstream, bytes], Awaitable[int | Reply | None]]
"""Tokens of a chat; None where the server has no such route, or does not take this chat."""


class UpstreamTokens:
    def __init__(self, upstream: Upstream, *, clock: Clock) -> None:
        self._upstream, self._clock = upstream, clock
        self._known: dict[str, _Known] = {}
        """By model: behind one address may be many servers."""

    async def count(self, body: bytes) -> int | Reply:
        chat = _chat.decode(body)
        route = await self._route(chat.model)
        if isinstance(route, Answer | Fault):
            return route
        counted = None if route is None else await route(self._upstream, body)
        return _estimate(chat) if counted is None else counted

    async def _route(self, model: str) -> _Route | Reply | None:
        known = self._known.get(model)
        if known is not None and self._clock.steady() < known.until:
            return known.route
        route = await self._find_route(model)
        if not isinstance(route, Answer | Fault):
            self._known[model] = _Known(route=route, until=self._clock.steady() + _MEMORY_SECONDS)
        return route

    async def _find_route(self, model: str) -> _Route | Reply | None:
        """Try the routes with a chat that nobody can find fault with."""
        chat = encode({"model": model, "messages": [{"role": "user", "content": "a"}]})
        for route in (_count_chat, _count_prompt):
            counted = await route(self._upstream, chat)
            if isinstance(counted, Answer | Fault):
                return counted
            if counted is not None:
                return route
        return None


class _Known(Struct, frozen=True, kw_only=True):
    route: _Route | None
    until: float


async def _count_chat(upstream: Upstream, body: bytes) -> int | Reply | None:
    counted = await _ask(upstream, "/tokenize", body, _counted)
    return counted.count if isinstance(counted, _Counted) else counted


async def _count_prompt(upstream: Upstream, body: bytes) -> int | Reply | None:
    rendered = await _ask(upstream, "/apply-template", body, _rendered)
    if not isinstance(rendered, _Rendered):
        return rendered
    # As llama.cpp itself turns the prompt of a chat into tokens.
    prompt = encode({"content": rendered.prompt, "add_special": True, "parse_special": True})
    tokenized = await _ask(upstream, "/tokenize", prompt, _tokenized)
    return len(tokenized.tokens) if isinstance(tokenized, _Tokenized) else tokenized


async def _ask(upstream: Upstream, path: str, body: bytes, decoder: Decoder[_Told]) -> _Told | Reply | None:
    reply = await upstream.post(path, body)
    if isinstance(reply, Fault) or _is_trouble(reply.status):
        return reply
    if not 200 <= reply.status < 300:
        return None
    try:
        return decoder.decode(reply.body)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _is_trouble(status: int) -> bool:
    return status in _TROUBLE_STATUSES or (status >= 500 and status != 501)


def _estimate(chat: "_Chat") -> int:
    length = sum(_text_bytes(message) for message in chat.messages)
    return -(-length // _BYTES_PER_TOKEN) + _TOKENS_PER_MESSAGE * len(chat.messages)


def _text_bytes(message: Raw) -> int:
    try:
        content = _message.decode(message).content
    except (DecodeError, UnicodeDecodeError):
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
