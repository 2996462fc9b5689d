"""Decodes the bodies of servers that compress their answers although the request asks them not to."""

import zlib

_GZIP = zlib.MAX_WBITS + 16
_ZLIB = zlib.MAX_WBITS
_RAW_DEFLATE = -zlib.MAX_WBITS
_FORMATS = {b"gzip": (_GZIP,), b"x-gzip": (_GZIP,), b"deflate": (_ZLIB, _RAW_DEFLATE)}
"""The formats that may be meant by a name. By RFC 9110 ``deflate`` has a header of zlib, but some servers send none."""
_PLAIN = frozenset({b"", b"identity"})
_MAX_MEMBERS = 16
"""The most members of one gzip body. Reading each of them copies the rest, so thousands of tiny ones would take
minutes."""


class Undecodable(Exception):
    """The body is not what its encoding says, or it is too large."""


def is_plain(encoding: bytes) -> bool:
    """Return whether a Content-Encoding means that the body is not encoded."""
    return _name(encoding) in _PLAIN


def is_readable(encoding: bytes) -> bool:
    """Return whether ``decode`` knows a Content-Encoding. Several on top of each other are not known."""
    return _name(encoding) in _FORMATS


def decode(body: bytes | bytearray, encoding: bytes, *, max_bytes: int) -> bytes:
    """Return the decoded body. Raise Undecodable, before more than ``max_bytes`` are in memory."""
    for window in _FORMATS.get(_name(encoding), ()):
        try:
            return _inflate(bytes(body), window, max_bytes)
        except zlib.error:
            continue
    raise Undecodable("the answer cannot be decompressed")


def _inflate(rest: bytes, window: int, max_bytes: int) -> bytes:
    """Decompress all members of a body: a gzip file may have several."""
    decoded = bytearray()
    for _ in range(_MAX_MEMBERS):
        member = zlib.decompressobj(window)
        decoded += member.decompress(rest, max_bytes - len(decoded) + 1)
        if len(decoded) > max_bytes:
            raise Undecodable(f"answer over {max_bytes} bytes")
        if not member.eof:
            raise Undecodable("the compressed answer ends early")
        rest = member.unused_data
        if not rest:
            return bytes(decoded)
    raise Undecodable(f"the compressed answer has over {_MAX_MEMBERS} parts")


def _name(encoding: bytes) -> bytes:
    return encoding.strip().lower()
