"""Decides which fields of a request may reach an upstream, which answers it with the operator's key.

A field is refused if it is a name that the service reads in other letters (``Model``), since some servers ignore case
and the service would charge for another model; if the operator forbids it; or if it has a hosted tool or a link that
the operator does not allow.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder

FORBIDDEN_FIELDS = (
    # Fields that choose another model, server or key than the one that is charged, at routers and gateways.
    *("api_base", "api_key", "base_url", "custom_llm_provider", "extra_body", "extra_headers", "fallbacks", "models"),
    *("plugins", "preset", "provider", "route"),
    # Fields that run, store or read on the operator's account, where all tenants are one.
    *("background", "container", "conversation", "previous_response_id", "store"),
    # Fields that change the price.
    *("service_tier", "web_search_options"),
)
"""The fields that tenants may not set unless the operator says otherwise."""

TOOL_TYPES = ("custom", "function")
"""The types of tools that the client runs itself. Every other tool is hosted: the upstream runs and charges for it."""

_READ = frozenset(
    {"model", "messages", "input", "stream", "stream_options", "tools", "n", "best_of"}
    | {"max_tokens", "max_completion_tokens", "max_output_tokens"}
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
_LINK_FIELDS = frozenset({"url", "image_url", "file_url", "video_url", "audio_url"})
_UNSET = (b"null", b"false")
_anything = Decoder()


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
            return None
        if len(fields) > _MAX_FIELDS:
            return Violation(next(islice(fields, _MAX_FIELDS, None)), f"is one of more than {_MAX_FIELDS:,} fields")
        return next(filter(None, (self._violation_of(name, value) for name, value in fields.items())), None)

    def _violation_of(self, name: str, value: Raw) -> Violation | None:
        try:
            return next(self._violations(name, value), None)
        except (DecodeError, UnicodeDecodeError, RecursionError):
            # The parser that found the fields skips values without reading them. An upstream may read more than this.
            return Violation(name, "cannot be checked: it is no JSON in UTF-8, or is nested too deeply")

    def _violations(self, name: str, value: Raw) -> Iterator[Violation]:
        # Servers that ignore case also take letters that only fold to ASCII, such as the long s.
        folded = name.casefold()
        if folded != name and folded in _READ:
            yield Violation(name, f"is not a field; write {folded}")
        if folded in self.forbidden and bytes(value) not in _UNSET:
            yield Violation(name, "may not be set at this service")
        if folded == "prompt" and self.forbidden and bytes(value).startswith(b"{"):
            yield Violation(name, "may not name a stored prompt at this service; send its text")
        if folded == "tools" and self.tool_types is not None:
            yield from self._tool_violations(name, value)
        if self.media_hosts is not None:
            yield from self._link_violations(name, value)

    def _tool_violations(self, name: str, value: Raw) -> Iterator[Violation]:
        tools = _anything.decode(value)
        if isinstance(tools, list) and len(tools) > _MAX_TOOLS:
            yield Violation(name, f"may have at most {_MAX_TOOLS:,} tools")
        for tool in tools if isinstance(tools, list) else ():
            for kind in _values_of(tool, {"type"}):
                if kind not in (self.tool_types or ()):
                    allowed = ", ".join(sorted(self.tool_types or ()))
                    yield Violation(name, f"may only have tools of these types: {allowed}")

    def _link_violations(self, name: str, value: Raw) -> Iterator[Violation]:
        for link in _links_in({name: _anything.decode(value)}):
            if not _is_allowed(link, self.media_hosts or frozenset()):
                yield Violation(name, "has a link to a host that is not allowed here; send the content itself")


@lru_cache(maxsize=64)
def _plain_fields(forbidden: frozenset[str]) -> frozenset[str]:
    return _PLAIN - forbidden


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


def _values_of(document: Any, names: set[str]) -> list[Any]:
    """Return the values of some fields of an object, in whatever case their names are written."""
    return [value for name, value in document.items() if name.casefold() in names] if isinstance(document, dict) else []


def _links_in(document: Any) -> Iterator[str]:
    """Yield every text in a field that is read as a link, at any depth."""
    if isinstance(document, list):
        for item in document:
            yield from _links_in(item)
    elif isinstance(document, dict):
        for name, value in document.items():
            if isinstance(value, str):
                if name.casefold() in _LINK_FIELDS:
                    yield value
            else:
                yield from _links_in(value)


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
