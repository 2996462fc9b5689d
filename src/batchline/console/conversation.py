"""Finds the texts in the body of a request and in its answer: what was asked, and what was answered."""

from typing import Any

from msgspec import Struct

from batchline.console.shown_json import SHOWN_CHARACTERS, shortened
from batchline.console.text import cut, plural

_MAX_MESSAGES = 500
_MAX_PARTS = 1000
_SOURCE_CHARACTERS = 200
_ROLE_CHARACTERS = 40
_MEDIA = ("image_url", "input_audio", "audio", "video_url", "file")
_SOURCES = ("url", "image_url", "file_url", "data", "file_data", "filename", "file_id")
"""The fields that say what an image, a sound or a file is."""


class ShownMessage(Struct, frozen=True, kw_only=True):
    """A message of a chat, or another text that is sent to a model or comes from it."""

    role: str
    text: str


class Conversation(Struct, frozen=True, kw_only=True):
    """Messages, and what of them is not shown whole, as sentences."""

    messages: list[ShownMessage] = []
    notices: list[str] = []


def asked(body: Any) -> Conversation:
    """Return what a request asks: its messages, its input or its prompt."""
    return _conversation(_asked(body))


def last_asked(body: Any) -> str:
    """Return the last of these texts."""
    values = _asked(body)
    return _message(*values[-1]).text if values else ""


def answered(answer: Any) -> Conversation:
    """Return the texts of an answer; none for an answer without any."""
    return _conversation(_answered(answer))


def answer_text(answer: Any) -> str:
    """Return all texts of an answer."""
    return "\n".join(message.text for message in answered(answer).messages)


def field(value: Any, name: str) -> Any:
    """Return a field of an object, or None if the value is none or has none of that name."""
    return value.get(name) if isinstance(value, dict) else None


def _asked(body: Any) -> list[tuple[str, Any]]:
    """Return the role and the value of each message."""
    messages = field(body, "messages")
    if isinstance(messages, list):
        return [("message", each) for each in messages]
    found = [("instructions", body["instructions"])] if isinstance(field(body, "instructions"), str) else []
    for name in ("input", "prompt"):
        found += [(name, each) for each in _items(field(body, name))]
    return found


def _items(value: Any) -> list[Any]:
    """Return the items of an input or a prompt. A list of token numbers is one."""
    if not value:
        return []
    return value if isinstance(value, list) and not isinstance(value[0], int) else [value]


def _answered(answer: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for choice in _list(field(answer, "choices")):
        text = field(choice, "text")
        found.append(("assistant", field(choice, "message") if text is None else text))
    found += [("assistant", item) for item in _list(field(answer, "output"))]
    vectors = [field(item, "embedding") for item in _list(field(answer, "data"))]
    sizes = {len(vector) for vector in vectors if isinstance(vector, list)}
    if sizes:
        found.append(("embeddings", f"{plural(len(vectors), 'vector')} of {plural(max(sizes), 'number')}"))
    return found


def _conversation(values: list[tuple[str, Any]]) -> Conversation:
    messages, notices, left = list[ShownMessage](), list[str](), SHOWN_CHARACTERS
    if len(values) > _MAX_MESSAGES:
        notices.append(f"The first {_MAX_MESSAGES} of {len(values):,} messages.")
    for role, value in values[:_MAX_MESSAGES]:
        message = _message(role, value)
        if not message.text and role == "assistant":
            continue
        messages.append(ShownMessage(role=message.role, text=message.text[:left]))
        left -= len(message.text)
        if left < 0:
            notices.append(f"The messages are cut after {SHOWN_CHARACTERS:,} characters.")
            break
    return Conversation(messages=messages, notices=notices)


def _message(role: str, value: Any) -> ShownMessage:
    if not isinstance(value, dict):
        return ShownMessage(role=role, text=_text(value))
    named = field(value, "role")
    return ShownMessage(role=cut(named, _ROLE_CHARACTERS) if isinstance(named, str) else role, text=_said(value))


def _said(message: dict[str, Any]) -> str:
    """Return the text of a message, its refusal and its calls of tools."""
    parts = [_text(message.get("content")), _refusal(message), _text(message.get("summary"))]
    calls = [*_list(message.get("tool_calls"))[:_MAX_PARTS], message.get("function_call"), message]
    parts += [_call(call) for call in calls]
    if message.get("type") == "function_call_output":
        parts.append(_text(message.get("output")))
    return "\n".join(part for part in parts if part)


def _refusal(value: dict[str, Any]) -> str:
    refusal = value.get("refusal")
    return f"[refusal] {refusal}" if isinstance(refusal, str) and refusal else ""


def _call(call: Any) -> str:
    """Return a call of a tool with its arguments; empty if the value is none."""
    called = field(call, "function") or call
    name, arguments = field(called, "name"), field(called, "arguments")
    return f"[tool call] {name}({arguments})" if isinstance(name, str) and isinstance(arguments, str) else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    """Return a text, or the texts of the parts of a message."""
    if isinstance(value, list) and value and isinstance(value[0], int):
        return f"[{plural(len(value), 'token')}]"
    parts = [value] if isinstance(value, str) else _list(value)
    left_out = [f"[{len(parts) - _MAX_PARTS:,} more parts]"] if len(parts) > _MAX_PARTS else []
    return "\n".join([*map(_part, parts[:_MAX_PARTS]), *left_out])


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = field(part, "text")
    if isinstance(text, str):
        return text
    if isinstance(part, dict) and (refusal := _refusal(part)):
        return refusal
    kind, source = field(part, "type"), _source(part)
    kind = cut(kind, _ROLE_CHARACTERS) if isinstance(kind, str) else "part"
    return f"[{kind}: {source}]" if source else f"[{kind}]"


def _source(part: Any) -> str:
    """Return what an image, a sound or a file is: its address, its name, or its type and size."""
    inner = next((found for name in _MEDIA if (found := field(part, name))), part)
    values = [inner, *(field(inner, name) for name in _SOURCES)]
    found = next((value for value in values if isinstance(value, str)), "")
    return shortened(found, longest=_SOURCE_CHARACTERS).strip("[]")
