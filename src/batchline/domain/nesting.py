"""Finds JSON that is nested too deeply to be read everywhere.

A parser gives up when its levels and the calls that led to it fill the stack. So what one part of the program can parse
may be too deep for another. What comes from outside is accepted only if it could be parsed below many more calls than
any part of the program makes.
"""

from msgspec import Raw
from msgspec.json import Decoder

_SPARE_CALLS = 300
"""More calls than any part of the program is in when it parses JSON."""
_HARMLESS_LEVELS = 400
"""The number of levels that always fit into the stack of 1,000 calls that Python allows, beside the spare ones."""

_anything = Decoder(Raw)


def is_nested_too_deeply(data: bytes) -> bool:
    """Return whether valid JSON is nested too deeply. Each level needs two brackets, so most JSON is not parsed."""
    if len(data) <= 2 * _HARMLESS_LEVELS or data.count(b"[") + data.count(b"{") <= _HARMLESS_LEVELS:
        return False
    try:
        _parse_below(_SPARE_CALLS, data)
    except RecursionError:
        return True
    return False


def _parse_below(calls: int, data: bytes) -> None:
    if calls:
        _parse_below(calls - 1, data)
    else:
        _anything.decode(data)
