"""Validates an input file in one streaming pass that checks every line and writes the batch's own work file.

Memory is bounded by one line, the open blocks of the work file and 40 bytes for each custom_id, for a file of any size.
"""

from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NoReturn

from msgspec import DecodeError, Raw, Struct, ValidationError
from msgspec.json import Decoder
from msgspec.json import encode as encode_json
from msgspec.structs import replace

from batchline.domain.input_lines import is_blank, skip_byte_order_mark
from batchline.domain.limits import MAX_FAULTS, QUOTED_CHARACTERS, InputLimits, ShardLimits
from batchline.domain.lines import encode_line
from batchline.domain.nesting import is_nested_too_deeply
from batchline.domain.records import InputFault, json_text
from batchline.domain.request_rules import RequestRules
from batchline.pipeline.shard import ShardWriter, grouping_key, output_limit_of, prompt_prefix
from batchline.ports import Verdict

_CHUNK_BYTES = 256 * 1024
_MAX_PLAIN_ID_CHARACTERS = 40
_DEFAULT_SHARDS = ShardLimits()


class _Request(Struct, frozen=True, kw_only=True):
    """A line as it was read. The defaults stand for fields that are missing or have the wrong type."""

    custom_id: str = ""
    method: str = ""
    url: str | None = None
    body: dict[str, Raw] = {}


_read_request = Decoder(_Request).decode
_read_any = Decoder(Raw).decode
_read_object = Decoder(dict[str, Raw]).decode
_read_text = Decoder(str).decode


class _Offence(Exception):
    """A fault of a line, as the text that follows ``Line N``."""


def validate_file(
    *, source: Path, work: Path, endpoint: str, limits: InputLimits, shards: ShardLimits = _DEFAULT_SHARDS
) -> Verdict:
    """Check ``source`` and write its lines to ``work``, which is complete and durable only if there are no faults."""
    if source.stat().st_size > limits.max_bytes:
        return _refusal([InputFault(f"Input file exceeds maximum size of {limits.max_bytes} bytes")])
    with source.open("rb", buffering=_CHUNK_BYTES) as file, work.open("w+b", buffering=_CHUNK_BYTES) as out:
        if limits.others_share:
            shards = replace(shards, max_other_models=0)
        shard_writer = ShardWriter(out, shards, models=limits.models)
        check = _Check(limits, shard_writer)
        faults = list(islice(check.faults(_non_blank_lines(file, limits.max_line_bytes)), MAX_FAULTS))
        if not faults:
            faults = _file_faults(check, endpoint)
        return _refusal(faults) if faults else Verdict(faults=[], shards=shard_writer.finish(), lines=check.lines)


def _refusal(faults: list[InputFault]) -> Verdict:
    return Verdict(faults=faults, shards=[], lines=0)


def _non_blank_lines(file: BinaryIO, longest: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the physical lines that are not blank, with their numbers; None for a line that is too long.

    A line that is too long is never held in memory as a whole. Nearly all lines keep their line ends, which are white
    space to a JSON parser too.
    """
    skip_byte_order_mark(file)
    most = longest + len(b"\r\n")
    number = 0
    while piece := file.readline(most):
        number += 1
        if len(piece) <= longest and not piece.isspace():
            yield number, piece
            continue
        line = _without_end(piece)
        blank = is_blank(line)
        if len(piece) == most and not piece.endswith(b"\n"):
            blank = _rest_is_blank(file) and blank
        if not blank:
            yield number, line if len(line) <= longest else None


def _without_end(piece: bytes) -> bytes:
    return piece[:-1].removesuffix(b"\r") if piece.endswith(b"\n") else piece


def _rest_is_blank(file: BinaryIO) -> bool:
    """Skip to the end of a line, and return whether the rest of it is blank."""
    blank = True
    while piece := file.readline(_CHUNK_BYTES):
        blank = blank and is_blank(piece)
        if piece.endswith(b"\n"):
            break
    return blank


class _Check:
    """The rules for lines, with the custom_ids and the url of the lines so far."""

    def __init__(self, limits: InputLimits, shard_writer: ShardWriter) -> None:
        self._limits = limits
        self._shard_writer = shard_writer
        self._custom_ids: set[str | bytes] = set()
        self.lines = 0
        self.url: str | None = None

    def faults(self, lines: Iterator[tuple[int, bytes | None]]) -> Iterator[InputFault]:
        """Write valid lines to the work file, and yield the faults of the others in the order of the file."""
        intact = True
        for number, line in lines:
            if self.lines == self._limits.max_lines:
                yield InputFault(f"Input file exceeds maximum of {self._limits.max_lines} lines")
                return
            try:
                request = self._checked(line)
                if intact:
                    self._keep(request)
            except _Offence as offence:
                intact = False
                yield InputFault(f"Line {number} {offence}", number)
            self.lines += 1

    def _keep(self, request: _Request) -> None:
        # The body is encoded again from the checked values. If a key is repeated, only the checked value goes upstream.
        record = encode_line(self.lines, json_text(request.custom_id), encode_json(request.body))
        body = request.body
        self._shard_writer.add(grouping_key(body), prompt_prefix(body), record, limit=output_limit_of(body))

    def _checked(self, line: bytes | None) -> _Request:
        if line is None:
            raise _Offence(f"exceeds maximum size of {self._limits.max_line_bytes} bytes")
        request = _parse(line)
        if self.url is None:
            self._note_url(request.url)
        self._check_custom_id(request.custom_id)
        # Not upper(), which turns U+017F into S too.
        if request.method.lower() != "post":
            raise _Offence('method must be "POST"')
        if request.url is None or request.url != self.url:
            self._refuse_url(request.url)
        _check_body(request.body)
        if self._limits.rules is not None:
            _check_fields(request.body, self._limits.rules)
        return request

    def _note_url(self, url: str | None) -> None:
        # If the first line has no allowed url, the first line that has one decides for the file, so that the other
        # lines are compared with something they can match.
        if url in self._limits.endpoints:
            self.url = url

    def _check_custom_id(self, custom_id: str) -> None:
        if not custom_id:
            raise _Offence("is missing custom_id")
        remembered = _remembered_id(custom_id)
        if remembered in self._custom_ids:
            raise _Offence(f"duplicates custom_id {_quoted(custom_id)}")
        self._custom_ids.add(remembered)

    def _refuse_url(self, url: str | None) -> NoReturn:
        if url is None:
            raise _Offence("is missing url")
        if url not in self._limits.endpoints:
            raise _Offence(f"url {_quoted(url)} is not an allowed batch endpoint")
        raise _Offence(f"url {_quoted(url)} does not match the batch endpoint {_quoted(self.url or '')}")


def _remembered_id(custom_id: str) -> str | bytes:
    """Return a short custom_id, such as a UUID, as it is, and the digest of a longer one."""
    if len(custom_id) <= _MAX_PLAIN_ID_CHARACTERS and custom_id.isascii():
        return custom_id
    return blake2b(custom_id.encode(), digest_size=16).digest()


def _check_body(body: dict[str, Raw]) -> None:
    if not body:
        raise _Offence("is missing body")
    if "stream" in body and bytes(body["stream"]) == b"true":
        raise _Offence("has stream=true; streaming is not supported in batch mode")


def _check_fields(body: dict[str, Raw], rules: RequestRules) -> None:
    if "stream" in body and bytes(body["stream"]) not in (b"false", b"null"):
        raise _Offence("has a stream that is neither false nor null")
    violation = (rules.of(grouping_key(body)) if rules.by_model else rules.default).violation(body)
    if violation is not None:
        raise _Offence(f"has a body that is not allowed: {_quoted(violation.field)} {violation.reason}")


def _file_faults(check: _Check, endpoint: str) -> list[InputFault]:
    if check.url is None:
        return [InputFault("Input file contains no JSONL lines")]
    if check.url != endpoint:
        used = _quoted(check.url)
        return [InputFault(f"endpoint {_quoted(endpoint)} does not match the url {used} used by the input file")]
    return []


def _parse(line: bytes) -> _Request:
    try:
        if not line.isascii():
            line.decode()  # The JSON decoder does not check the UTF-8 inside Raw values.
        try:
            request = _read_request(line)
        except ValidationError:
            # Some value has the wrong type. What follows it was not read, and may not be JSON at all.
            _read_any(line)
            request = _read_loosely(line)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        raise _Offence("is not valid JSON") from None
    if is_nested_too_deeply(line):
        raise _Offence("is not valid JSON")
    return request


def _read_loosely(line: bytes) -> _Request:
    try:
        fields = _read_object(line)
    except ValidationError:
        raise _Offence("must be a JSON object") from None
    body = fields.get("body")
    return _Request(
        custom_id=_text(fields.get("custom_id")) or "",
        method=_text(fields.get("method")) or "",
        url=_text(fields.get("url")),
        body=_read_object(body) if body is not None and _opens_with(body, "{") else {},
    )


def _text(value: Raw | None) -> str | None:
    return _read_text(value) if value is not None and _opens_with(value, '"') else None


def _opens_with(value: Raw, mark: str) -> bool:
    return memoryview(value)[0] == ord(mark)


def _quoted(text: str) -> str:
    return f'"{text[:QUOTED_CHARACTERS]}"'
