"""What a prompt may ask the scripted upstream to do, written between double brackets.

``[[status=503]]``              answer with this status (200 to 599)
``[[error=CODE]]``              answer 400 with this error code; with ``status``, that status
``[[cut]]``                     end the connection in the middle of the answer, of a stream after half its events
``[[drop]]``                    end the connection without an answer
``[[hang]]``                    never answer
``[[html]]``                    answer with a page instead of JSON
``[[redirect]]``                answer 307 with a Location
``[[huge=BYTES]]``              answer with exactly so many bytes of JSON (64 MiB at most); a stream grows by them
``[[pretty]]``                  answer with JSON over many lines
``[[crash]]``                   the server's process ends at once
``[[delay=SECONDS]]``           answer later
``[[retry-after=SECONDS]]``     send this header
``[[pause=SECONDS]]``           wait before every event of a stream but the first
``[[cached=TOKENS]]``           report so many tokens of the prompt as cached

Items of one pair of brackets belong together, and ``times=N`` keeps them to the first N tries of the same request:
``[[status=429 retry-after=1 times=2]]``. Of several pairs that say what the answer is, the first that still holds
counts, so ``[[status=503 times=1]] [[cut times=2]]`` is a 503, then a cut, then a plain answer. Brackets that start
with any other word are ordinary text; a directive that cannot be read is answered with 400.
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


class Act(StrEnum):
    CUT = "cut"
    DROP = "drop"
    HANG = "hang"
    HTML = "html"
    REDIRECT = "redirect"
    HUGE = "huge"
    PRETTY = "pretty"
    CRASH = "crash"


class MockOrder(Struct, frozen=True, kw_only=True):
    """What shall happen to a try; without any field, a plain answer."""

    act: Act | None = None
    status: int | None = None
    error: str | None = None
    size: int = 0
    delay: float | None = None
    retry_after: float | None = None
    pause: float | None = None
    cached: int | None = None
    times: int | None = None

    @property
    def decides(self) -> bool:
        """Whether it says what the answer is, not only how it comes."""
        return not (self.act is None and self.status is None and self.error is None)


_MANNER = ("delay", "retry_after", "pause", "cached")
"""How an answer comes, whatever it is."""


class DirectiveUnreadable(ValueError):
    """A directive was meant and cannot be followed."""


def parse_orders(text: str) -> list[MockOrder]:
    """The directives of a prompt, in order. Raises DirectiveUnreadable."""
    if "[[" not in text:
        return []
    brackets = (match[1].split() for match in _BRACKETS.finditer(text))
    return [_parse_order(items) for items in brackets if items and items[0].partition("=")[0] in _ITEMS]


def order_for_try(orders: list[MockOrder], attempt: int) -> MockOrder:
    """What holds for the n-th try of a request, counted from 1."""
    active = [order for order in orders if order.times is None or attempt <= order.times]
    decisive = next((order for order in active if order.decides), MockOrder())
    manner = {name: [value for order in active if (value := getattr(order, name)) is not None] for name in _MANNER}
    return replace(decisive, **{name: values[0] if values else None for name, values in manner.items()})


def in_manner_of(told: MockOrder, order: MockOrder) -> MockOrder:
    """An order carried out the way another says."""
    return replace(order, **{name: getattr(told, name) for name in _MANNER})


def _parse_order(items: list[str]) -> MockOrder:
    fields: dict[str, Any] = {}
    for item in items:
        found = _parse_item(item)
        if not fields.keys().isdisjoint(found):
            raise DirectiveUnreadable(f'"{item[:60]}" contradicts what stands before it')
        fields |= found
    return MockOrder(**fields)


def _parse_item(item: str) -> dict[str, Any]:
    name, _, value = item.partition("=")
    try:
        return _ITEMS[name](value)
    except (KeyError, ValueError):
        raise DirectiveUnreadable(f'"{item[:60]}" is not a directive') from None


def _whole(field: str, low: int, high: int) -> Callable[[str], dict[str, Any]]:
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


def _bare(act: Act) -> Callable[[str], dict[str, Any]]:
    def parse(value: str) -> dict[str, Any]:
        if value:
            raise ValueError(value)
        return {"act": act}

    return parse


def _huge(value: str) -> dict[str, Any]:
    return {"act": Act.HUGE} | _whole("size", 1, MAX_ANSWER_BYTES)(value)


def _error(value: str) -> dict[str, Any]:
    if not _ERROR_CODE.fullmatch(value):
        raise ValueError(value)
    return {"error": value}


_ITEMS: dict[str, Callable[[str], dict[str, Any]]] = {
    **{act.value: _bare(act) for act in Act},
    "huge": _huge,
    "status": _whole("status", 200, 599),
    "error": _error,
    "delay": _seconds("delay"),
    "retry-after": _seconds("retry_after"),
    "pause": _seconds("pause"),
    "cached": _whole("cached", 0, 999_999_999),
    "times": _whole("times", 1, 1_000_000),
}
