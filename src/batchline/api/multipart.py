"""Parses ``multipart/form-data`` as it arrives: the bytes of the file pass through, other fields are kept in memory.

Starlette's ``form()`` is not used: it has no size limit for files and takes twice the CPU.
"""

import logging
import re
from urllib.parse import unquote

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from batchline.domain.errors import InvalidMultipart, InvalidRequest
from batchline.domain.limits import MAX_CONTENT_TYPE_BYTES

MAX_FIELD_BYTES = 64 * 1024
_MAX_PARTS = 32
_MAX_PART_HEADERS = 16
_MAX_PART_HEADER_BYTES = 8 * 1024
"""Twice the longest path of an operating system. A longer file name is refused, never cut."""
_FILE = "file"
_PARAMETER = re.compile(r'\s*;\s*([^\s;="]+)\s*=\s*(?:"((?:\\.|[^"\\])*+)"|([^;"]*+))', re.DOTALL)
_ESCAPED = re.compile(r'\\(["\\])')
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

# The parser logs a warning with bytes of each body that it cannot parse. The answer says so to the client.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


class Form:
    """A form that is fed in chunks; the methods ``on_*`` are callbacks of the parser."""

    def __init__(self, content_type: str) -> None:
        self.fields: dict[str, str] = {}
        self.has_file = False
        self.filename: str | None = None
        self._parser = _parser(content_type, self)
        self._parts = 0
        self._name: str | None = None
        self._value = b""
        self._header = self._header_value = b""
        self._disposition = b""
        self._pieces: list[bytes] = []
        self._ended = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Parse a chunk of the body and return the pieces of the file in it. Raise InvalidMultipart."""
        self._pieces = []
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise InvalidMultipart("The multipart body could not be parsed") from error
        return self._pieces

    def end(self) -> None:
        """Raise InvalidMultipart if the body ended before its last boundary."""
        if not self._ended:
            raise InvalidMultipart("The multipart body ends before its last boundary")

    def on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise InvalidMultipart(f"The multipart body has more than {_MAX_PARTS} parts")
        self._disposition = b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header = self._header_value = b""

    def on_headers_finished(self) -> None:
        parameters = _parameters(self._disposition.decode("utf-8", "replace"))
        self._name = parameters.get("name")
        self._value = b""
        if self._name is None:
            raise InvalidMultipart("A part of the multipart body has no name")
        if self._name == _FILE:
            self._begin_file(parameters)

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == _FILE:
            self._pieces.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidMultipart(f"A field of the multipart body exceeds {MAX_FIELD_BYTES} bytes")

    def on_part_end(self) -> None:
        if self._name is not None and self._name != _FILE:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def on_end(self) -> None:
        self._ended = True

    def _begin_file(self, parameters: dict[str, str]) -> None:
        if self.has_file:
            raise InvalidMultipart("The multipart body has more than one file")
        self.has_file = True
        name = parameters.get("filename") or _extended(parameters.get("filename*", ""))
        # The name stays as it came, except for control characters: these can harm a terminal that prints them.
        self.filename = _CONTROL.sub("\ufffd", name)


def _parser(content_type: str, form: Form) -> MultipartParser:
    if len(content_type) > MAX_CONTENT_TYPE_BYTES:
        raise InvalidRequest(f"Content-Type exceeds {MAX_CONTENT_TYPE_BYTES} bytes", code="invalid_content_type")
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise InvalidRequest("Content-Type must be multipart/form-data", code="invalid_content_type")
    try:
        return MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": form.on_part_begin,
                "on_part_data": form.on_part_data,
                "on_part_end": form.on_part_end,
                "on_header_field": form.on_header_field,
                "on_header_value": form.on_header_value,
                "on_header_end": form.on_header_end,
                "on_headers_finished": form.on_headers_finished,
                "on_end": form.on_end,
            },
            max_header_count=_MAX_PART_HEADERS,
            max_header_size=_MAX_PART_HEADER_BYTES,
        )
    except (KeyError, FormParserError) as error:
        raise InvalidMultipart("Content-Type has no usable boundary") from error


def _parameters(disposition: str) -> dict[str, str]:
    """Return the parameters of a Content-Disposition, up to the first invalid one."""
    found: dict[str, str] = {}
    at = disposition.find(";")
    while at >= 0 and (parameter := _PARAMETER.match(disposition, at)):
        name, quoted, bare = parameter.groups()
        found[name.lower()] = _ESCAPED.sub(r"\1", quoted) if quoted is not None else bare.strip()
        at = parameter.end()
    return found


def _extended(value: str) -> str:
    """Decode ``UTF-8''na%C3%AFve.jsonl``, as older clients write names that are not ASCII."""
    return unquote(value.split("'", 2)[-1], errors="replace")
