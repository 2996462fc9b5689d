"""Parses directives: what a prompt asks the mock upstream to do, written between double brackets.

``[[status=503]]``              answer with this status (200 to 599)
``[[error=CODE]]``              answer 400 with this error code; with ``status``, that status
``[[cut]]``                     close the connection in the middle of the answer, or after half the events of a stream
``[[drop]]``                    close the connection without an answer
``[[hang]]``                    never answer
``[[html]]``                    answer with an HTML page instead of JSON
``[[redirect]]``                answer 307 with a Location
``[[huge=BYTES]]``              answer with exactly this many bytes of JSON (64 MiB at most); add as many to a stream
``[[pretty]]``                  answer with JSON that is indented over many lines
``[[crash]]``                   end the server's process at once
``[[delay=SECONDS]]``           wait before the answer
``[[retry-after=SECONDS]]``     send this header
``[[pause=SECONDS]]``           wait before every event of a stream except the first
``[[cached=TOKENS]]``           report this many tokens of the prompt as cached

The items in one pair of brackets belong together, and ``times=N`` applies them to the first N attempts of the same
request only: ``[[status=429 retry-after=1 times=2]]``. If several pairs determine the answer, the first one that still
applies is used, so ``[[status=503 times=1]] [[cut times=2]]`` is a 503, then a cut, then a normal answer. Brackets that
start with any other word are ordinary text. An invalid directive is answered with 400.
"""

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

MAX_ANSWER_BYTES = 64 * 1024 * 1024
MAX_SECONDS = 86_400.0

_BRACKETS = re.compile(r"\[\[([^\[\]]*)\]\]")
_ERROR_CODE = re.compile(r"[a-z][a-z0-9_]{0,99}")
_DIGITS = re.compile(r"[0-9]{1,9}")


class Action(StrEnum):
    """The mock does this in place of a normal answer."""

    CUT = "cut"
    DROP = "drop"
    HANG = "hang"
    HTML = "html"
    REDIRECT = "redirect"
    HUGE = "huge"
    PRETTY = "pretty"
    CRASH = "crash"


class Directive(Struct, frozen=True, kw_only=True):
    """One pair of brackets in a prompt; without any field it asks for a normal answer."""

    action: Action | None = None
    status: int | None = None
    error: str | None = None
    size: int = 0
    delay: float | None = None
    retry_after: float | None = None
    pause: float | None = None
    cached: int | None = None
    times: int | None = None

    @property
    def determines_answer(self) -> bool:
        """Whether it determines what the answer is, and not only how it is delivered."""
        return not (self.action is None and self.status is None and self.error is None)


_DELIVERY_FIELDS = ("delay", "retry_after", "pause", "cached")
"""The fields that say how an answer is delivered. They apply to any answer."""


class DirectiveInvalid(ValueError):
    """The brackets begin with the name of a directive, but cannot be parsed."""


def parse_directives(text: str) -> list[Directive]:
    """Return the directives of a prompt, in order. Raise DirectiveInvalid if one cannot be parsed."""
    if "[[" not in text:
        return []
    brackets = (match[1].split() for match in _BRACKETS.finditer(text))
    return [_parse_directive(items) for items in brackets if items and items[0].partition("=")[0] in _ITEMS]


def directive_for_attempt(directives: list[Directive], attempt: int) -> Directive:
    """Combine the directives that apply to this attempt of a request, counted from 1."""
    active = [each for each in directives if each.times is None or attempt <= each.times]
    decisive = next((each for each in active if each.determines_answer), Directive())
    given = {
        name: [value for each in active if (value := getattr(each, name)) is not None] for name in _DELIVERY_FIELDS
    }
    return replace(decisive, **{name: values[0] if values else None for name, values in given.items()})


def with_delivery_of(delivery: Directive, directive: Directive) -> Directive:
    """Return the second directive, delivered as the first one says."""
    return replace(directive, **{name: getattr(delivery, name) for name in _DELIVERY_FIELDS})


def _parse_directive(items: list[str]) -> Directive:
    fields: dict[str, Any] = {}
    for item in items:
        parsed = _parse_item(item)
        if not fields.keys().isdisjoint(parsed):
            raise DirectiveInvalid(f'"{item[:60]}" contradicts an earlier item in the same brackets')
        fields |= parsed
    return Directive(**fields)


def _parse_item(item: str) -> dict[str, Any]:
    name, _, value = item.partition("=")
    try:
        return _ITEMS[name](value)
    except (KeyError, ValueError):
        raise DirectiveInvalid(f'"{item[:60]}" is not a valid directive') from None


def _integer(field: str, low: int, high: int) -> Callable[[str], dict[str, Any]]:
    def parse(value: str) -> dict[str, Any]:
        if not (_DIGITS.fullmatch(value) and low <= int(value) <= high):
            raise ValueError(value)
        return {field: int(value)}

    return parse


def _seconds(field: str) -> Callable[[str], dict[str, Any]]:
    def parse(value: str) -> dict[str, Any]:
        if not 0 <= float(value) <= MAX_SECONDS:
            raise ValueError(value)
        return {field: float(value)}

    return parse


def _without_value(action: Action) -> Callable[[str], dict[str, Any]]:
    def parse(value: str) -> dict[str, Any]:
        if value:
            raise ValueError(value)
        return {"action": action}

    return parse


def _huge(value: str) -> dict[str, Any]:
    return {"action": Action.HUGE} | _integer("size", 1, MAX_ANSWER_BYTES)(value)


def _error(value: str) -> dict[str, Any]:
    if not _ERROR_CODE.fullmatch(value):
        raise ValueError(value)
    return {"error": value}


_ITEMS: dict[str, Callable[[str], dict[str, Any]]] = {
    **{action.value: _without_value(action) for action in Action},
    "huge": _huge,
    "status": _integer("status", 200, 599),
    "error": _error,
    "delay": _seconds("delay"),
    "retry-after": _seconds("retry_after"),
    "pause": _seconds("pause"),
    "cached": _integer("cached", 0, 999_999_999),
    "times": _integer("times", 1, 1_000_000),
}
