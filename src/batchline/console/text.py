"""Turns values into text that a person reads, and makes the text of clients and upstreams harmless on a page."""

import re
import shlex
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup
from msgspec import DecodeError, Raw
from msgspec.json import Decoder

from batchline.domain.money import NANO, units

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_KEPT = frozenset("\n\t")
_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that change the direction of the text around them."""
_HIDDEN = (0x00AD, 0x180E, 0x200B, 0x2060, 0xFEFF, *range(0xE0000, 0xE0080))
"""Characters that cannot be seen, among them those of tags, which can carry a whole text."""
_VISIBLE = (
    {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in _KEPT}
    | {0x7F: "\u2421"}
    | dict.fromkeys((*range(0x80, 0xA0), *range(0xD800, 0xE000)), "\ufffd")
    | {code: f"⟦U+{code:04X}⟧" for code in (*_BIDI, *_HIDDEN)}
    | {0x2028: "⏎", 0x2029: "⏎"}
)
_fields, _text = Decoder(dict[str, Raw]), Decoder(str)
_NAMES = ("name", "title", "description", "job")
"""The fields of metadata that are shown as the name of a batch, the first that is there."""
_SPACE = re.compile(r"\s+")
_MONEY_DIGITS = 3
_BYTE_UNITS = ("B", "KB", "MB", "GB", "TB")


def inert(value: Any) -> Any:
    """Return a text in which control characters and those that change directions can be seen and do nothing.

    Markup is left as it is: only templates make it.
    """
    if isinstance(value, str) and not isinstance(value, Markup):
        return value.translate(_VISIBLE)
    return "" if value is None else value


def cut(text: str, length: int) -> str:
    """Return a text on one line, cut to a length."""
    # A text of a megabyte is cut before it is searched.
    line = _SPACE.sub(" ", text[: 4 * length]).strip()
    return line if len(line) <= length else f"{line[: length - 1]}…"


def sentence(text: str) -> str:
    """Return a text with a capital first letter and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def count(number: int) -> str:
    """Return a whole number with commas."""
    return f"{number:,}"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: 1 line, 2 lines."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(number: int) -> str:
    """Return a number of bytes in the largest unit that it fills."""
    value, unit = float(number), 0
    while value >= 1000 and unit < len(_BYTE_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{number} B" if unit == 0 else f"{value:.1f} {_BYTE_UNITS[unit]}"


def span(seconds: float) -> str:
    """Return a length of time in its largest unit, or its two largest ones: 12 s, 5 min 7 s, 25 min, 2 h 5 min."""
    whole = max(0, round(seconds))
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min" + (f" {whole % _MINUTE} s" if whole % _MINUTE and whole < 10 * _MINUTE else "")
    if whole < _DAY:
        return f"{whole // _HOUR} h" + (f" {whole % _HOUR // _MINUTE} min" if whole % _HOUR >= _MINUTE else "")
    return f"{whole // _DAY} d" + (f" {whole % _DAY // _HOUR} h" if whole % _DAY >= _HOUR else "")


def span_of(seconds: float) -> str:
    """Return a length of time that may be shorter than a second."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else span(seconds)


def age(seconds: float) -> str:
    """Return how long ago something was. It has no seconds, which nobody needs and which change all the time."""
    if seconds < _MINUTE:
        return "just now"
    return f"{span(seconds - seconds % _MINUTE)} ago"


def clock_time(at: int) -> str:
    """Return the time of day, in UTC."""
    return f"{datetime.fromtimestamp(at, UTC):%H:%M}"


def moment(at: int) -> str:
    """Return a time as a person reads it, in UTC."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def day(at: int) -> str:
    """Return the day of a time, in UTC."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d}"


def stamp(at: int) -> str:
    """Return a time as a program reads it."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"


def rate(per_second: float) -> str:
    """Return a rate in the unit in which it is a readable number."""
    if per_second >= 10:
        return f"{per_second:,.0f}/s"
    if per_second >= 0.5:
        return f"{per_second:.1f}/s"
    return f"{per_second * _MINUTE:.1f}/min" if per_second else "0/s"


def money(amount: int) -> str:
    """Return nano-units as units: from one unit on with two decimals, and smaller amounts with three digits."""
    absolute = abs(amount)
    if absolute >= NANO:
        return f"{amount / NANO:,.2f}"
    unit = 10 ** max(0, len(str(absolute)) - _MONEY_DIGITS)
    rounded = (absolute + unit // 2) // unit * unit
    return units(-rounded if amount < 0 else rounded)


def shell(text: str) -> str:
    """Return a text as one word of a shell command."""
    return shlex.quote(text)


def metadata_of(raw: bytes) -> dict[str, str]:
    """Return the metadata of a batch with its values as text; empty if it cannot be read."""
    try:
        found = _fields.decode(raw)
        return {name: _text_of(bytes(value)) for name, value in found.items()}
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _text_of(value: bytes) -> str:
    """Return a string as it is, and any other value as JSON."""
    return _text.decode(value) if value.startswith(b'"') else value.decode()


def name_in(raw: bytes) -> str:
    """Return the name of a batch with this metadata, or an empty text."""
    return name_of(metadata_of(raw))


def name_of(metadata: dict[str, str]) -> str:
    """Return the name that a batch has in its metadata, or an empty text."""
    return next((metadata[name] for name in _NAMES if metadata.get(name, "").strip()), "")
