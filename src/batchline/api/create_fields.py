"""Reads the optional fields of a create: ``batchline``, which goes beyond OpenAI's API, and the expiry of results."""

from typing import Any

from msgspec import DecodeError, Raw
from msgspec.json import Decoder

from batchline.domain.errors import InvalidRequest
from batchline.domain.limits import MAX_LIFETIME_SECONDS, MIN_LIFETIME_SECONDS, QUOTED_CHARACTERS

_EXTENSION = "batchline"
_EXPIRY = "output_expires_after"
_object = Decoder(dict[str, Raw])
_anything = Decoder()


def read_hold(fields: dict[str, Raw]) -> bool:
    """Return whether the batch shall be held if nearly all of its lines fail. Raise InvalidRequest.

    The other names in ``batchline`` are checked too. What this version does not do is refused and not ignored.
    """
    hold = False
    for name, raw in (_read_object(fields, _EXTENSION) or {}).items():
        param = f"{_EXTENSION}.{name[:QUOTED_CHARACTERS]}"
        value = _value(raw)
        if name in ("hold", "reuse"):
            if not isinstance(value, bool):
                raise InvalidRequest(f"{param} must be true or false", param=param)
            if name == "hold":
                hold = value
            elif value:
                raise InvalidRequest(f"{param} is not available in this version; leave it out", param=param)
        elif name == "max_cost":
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise InvalidRequest(f"{param} must be a number that is not negative", param=param)
            raise InvalidRequest(f"{param} is not available in this version; leave it out", param=param)
        else:
            raise InvalidRequest(f"{param} is unknown; {_EXTENSION} has hold, reuse and max_cost", param=param)
    return hold


def read_output_lifetime(fields: dict[str, Raw]) -> int | None:
    """Return after how many seconds the result files expire, or None if the client does not say. Raise InvalidRequest.

    The time runs from the creation of each file.
    """
    given = _read_object(fields, _EXPIRY)
    if given is None:
        return None
    expiry = {name: _value(raw) for name, raw in given.items()}
    if unknown := sorted(expiry.keys() - {"anchor", "seconds"}):
        param = f"{_EXPIRY}.{unknown[0][:QUOTED_CHARACTERS]}"
        raise InvalidRequest(f"{param} is unknown; {_EXPIRY} has anchor and seconds", param=param)
    if expiry.get("anchor") != "created_at":
        raise InvalidRequest(f'{_EXPIRY}.anchor must be "created_at"', param=f"{_EXPIRY}.anchor")
    seconds = expiry.get("seconds")
    if type(seconds) is not int or not MIN_LIFETIME_SECONDS <= seconds <= MAX_LIFETIME_SECONDS:
        raise InvalidRequest(
            f"{_EXPIRY}.seconds must be an integer from {MIN_LIFETIME_SECONDS} to {MAX_LIFETIME_SECONDS}",
            param=f"{_EXPIRY}.seconds",
        )
    return seconds


def _read_object(fields: dict[str, Raw], name: str) -> dict[str, Raw] | None:
    """Return the fields of an optional object; None if it is null or absent."""
    raw = fields.get(name, Raw(b"null"))
    if bytes(raw) == b"null":
        return None
    try:
        return _object.decode(raw)
    except (DecodeError, RecursionError):
        raise InvalidRequest(f"{name} must be a JSON object", param=name) from None


def _value(raw: Raw) -> Any:
    """Return a value; None if it cannot be read, which is of no type that any field has."""
    try:
        return _anything.decode(raw)
    except (DecodeError, RecursionError):
        return None
