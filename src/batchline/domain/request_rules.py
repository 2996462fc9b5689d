"""Decides which fields of a request may reach an upstream, which answers it with the operator's key.

A field is refused if it is a name that the service reads in other letters (``Model``), since some servers ignore case
and the service would charge for another model; if the operator forbids it; or if it has a hosted tool or a link that
the operator does not allow, or names an object of the operator's account.

If a key is repeated in an object, some servers read the first of its values and others the last. So every value counts
here, or the key is refused.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Annotated, Any
from urllib.parse import urlsplit

from msgspec import DecodeError, Meta, Raw, Struct, ValidationError, defstruct
from msgspec.json import Decoder

FORBIDDEN_FIELDS = (
    # Fields that choose another model, server or key than the one that is charged, at routers and gateways.
    *("api_base", "api_key", "base_url", "custom_llm_provider", "extra_body", "extra_headers", "fallbacks", "models"),
    *("plugins", "preset", "provider", "route", "api_version", "organization", "user_config", "vertex_credentials"),
    *("aws_bedrock_runtime_endpoint", "aws_role_name", "aws_sts_endpoint", "aws_web_identity_token"),
    # Fields that choose an adapter, connect to other hosts, or run code or a template, in inference engines.
    *("adapter_id", "lora", "lora_path", "bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params"),
    *("chat_template", "custom_logit_processor", "logits_processors"),
    # Fields by which a request overtakes those of others, takes their id, or has no real answer.
    *("mock_response", "priority", "request_id", "rid", "timeout"),
    # Fields that run, store or read on the operator's account, where all tenants are one.
    *("background", "container", "conversation", "previous_response_id", "store"),
    # Fields that change the price.
    *("input_cost_per_token", "output_cost_per_token", "service_tier", "web_search_options"),
)
"""The fields that tenants may not set unless the operator says otherwise."""

TOOL_TYPES = ("custom", "function")
"""The types of tools that the client runs itself. Every other tool is hosted: the upstream runs and charges for it."""

_READ = frozenset(
    {"model", "messages", "input", "stream", "stream_options", "tools", "n", "best_of"}
    | {"max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_cmpl", "n_predict"}
)
"""The fields that the service reads itself."""

_PLAIN = (_READ - {"tools"}) | {  # Not "prompt": a text is usual, and an object names a prompt of the account.
    *("temperature", "top_p", "stop", "seed", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs"),
    *("top_logprobs", "response_format", "tool_choice", "parallel_tool_calls", "user", "metadata", "reasoning_effort"),
    *("encoding_format", "dimensions", "suffix", "echo", "top_k", "instructions", "reasoning", "text"),
}
"""Usual fields, which need no look at their values."""

_MAX_FIELDS = _MAX_TOOLS = 1024
"""More than any request has. Each field and each tool takes a microsecond, for which everybody waits."""
_MAX_OBJECTS = 16_384
"""More objects than any field has that is read whole. Each of them takes a microsecond too."""
_SEPARATORS, _MAX_SEPARATORS = (b",", b"["), 131_072
"""The marks between the parts of a value, and how many of them a value may have that is read whole. To read so many
parts takes up to 40 ms, for which everybody waits. Marks in texts count too: to tell them apart would take as long."""
_LINK_FIELDS = frozenset({"url", "image_url", "file_url", "video_url", "audio_url"})
_MEDIA_FIELDS = frozenset({"image", "images", "video", "videos", "audio", "audios"})
"""Fields whose text is an encoded file or a link to one. An encoded file has no colon."""
_ACCOUNT_FIELDS = ("messages", "input")
"""The fields that can name objects of the operator's account."""
_FILE_FIELDS = frozenset({"file_id", "file_ids"})
_BACKSLASH, _UNDERSCORE = b"\\_"
"""As numbers: so a byte is found in a tenth of the time."""
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")
_UNSET = (b"null", b"false")
_tools = Decoder(list[dict[str, Raw]])
_UNREADABLE = "cannot be checked: it is no JSON in UTF-8, or is nested too deeply"


class Violation(Struct, frozen=True):
    """A field that is refused, and why; the text goes on after the name of the field."""

    field: str
    reason: str


class FieldRules(Struct, frozen=True, kw_only=True):
    """The rules for the fields of requests for one model."""

    forbidden: frozenset[str] = frozenset(FORBIDDEN_FIELDS)
    tool_types: frozenset[str] | None = frozenset(TOOL_TYPES)
    """The types of tools that are allowed; None if all are."""
    media_hosts: frozenset[str] | None = None
    """The hosts that links to images and files may name; None if all may be named."""

    def violation(self, fields: Mapping[str, Raw]) -> Violation | None:
        """Return the first field of a request's body that is refused, or None if all are allowed."""
        if self.media_hosts is None and _plain_fields(self.forbidden).issuperset(fields):
            return self._account_violation(fields) if self.forbidden else None
        if len(fields) > _MAX_FIELDS:
            return Violation(next(islice(fields, _MAX_FIELDS, None)), f"is one of more than {_MAX_FIELDS:,} fields")
        return next(filter(None, (self._violation_of(name, value) for name, value in fields.items())), None)

    def _account_violation(self, fields: Mapping[str, Raw]) -> Violation | None:
        for name in _ACCOUNT_FIELDS:
            value = fields.get(name)
            if value is not None and _may_name_objects(name, bytes(value)):
                violation = self._violation_of(name, value)
                if violation is not None:
                    return violation
        return None

    def _violation_of(self, name: str, value: Raw) -> Violation | None:
        try:
            return next(self._violations(name, value), None)
        except _NotAllowed as error:
            return Violation(name, str(error))
        except (DecodeError, ValueError, RecursionError):
            # The parser that found the fields skips values without reading them. An upstream may read more than this.
            return Violation(name, _UNREADABLE)

    def _violations(self, name: str, value: Raw) -> Iterator[Violation]:
        # Servers that ignore case also take letters that only fold to ASCII, such as the long s.
        folded = name.casefold()
        if folded != name and folded in _READ:
            yield Violation(name, f"is not a field; write {folded}")
        if folded in self.forbidden and bytes(value) not in _UNSET:
            yield Violation(name, "may not be set at this service")
        if folded == "prompt" and self.forbidden and bytes(value).startswith(b"{"):
            yield Violation(name, "may not name a stored prompt at this service; send its text")
        if folded == "chat_template_kwargs" and "chat_template" in self.forbidden:
            yield from _template_violations(name, value)
        if folded == "tools" and self.tool_types is not None:
            yield from _tool_violations(name, value, self.tool_types)
        if folded in _ACCOUNT_FIELDS and self.forbidden and _may_name_objects(folded, bytes(value)):
            yield from _account_violations(name, value)
        if self.media_hosts is not None:
            yield from self._link_violations(name, value)

    def _link_violations(self, name: str, value: Raw) -> Iterator[Violation]:
        for link in _links_in(_Objects().read(value), name.casefold()):
            if not _is_allowed(link, self.media_hosts or frozenset()):
                yield Violation(name, "has a link to a host that is not allowed here; send the content itself")


@lru_cache(maxsize=64)
def _plain_fields(forbidden: frozenset[str]) -> frozenset[str]:
    return _PLAIN - forbidden


def _template_violations(name: str, value: Raw) -> Iterator[Violation]:
    document = _Objects().read(value)
    if isinstance(document, dict) and any(_values_of(document, "chat_template")):
        yield Violation(name, "may not have a chat_template at this service")


def _tool_violations(name: str, value: Raw, types: frozenset[str]) -> Iterator[Violation]:
    if not bytes(value).startswith(b"["):
        return
    try:
        tools = _tools.decode(value)
        _typed_tools(types).decode(value)
        is_allowed = not any(key != "type" == key.casefold() for tool in tools[:_MAX_TOOLS] for key in tool)
    except ValidationError:
        tools, is_allowed = [], False
    if len(tools) > _MAX_TOOLS:
        yield Violation(name, f"may have at most {_MAX_TOOLS:,} tools")
    if not is_allowed:
        yield Violation(name, f"may only have tools of these types: {', '.join(sorted(types))}")


@lru_cache(maxsize=64)
def _typed_tools(types: frozenset[str]) -> Decoder[Any]:
    """Return a decoder that refuses tools of other types. If a key is repeated, it checks each of its values."""
    pattern = "|".join(map(re.escape, sorted(types)))
    kind: Any = Annotated[str, Meta(pattern=rf"\A(?:{pattern})\Z")]
    return Decoder(list[defstruct("_Tool", [("type", kind, "")])])  # type: ignore[misc]


def _may_name_objects(field: str, value: bytes) -> bool:
    """Return whether a field may name objects of an account.

    Every line is asked for this. A single byte is found in 4 KB in a tenth of a microsecond, and lower case takes 6 us.
    """
    if _BACKSLASH in value and b"\\u00" in value and _ESCAPED_LETTER.search(value):
        return True
    if field == "messages":
        return _UNDERSCORE in value and b"file_id" in value.lower()
    letters = value.lower()
    return b"file_id" in letters or b"item_reference" in letters or b'"id"' in letters


def _account_violations(name: str, value: Raw) -> Iterator[Violation]:
    objects = _Objects()
    document = objects.read(value)
    if any(key.casefold() in _FILE_FIELDS and each[key] for each in objects.found for key in each):
        yield Violation(name, "may not name a file of the account at the upstream; send the file's content")
    if name == "input" and isinstance(document, list) and any(map(_is_reference, document)):
        yield Violation(name, "may not refer to an item that the upstream stored; send the item itself")


def _is_reference(item: Any) -> bool:
    """Return whether an item of an input is only the id of one. Such an item needs no type."""
    if not isinstance(item, dict):
        return False
    kinds, names = _values_of(item, "type"), set(map(str.casefold, item))
    return "item_reference" in kinds or (not any(kinds) and "id" in names and "role" not in names)


def _values_of(fields: dict[str, Any], name: str) -> list[Any]:
    """Return the values of a field under its name in any case, since some servers ignore that."""
    return [value for key, value in fields.items() if key.casefold() == name]


class _NotAllowed(Exception):
    """The rest of a violation, which was found while a value was read."""


class _Objects:
    """Reads a value and finds its objects. It refuses those that servers read differently."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def read(self, value: Raw) -> Any:
        """Return the value. Raise _NotAllowed if a key is repeated in one of its objects, or if it has many parts."""
        if sum(map(bytes(value).count, _SEPARATORS)) > _MAX_SEPARATORS:
            raise _NotAllowed(f"may have at most {_MAX_SEPARATORS:,} commas and brackets, to be looked at")
        return json.loads(bytes(value).decode(), object_pairs_hook=self._add)

    def _add(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise _NotAllowed("may not have a key twice in one object")
        if len(self.found) == _MAX_OBJECTS:
            raise _NotAllowed(f"may have at most {_MAX_OBJECTS:,} objects")
        self.found.append(fields)
        return fields


class RequestRules(Struct, frozen=True, kw_only=True):
    """The rules of all models."""

    default: FieldRules = FieldRules()
    by_model: Mapping[str, FieldRules] = {}

    def of(self, model_id: str) -> FieldRules:
        """Return the rules for requests that name a model."""
        return self.by_model.get(model_id, self.default)


def strictest(rules: Iterable[FieldRules]) -> FieldRules:
    """Return rules that keep every one of several rules, for a model with several upstreams."""
    every = list(rules)
    return FieldRules(
        forbidden=frozenset().union(*(one.forbidden for one in every)),
        tool_types=_intersection(one.tool_types for one in every),
        media_hosts=_intersection(one.media_hosts for one in every),
    )


def _intersection(sets: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    given = [one for one in sets if one is not None]
    return frozenset.intersection(*given) if given else None


def _links_in(document: Any, name: str) -> Iterator[str]:
    """Yield every text in a field that is read as a link, at any depth. ``name`` is the name of the field itself."""
    if isinstance(document, str):
        if name in _LINK_FIELDS or (name in _MEDIA_FIELDS and ":" in document):
            yield document
    elif isinstance(document, list):
        for item in document:
            if isinstance(item, str | list | dict):
                yield from _links_in(item, name)
    elif isinstance(document, dict):
        for key, value in document.items():
            yield from _links_in(value, key.casefold())


def _is_allowed(link: str, hosts: frozenset[str]) -> bool:
    if link.startswith("data:"):
        return True
    try:
        parts = urlsplit(link)
        named = parts.hostname or ""
    except ValueError:
        return False
    # Parsers differ about user names, backslashes and blanks, so a link with one may lead to another host.
    is_plain = link.isascii() and link.isprintable() and not set(link) & {"\\", " "} and "@" not in parts.netloc
    return is_plain and parts.scheme in {"http", "https"} and named in hosts
