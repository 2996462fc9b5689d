"""Answers made by rule, in OpenAI's shapes. They never pretend to come from a model."""

from hashlib import blake2b
from typing import Annotated, Any

from msgspec import DecodeError, Meta, Struct
from msgspec.json import Decoder, encode

CREATED = 1_700_000_000
ECHOED_CHARACTERS = 200

CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"


class RequestUnreadable(ValueError):
    """The body is not what the endpoint takes."""


class _Part(Struct):
    text: str = ""


class _Message(Struct):
    role: str
    content: str | list[_Part] | None = None

    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(Struct):
    model: str
    messages: Annotated[list[_Message], Meta(min_length=1)]

    def prompt(self) -> str:
        """The text of the last user message, where directives are looked for."""
        return next((message.text() for message in reversed(self.messages) if message.role == "user"), "")

    def answer(self, identity: str, padding: str = "") -> bytes:
        text = f"scripted answer to: {self.prompt()[:ECHOED_CHARACTERS]}{padding}"
        asked = sum(len(message.text().split()) for message in self.messages)
        said = len(text.split())
        return encode(
            {
                "id": f"chatcmpl-{identity}",
                "object": "chat.completion",
                "created": CREATED,
                "model": self.model,
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": text, "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said},
                "system_fingerprint": "fp_scripted",
            }
        )


class EmbeddingsRequest(Struct):
    model: str
    input: str | Annotated[list[Any], Meta(min_length=1)]

    def prompt(self) -> str:
        return self._inputs()[-1]

    def answer(self, identity: str, padding: str = "") -> bytes:
        inputs = self._inputs()
        tokens = sum(len(text.split()) for text in inputs)
        return encode(
            {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": index, "embedding": _vector(text)}
                    for index, text in enumerate(inputs)
                ],
                "model": self.model + padding,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    def _inputs(self) -> list[str]:
        """One text an input; arrays of tokens are taken as the text of their JSON."""
        if isinstance(self.input, str):
            return [self.input]
        if all(isinstance(item, int) for item in self.input):
            return [encode(self.input).decode()]
        return [item if isinstance(item, str) else encode(item).decode() for item in self.input]


ScriptedRequest = ChatRequest | EmbeddingsRequest

_DECODERS: dict[str, Decoder[ChatRequest] | Decoder[EmbeddingsRequest]] = {
    CHAT: Decoder(ChatRequest),
    EMBEDDINGS: Decoder(EmbeddingsRequest),
}


def read_request(path: str, body: bytes) -> ScriptedRequest | None:
    """The request, or None where nothing answers. Raises RequestUnreadable."""
    decoder = _DECODERS.get(path)
    if decoder is None:
        return None
    try:
        return decoder.decode(body)
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestUnreadable(f"the request cannot be read: {error}") from None


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    kind = code if code in _OWN_TYPE else _TYPES.get(status, "server_error" if status >= 500 else _INVALID)
    return encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def page(status: int) -> bytes:
    return b"<!DOCTYPE html><title>%d</title><p>This page is scripted. It is not JSON.</p>\n" % status


def _vector(text: str) -> list[float]:
    return [round(byte / 127.5 - 1, 6) for byte in blake2b(text.encode(), digest_size=8).digest()]


_INVALID = "invalid_request_error"
_OWN_TYPE = frozenset({"insufficient_quota", "rate_limit_exceeded"})
_TYPES = {401: "authentication_error", 403: "authentication_error", 429: "rate_limit_exceeded"}
