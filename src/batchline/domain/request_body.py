"""Reads the body of a request as a JSON object."""

from msgspec import DecodeError, Raw
from msgspec.json import Decoder

from batchline.domain.errors import InvalidRequest
from batchline.domain.nesting import is_nested_too_deeply

_object = Decoder(dict[str, Raw])


def parse_json_object(body: bytes) -> dict[str, Raw]:
    """Return the fields of a request's body, their values unread. Raise InvalidRequest if it is no JSON object."""
    try:
        # The decoder leaves the UTF-8 of raw values unchecked.
        body.decode()
        fields = _object.decode(body)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("The request's body must be a JSON object") from None
    if is_nested_too_deeply(body):
        raise InvalidRequest("The request's body is nested too deeply")
    return fields
