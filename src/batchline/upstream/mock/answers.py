"""Answers made by rule, in OpenAI's shapes. They never pretend to come from a model."""

import re
from hashlib import blake2b
from typing import Annotated, Any

from msgspec import DecodeError, Meta, Struct
from msgspec.json import Decoder, encode

CREATED = 1_700_000_000
ECHOED_CHARACTERS = 200

CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
TEXT_ROUTES = ("/summary", "/usecase/classify/iab", "/gliner")

_WORD = re.compile(r"\s*\S+|\s+$")


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


class _StreamOptions(Struct):
    include_usage: bool = False


class ChatRequest(Struct):
    model: str
    messages: Annotated[list[_Message], Meta(min_length=1)]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    def prompt(self) -> str:
        """Where directives are looked for."""
        return _last_said(self.messages)

    def answer(self, identity: str, *, padding: str = "", cached: int | None = None) -> bytes:
        text = _echo(self.prompt(), padding)
        message = {"role": "assistant", "content": text, "refusal": None}
        return encode(
            {
                "id": f"chatcmpl-{identity}",
                "object": "chat.completion",
                "created": CREATED,
                "model": self.model,
                "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
                "usage": _chat_usage(_words(self.messages), text, cached),
                "system_fingerprint": "fp_scripted",
            }
        )

    def events(self, identity: str, *, padding: str = "", cached: int | None = None) -> list[bytes]:
        """The answer as server-sent events, if that is what was asked for."""
        if not self.stream:
            return []
        text = _echo(self.prompt(), padding)
        start = {"role": "assistant", "content": "", "refusal": None}
        deltas = [start, *({"content": word} for word in _WORD.findall(text)), {}]
        chunks = [self._chunk(identity, [_choice(delta)]) for delta in deltas]
        if self.stream_options is not None and self.stream_options.include_usage:
            usage = _chat_usage(_words(self.messages), text, cached)
            chunks = [chunk | {"usage": None} for chunk in chunks] + [self._chunk(identity, []) | {"usage": usage}]
        return [*(_event(chunk) for chunk in chunks), b"data: [DONE]\n\n"]

    def _chunk(self, identity: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{identity}",
            "object": "chat.completion.chunk",
            "created": CREATED,
            "model": self.model,
            "choices": choices,
            "system_fingerprint": "fp_scripted",
        }


class ResponsesRequest(Struct):
    model: str
    input: str | Annotated[list[_Message], Meta(min_length=1)]
    stream: bool | None = None

    def prompt(self) -> str:
        return _last_said(self._messages())

    def answer(self, identity: str, *, padding: str = "", cached: int | None = None) -> bytes:
        return encode(self._completed(identity, _echo(self.prompt(), padding), cached))

    def events(self, identity: str, *, padding: str = "", cached: int | None = None) -> list[bytes]:
        if not self.stream:
            return []
        text = _echo(self.prompt(), padding)
        place = {"item_id": f"msg_{identity}", "output_index": 0, "content_index": 0, "logprobs": []}
        told = [
            {"type": "response.created", "response": self._response(identity)},
            *({"type": "response.output_text.delta", **place, "delta": word} for word in _WORD.findall(text)),
            {"type": "response.completed", "response": self._completed(identity, text, cached)},
        ]
        return [_event(event | {"sequence_number": n}, name=str(event["type"])) for n, event in enumerate(told)]

    def _completed(self, identity: str, text: str, cached: int | None) -> dict[str, Any]:
        content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
        message = {"id": f"msg_{identity}", "type": "message", "status": "completed", "role": "assistant"}
        return self._response(identity) | {
            "status": "completed",
            "output": [message | {"content": content}],
            "usage": _responses_usage(_words(self._messages()), text, cached),
        }

    def _response(self, identity: str) -> dict[str, Any]:
        """As it is before anything was said."""
        return {
            "id": f"resp_{identity}",
            "object": "response",
            "created_at": CREATED,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": True,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "usage": None,
        }

    def _messages(self) -> list[_Message]:
        return [_Message(role="user", content=self.input)] if isinstance(self.input, str) else self.input


class _Unstreamed(Struct):
    def events(self, identity: str, *, padding: str = "", cached: int | None = None) -> list[bytes]:
        return []


class TextRequest(_Unstreamed):
    text: str

    def prompt(self) -> str:
        return self.text

    def answer(self, identity: str, *, padding: str = "", cached: int | None = None) -> bytes:
        text = _echo(self.text, padding)
        usage = _chat_usage(len(self.text.split()), text, cached)
        return encode({"id": f"text_{identity}", "object": "scripted.text", "result": text, "usage": usage})


class EmbeddingsRequest(_Unstreamed):
    model: str
    input: str | Annotated[list[Any], Meta(min_length=1)]

    def prompt(self) -> str:
        return self._inputs()[-1]

    def answer(self, identity: str, *, padding: str = "", cached: int | None = None) -> bytes:
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


ScriptedRequest = ChatRequest | ResponsesRequest | TextRequest | EmbeddingsRequest

_DECODERS: dict[str, Decoder[Any]] = {
    CHAT: Decoder(ChatRequest),
    EMBEDDINGS: Decoder(EmbeddingsRequest),
    RESPONSES: Decoder(ResponsesRequest),
    **dict.fromkeys(TEXT_ROUTES, Decoder(TextRequest)),
}


def read_request(path: str, body: bytes) -> ScriptedRequest | None:
    """The request, or None where nothing answers. Raises RequestUnreadable."""
    decoder = _DECODERS.get(path)
    if decoder is None:
        return None
    try:
        request: ScriptedRequest = decoder.decode(body)
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestUnreadable(f"the request cannot be read: {error}") from None
    return request


def model_list() -> bytes:
    model = {"id": "scripted", "object": "model", "created": CREATED, "owned_by": "batchline"}
    return encode({"object": "list", "data": [model]})


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    kind = code if code in _OWN_TYPE else _TYPES.get(status, "server_error" if status >= 500 else _INVALID)
    return encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def page(status: int) -> bytes:
    return b"<!DOCTYPE html><title>%d</title><p>This page is scripted. It is not JSON.</p>\n" % status


def _echo(prompt: str, padding: str) -> str:
    return f"scripted answer to: {prompt[:ECHOED_CHARACTERS]}{padding}"


def _last_said(messages: list[_Message]) -> str:
    """The text of the last user message."""
    return next((message.text() for message in reversed(messages) if message.role == "user"), "")


def _words(messages: list[_Message]) -> int:
    return sum(len(message.text().split()) for message in messages)


def _chat_usage(asked: int, text: str, cached: int | None) -> dict[str, Any]:
    said = len(text.split())
    usage = {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}
    return usage if cached is None else usage | {"prompt_tokens_details": {"cached_tokens": cached}}


def _responses_usage(asked: int, text: str, cached: int | None) -> dict[str, Any]:
    said = len(text.split())
    return {
        "input_tokens": asked,
        "input_tokens_details": {"cached_tokens": cached or 0},
        "output_tokens": said,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": asked + said,
    }


def _choice(delta: dict[str, Any]) -> dict[str, Any]:
    """Of a chunk; the one that says nothing is the last."""
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None if delta else "stop"}


def _event(document: dict[str, Any], *, name: str | None = None) -> bytes:
    return (b"" if name is None else b"event: %b\n" % name.encode()) + b"data: %b\n\n" % encode(document)


def _vector(text: str) -> list[float]:
    return [round(byte / 127.5 - 1, 6) for byte in blake2b(text.encode(), digest_size=8).digest()]


_INVALID = "invalid_request_error"
_OWN_TYPE = frozenset({"insufficient_quota", "rate_limit_exceeded"})
_TYPES = {401: "authentication_error", 403: "authentication_error", 429: "rate_limit_exceeded"}
