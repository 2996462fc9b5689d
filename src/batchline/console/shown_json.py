"""Writes values as indented JSON for a page, with a bound on the work: indented, a small value may be huge."""

import re
from collections.abc import Iterator
from json import dumps
from typing import Any

from msgspec import Struct

from batchline.console.text import size

SHOWN_CHARACTERS = 200_000
"""A text that is longer is shown cut: a page with all of it would be too large for a browser."""
_MAX_DEPTH = 50
_MAX_STRING_CHARACTERS = 20_000
_KEPT_CHARACTERS = 500
_DATA_URL = re.compile(r"data:([\w.+-]{1,40}/[\w.+-]{1,80})[;,]")
_MAX_DATA_URL_CHARACTERS = 200
"""A longer one is shortened, because nobody reads it."""
_SCALARS = (bool, int, float, type(None))


class ShownText(Struct, frozen=True, kw_only=True):
    """A text as a page shows it, and what of it is not shown whole, as sentences."""

    text: str = ""
    notices: list[str] = []


def shown_text(text: str) -> ShownText:
    """Return a text, cut if it is too long for a page."""
    if len(text) <= SHOWN_CHARACTERS:
        return ShownText(text=text)
    return ShownText(text=text[:SHOWN_CHARACTERS], notices=[_cut_notice(f" of {len(text):,}")])


def shown_json(value: Any) -> ShownText:
    """Return a value as indented JSON. Long strings are shortened, deep values left out, and the end is cut."""
    writer = _Writer()
    return ShownText(text="".join(writer.write(value)), notices=writer.notices)


def shortened(text: str, *, longest: int) -> str:
    """Return a text, or what it is and how large if it is longer, or data that nobody reads."""
    found = _DATA_URL.match(text) if len(text) > _MAX_DATA_URL_CHARACTERS else None
    if found is not None:
        return f"[{found[1]}, {size(len(text))}]"
    return text if len(text) <= longest else f"{text[:_KEPT_CHARACTERS]}… [{size(len(text))} in all]"


class _Writer:
    """Makes the pieces of one text, until it is as long as a page may show."""

    def __init__(self) -> None:
        self._left = SHOWN_CHARACTERS
        self.notices: list[str] = []

    def write(self, value: Any) -> Iterator[str]:
        for piece in self._pieces(value, indent="\n"):
            yield piece[: self._left]
            self._left -= len(piece)
            if self._left < 0:
                self._note(_cut_notice())
                return

    def _pieces(self, value: Any, *, indent: str) -> Iterator[str]:
        if isinstance(value, str):
            yield self._string(value)
        elif isinstance(value, _SCALARS):
            yield dumps(value)
        elif not value:
            yield "{}" if isinstance(value, dict) else "[]"
        elif len(indent) > 2 * _MAX_DEPTH:
            self._note(f"What lies deeper than {_MAX_DEPTH} levels is left out.")
            yield "…"
        else:
            yield from self._members(value, indent=f"{indent}  ")

    def _members(self, value: dict[str, Any] | list[Any], *, indent: str) -> Iterator[str]:
        is_object = isinstance(value, dict)
        yield "{" if is_object else "["
        comma = ""
        for member in value:
            yield f"{comma}{indent}"
            if isinstance(value, dict):
                yield f"{self._string(member)}: "
            yield from self._pieces(value[member] if isinstance(value, dict) else member, indent=indent)
            comma = ","
        yield f"{indent[:-2]}{'}' if is_object else ']'}"

    def _string(self, text: str) -> str:
        shown = shortened(text, longest=_MAX_STRING_CHARACTERS)
        if shown is not text:
            self._note("Long strings are shortened.")
        return dumps(shown, ensure_ascii=False)

    def _note(self, notice: str) -> None:
        if notice not in self.notices:
            self.notices.append(notice)


def _cut_notice(of_all: str = "") -> str:
    return f"Cut after {SHOWN_CHARACTERS:,}{of_all} characters."
