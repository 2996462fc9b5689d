"""Makes the mock upstream's answers, in OpenAI's shapes.

An answer repeats the prompt and says that it is scripted, so that it is never mistaken for a model's.
"""

import re
from hashlib import blake2b
from typing import Annotated, Any

from msgspec import DecodeError, Meta, Struct
from msgspec.json import Decoder, encode

from batchline.domain.endpoints import CHAT

CREATED = 1_700_000_000
ECHOED_CHARACTERS = 200

EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
TEXT_ROUTES = ("/summary", "/usecase/classify/iab", "/gliner")

_WORD = re.compile(r"\s*\S+|\s+$")


class RequestInvalid(ValueError):
    """The request's body does not fit the endpoint."""


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
        """Return the text that may contain directives."""
        return _last_user_text(self.messages)

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
                "usage": _chat_usage(_count_words(self.messages), text, cached),
                "system_fingerprint": "fp_scripted",
            }
        )

    def events(self, identity: str, *, padding: str = "", cached: int | None = None) -> list[bytes]:
        """Return the answer as server-sent events, or nothing if the request does not ask for a stream."""
        if not self.stream:
            return []
        text = _echo(self.prompt(), padding)
        start = {"role": "assistant", "content": "", "refusal": None}
        deltas = [start, *({"content": word} for word in _WORD.findall(text)), {}]
        chunks = [self._chunk(identity, [_choice(delta)]) for delta in deltas]
        if self.stream_options is not None and self.stream_options.include_usage:
            usage = _chat_usage(_count_words(self.messages), text, cached)
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
        return _last_user_text(self._messages())

    def answer(self, identity: str, *, padding: str = "", cached: int | None = None) -> bytes:
        return encode(self._completed(identity, _echo(self.prompt(), padding), cached))

    def events(self, identity: str, *, padding: str = "", cached: int | None = None) -> list[bytes]:
        if not self.stream:
            return []
        text = _echo(self.prompt(), padding)
        completed = self._completed(identity, text, cached)
        [message] = completed["output"]
        [part] = message["content"]
        item = {"output_index": 0, "item": message | {"status": "in_progress", "content": []}}
        place = {"item_id": message["id"], "output_index": 0, "content_index": 0}
        events = [
            {"type": "response.created", "response": self._response(identity)},
            {"type": "response.in_progress", "response": self._response(identity)},
            {"type": "response.output_item.added", **item},
            {"type": "response.content_part.added", **place, "part": part | {"text": ""}},
            *(
                {"type": "response.output_text.delta", **place, "logprobs": [], "delta": word}
                for word in _WORD.findall(text)
            ),
            {"type": "response.output_text.done", **place, "logprobs": [], "text": text},
            {"type": "response.content_part.done", **place, "part": part},
            {"type": "response.output_item.done", **item, "item": message},
            {"type": "response.completed", "response": completed},
        ]
        return [_event(event | {"sequence_number": n}, name=str(event["type"])) for n, event in enumerate(events)]

    def _completed(self, identity: str, text: str, cached: int | None) -> dict[str, Any]:
        content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
        message = {"id": f"msg_{identity}", "type": "message", "status": "completed", "role": "assistant"}
        return self._response(identity) | {
            "completed_at": CREATED + 1,
            "status": "completed",
            "output": [message | {"content": content}],
            "usage": _responses_usage(_count_words(self._messages()), text, cached),
        }

    def _response(self, identity: str) -> dict[str, Any]:
        """Return the response as it is before any output."""
        return {
            "id": f"resp_{identity}",
            "object": "response",
            "created_at": CREATED,
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": None,
            "max_tool_calls": None,
            "metadata": {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": None,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0,
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": None,
            "user": None,
        }

    def _messages(self) -> list[_Message]:
        return [_Message(role="user", content=self.input)] if isinstance(self.input, str) else self.input


class _Unstreamed(Struct):
    """A request to an endpoint that has no streams."""

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
        """Return one text per input; an array of tokens counts as the text of its JSON."""
        if isinstance(self.input, str):
            return [self.input]
        if all(isinstance(item, int) for item in self.input):
            return [encode(self.input).decode()]
        return [item if isinstance(item, str) else encode(item).decode() for item in self.input]


MockRequest = ChatRequest | ResponsesRequest | TextRequest | EmbeddingsRequest

_DECODERS: dict[str, Decoder[Any]] = {
    CHAT: Decoder(ChatRequest),
    EMBEDDINGS: Decoder(EmbeddingsRequest),
    RESPONSES: Decoder(ResponsesRequest),
    **dict.fromkeys(TEXT_ROUTES, Decoder(TextRequest)),
}


def read_request(path: str, body: bytes) -> MockRequest | None:
    """Return the request, or None if the mock does not serve the path. Raise RequestInvalid for a bad body."""
    decoder = _DECODERS.get(path)
    if decoder is None:
        return None
    try:
        request: MockRequest = decoder.decode(body)
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestInvalid(f"the request's body is invalid: {error}") from None
    return request


def model_list() -> bytes:
    model = {"id": "scripted", "object": "model", "created": CREATED, "owned_by": "batchline"}
    return encode({"object": "list", "data": [model]})


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    kind = (
        code
        if code in _CODES_THAT_ARE_TYPES
        else _TYPE_BY_STATUS.get(status, "server_error" if status >= 500 else _INVALID_REQUEST)
    )
    return encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def html_page(status: int) -> bytes:
    return b"<!DOCTYPE html><title>%d</title><p>This page is scripted. It is not JSON.</p>\n" % status


def _echo(prompt: str, padding: str) -> str:
    return f"scripted answer to: {prompt[:ECHOED_CHARACTERS]}{padding}"


def _last_user_text(messages: list[_Message]) -> str:
    """Return the text of the last user message."""
    return next((message.text() for message in reversed(messages) if message.role == "user"), "")


def _count_words(messages: list[_Message]) -> int:
    return sum(len(message.text().split()) for message in messages)


def _chat_usage(input_words: int, text: str, cached: int | None) -> dict[str, Any]:
    output_words = len(text.split())
    usage = {
        "prompt_tokens": input_words,
        "completion_tokens": output_words,
        "total_tokens": input_words + output_words,
    }
    return usage if cached is None else usage | {"prompt_tokens_details": {"cached_tokens": cached}}


def _responses_usage(input_words: int, text: str, cached: int | None) -> dict[str, Any]:
    output_words = len(text.split())
    return {
        "input_tokens": input_words,
        "input_tokens_details": {"cached_tokens": cached or 0, "cache_write_tokens": 0},
        "output_tokens": output_words,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_words + output_words,
    }


def _choice(delta: dict[str, Any]) -> dict[str, Any]:
    """Return the choice of a chunk; an empty delta marks the last chunk."""
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None if delta else "stop"}


def _event(document: dict[str, Any], *, name: str | None = None) -> bytes:
    return (b"" if name is None else b"event: %b\n" % name.encode()) + b"data: %b\n\n" % encode(document)


def _vector(text: str) -> list[float]:
    return [round(byte / 127.5 - 1, 6) for byte in blake2b(text.encode(), digest_size=8).digest()]


_INVALID_REQUEST = "invalid_request_error"
_CODES_THAT_ARE_TYPES = frozenset({"insufficient_quota", "rate_limit_exceeded"})
_TYPE_BY_STATUS = {401: "authentication_error", 403: "authentication_error", 429: "rate_limit_exceeded"}
