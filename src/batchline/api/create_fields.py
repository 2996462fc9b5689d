"""Reads the optional fields of a create: ``batchline``, which goes beyond OpenAI's API, and the expiry of results."""

from decimal import Decimal, InvalidOperation
from typing import Any

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder

from batchline.domain.errors import InvalidRequest
from batchline.domain.limits import MAX_LIFETIME_SECONDS, MIN_LIFETIME_SECONDS, QUOTED_CHARACTERS
from batchline.domain.money import MAX_AMOUNT, NANO

_EXTENSION = "batchline"
_EXPIRY = "output_expires_after"
_object = Decoder(dict[str, Raw])
_anything = Decoder()


class Extension(Struct, frozen=True, kw_only=True):
    """The object ``batchline`` of a create."""

    hold: bool = False
    reuse: bool = False
    max_cost: int | None = None
    """Nano-units."""


def read_extension(fields: dict[str, Raw]) -> Extension:
    """Return what a create says beyond OpenAI's API. Raise InvalidRequest."""
    given: dict[str, Any] = {}
    for name, raw in (_read_object(fields, _EXTENSION) or {}).items():
        param = f"{_EXTENSION}.{name[:QUOTED_CHARACTERS]}"
        value = _value(raw)
        if name in ("hold", "reuse"):
            if not isinstance(value, bool):
                raise InvalidRequest(f"{param} must be true or false", param=param)
            given[name] = value
        elif name == "max_cost":
            given[name] = _amount(raw, value, param=param)
        else:
            raise InvalidRequest(f"{param} is unknown; {_EXTENSION} has hold, reuse and max_cost", param=param)
    return Extension(**given)


def _amount(raw: Raw, value: Any, *, param: str) -> int:
    """Return an amount of units in nano-units, rounded down."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_AMOUNT:
        raise InvalidRequest(f"{param} must be a number from 0 to {MAX_AMOUNT}", param=param)
    try:
        return int(Decimal(bytes(raw).decode()) * NANO)
    except InvalidOperation:
        # No Decimal has an exponent of 20 digits. The value is in range, so it is zero or close to it.
        return 0


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
    """Return a value, or None if it cannot be read. No field accepts None, so both are refused."""
    try:
        return _anything.decode(raw)
    except (DecodeError, RecursionError):
        return None
