"""Keeps a chat within the token limit of its model (D6).

A chat that is too long is shortened at the end of its last user text, or refused, as the model's settings say.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder, encode
from msgspec.structs import replace

from batchline.domain.models import Model
from batchline.domain.outcomes import TOO_LONG, Failure
from batchline.domain.replies import Reply
from batchline.ports import Tokens

_TEMPLATE_TOKENS = 1024
"""The number is larger than that of the tokens that any chat template adds. Every other token stands for at least one
byte of the body, so a body that is shorter than the limit by this number need not be counted."""


class TokenLimit:
    """Applies the token limits of models. ``tokens`` has the token counter of each upstream, by its name."""

    def __init__(self, *, tokens: Mapping[str, Tokens]) -> None:
        self.tokens = tokens

    async def apply(self, body: bytes, model: Model, *, upstream: str) -> bytes | Failure | Reply:
        """Return the chat to send, or a Failure if it is too long.

        If the upstream answered something else than a token count, that Reply is returned.
        """
        limit = model.max_tokens
        if limit is None or len(body) + _TEMPLATE_TOKENS <= limit:
            return body
        tokens = self.tokens[upstream]
        count = await tokens.count(body)
        if not isinstance(count, int):
            return count
        if count <= limit:
            return body
        shortened = None if model.error_on_max_token else await _shorten(body, limit, tokens)
        return _too_long(count, limit) if shortened is None else shortened


async def _shorten(body: bytes, limit: int, tokens: Tokens) -> bytes | Reply | None:
    """Return the chat with as much of its last user text as fits, or None if it is too long even without that text.

    The tokens of the returned chat were counted. They cannot be derived from the count of another length, since a
    longer text can have fewer tokens.
    """
    text = _last_user_text(body)
    if text is None:
        return None
    best, fitting_length, exceeding_length = None, -1, len(text.whole)
    while exceeding_length - fitting_length > 1:
        middle = (fitting_length + exceeding_length) // 2
        shorter = text.shortened(middle)
        count = await tokens.count(shorter)
        if not isinstance(count, int):
            return count
        if count <= limit:
            best, fitting_length = shorter, middle
        else:
            exceeding_length = middle
    return best


def _too_long(count: int, limit: int) -> Failure:
    return replace(TOO_LONG, message=f"The input is {count} tokens long, and the model takes at most {limit}")


class _Text:
    """A text inside a request. Every other value of the request keeps its bytes."""

    def __init__(self, request: dict[str, Any], holder: dict[str, Any], field: str, whole: str) -> None:
        self._request, self._holder, self._field = request, holder, field
        self.whole = whole

    def shortened(self, length: int) -> bytes:
        """Return the request with only the first ``length`` characters of the text."""
        self._holder[self._field] = self.whole[:length]
        return encode(self._request)


class _Message(Struct):
    role: str
    content: str | list[Raw] | None = None


class _Part(Struct):
    type: str
    text: str | None = None


_fields = Decoder(dict[str, Raw])
_items = Decoder(list[Raw])
_message = Decoder(_Message)
_part = Decoder(_Part)


def _last_user_text(body: bytes) -> _Text | None:
    try:
        request: dict[str, Any] = dict(_fields.decode(body))
        messages: list[Any] = list(_items.decode(request["messages"]))
        return _text_in(request, messages)
    except (DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return None


def _text_in(request: dict[str, Any], messages: list[Any]) -> _Text | None:
    for index in reversed(range(len(messages))):
        message = _message.decode(messages[index])
        if message.role == "user":
            request["messages"] = messages
            messages[index] = fields = dict(_fields.decode(messages[index]))
            if isinstance(message.content, str):
                return _Text(request, fields, "content", message.content)
            return _text_in_parts(request, fields, list(message.content or ()))
    return None


def _text_in_parts(request: dict[str, Any], message: dict[str, Any], parts: list[Any]) -> _Text | None:
    for index in reversed(range(len(parts))):
        part = _part.decode(parts[index])
        if part.type == "text" and part.text is not None:
            message["content"] = parts
            parts[index] = fields = dict(_fields.decode(parts[index]))
            return _Text(request, fields, "text", part.text)
    return None
