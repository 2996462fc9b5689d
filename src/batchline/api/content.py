"""Sends answers that may be large: the content of a file, all or a range of it, and bodies that are held in memory."""

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from urllib.parse import quote

from msgspec import Struct
from starlette.types import Receive, Scope, Send

from batchline.api.request_context import client_state_of
from batchline.api.responses import JSON
from batchline.domain.errors import RangeNotSatisfiable
from batchline.domain.records import File

_RANGE = re.compile(r"bytes=\s*([0-9]*)-([0-9]*)\s*", re.IGNORECASE)
_MAX_DIGITS = 18
"""A number with more digits counts as 10 ** 18, which is behind the end of every file."""
_SEPARATORS = re.compile(r"[/\\]")
_MAX_NAME_BYTES = 255
"""No file system saves a file under a longer name, and proxies and clients refuse long headers."""
_MAX_SUFFIX_BYTES = 16
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9 ._-]")


class Span(Struct, frozen=True, kw_only=True):
    """The bytes of a file that an answer contains."""

    start: int
    length: int
    partial: bool


def span_of(range_header: str | None, size: int) -> Span:
    """Return the range that a Range header names, or the whole file if it is absent or not one range.

    Raise RangeNotSatisfiable if the range is outside of the file.
    """
    whole = Span(start=0, length=size, partial=False)
    match = _RANGE.fullmatch(range_header or "")
    if match is None or match[0].strip().endswith("=-"):
        return whole
    first, last = (_number(text) for text in match.groups())
    if first is None:
        start, end = max(0, size - (last or 0)), size
    elif last is not None and last < first:
        return whole
    else:
        start, end = first, size if last is None else min(last + 1, size)
    if start >= end:
        raise RangeNotSatisfiable(
            f"The range lies outside of the file's {size} bytes", headers={"content-range": f"bytes */{size}"}
        )
    return Span(start=start, length=end - start, partial=True)


def headers_of(file: File, span: Span) -> dict[str, str]:
    """Return the headers of a download."""
    headers = {
        "content-type": "application/jsonl",
        "content-length": str(span.length),
        "content-disposition": _disposition(file),
        "accept-ranges": "bytes",
        "x-content-type-options": "nosniff",
    }
    if span.partial:
        headers["content-range"] = f"bytes {span.start}-{span.start + span.length - 1}/{file.bytes}"
    return headers


class Content:
    """An answer that sends the chunks of a file, and stops if the client disconnects.

    If the file is damaged, the connection is closed before the announced length was sent.
    """

    def __init__(self, chunks: AsyncGenerator[bytes], *, status: int, headers: Mapping[str, str]) -> None:
        self._chunks = chunks
        self._status = status
        self._headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client_state = client_state_of(scope)
        async with aclosing(self._chunks) as chunks:
            await send({"type": "http.response.start", "status": self._status, "headers": self._headers})
            async for chunk in chunks:
                if client_state.disconnected:
                    return
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def json_content(body: bytes, *, status: int = 200) -> Content:
    """Return an answer with a JSON body. Unlike a Response, it ends only when its client took most of the body."""
    return Content(_one_chunk(body), status=status, headers={"content-type": JSON, "content-length": str(len(body))})


async def _one_chunk(body: bytes) -> AsyncGenerator[bytes]:
    yield body


def _disposition(file: File) -> str:
    """Return Content-Disposition (RFC 6266): an ASCII name, and the percent-encoded real name if it differs."""
    name = _shorten(_SEPARATORS.sub("_", file.filename))
    if not name.strip(". "):
        name = f"{file.id}.jsonl"
    plain = _NOT_PLAIN.sub("_", name)
    extended = "" if plain == name else f"; filename*=UTF-8''{quote(name, safe='')}"
    return f'attachment; filename="{plain}"{extended}'


def _shorten(name: str) -> str:
    """Cut a name that is too long to be saved under. Its suffix is kept."""
    data = name.encode("utf-8", "replace")
    if len(data) <= _MAX_NAME_BYTES:
        return name
    stem, dot, suffix = data.rpartition(b".")
    end = dot + suffix if stem and len(suffix) < _MAX_SUFFIX_BYTES else b""
    return data[: _MAX_NAME_BYTES - len(end)].decode("utf-8", "ignore") + end.decode()


def _number(digits: str) -> int | None:
    if not digits:
        return None
    return int(digits) if len(digits) <= _MAX_DIGITS else 10**_MAX_DIGITS
