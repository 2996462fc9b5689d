"""Merges a JSON document into others by RFC 7396. What it does not name keeps its bytes."""

from typing import Self

from msgspec import DecodeError, Raw
from msgspec.json import Decoder
from msgspec.json import encode as encode_json

_read_object = Decoder(dict[str, Raw]).decode

_MAX_DEPTH = 100
"""No request has fields that deep, and each level is a call."""


class MergePatch:
    """A patch: each field is a value to set, None to remove the field, or a patch of the object in it."""

    def __init__(self, fields: "dict[str, Raw | MergePatch | None]") -> None:
        self._fields = fields

    @classmethod
    def parse(cls, document: bytes, *, depth: int = 0) -> Self:
        """Return the patch in a document. Raise ValueError if it is not a JSON object, or nested too deep."""
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deep")
        try:
            fields = _read_object(document)
        except (DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError("not a JSON object") from error
        return cls({name: cls._field(value, depth=depth) for name, value in fields.items()})

    @classmethod
    def _field(cls, value: Raw, *, depth: int) -> "Raw | MergePatch | None":
        text = bytes(value)
        if text.startswith(b"{"):
            return cls.parse(text, depth=depth + 1)
        return None if text == b"null" else value

    def apply(self, document: bytes) -> bytes:
        """Return a JSON document with the patch merged into it. If it is not an object, it becomes one."""
        fields = _read_object(document) if document.startswith(b"{") else {}
        for name, value in self._fields.items():
            if value is None:
                fields.pop(name, None)
            elif isinstance(value, MergePatch):
                fields[name] = Raw(value.apply(bytes(fields.get(name, Raw(b"null")))))
            else:
                fields[name] = value
        return encode_json(fields)
