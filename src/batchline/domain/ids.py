"""Ids: what they look like. Time and entropy are handed in, so that a run can be repeated from a seed."""

import re
from hashlib import sha256

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_LEGACY_FILE = re.compile(r"\Afile_(?=[A-Za-z0-9])")


def ulid(at: float, entropy: bytes) -> str:
    """48 bits of milliseconds and 80 random bits: 26 characters that sort by time."""
    number = int(at * 1000) << 80 | int.from_bytes(entropy[:10])
    return "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))


def batch_id(at: float, entropy: bytes) -> str:
    return "batch_" + ulid(at, entropy)


def file_id(entropy: bytes) -> str:
    return "file-" + entropy.hex()


def request_id(entropy: bytes) -> str:
    return "req_" + entropy.hex()


def api_key(entropy: bytes) -> str:
    return "bl-" + entropy.hex()


def line_id(batch: str, index: int) -> str:
    """The same for a line however often it is tried, and in whatever process."""
    return f"batch_req_{batch.removeprefix('batch_')}_{index}"


def canonical_file_id(value: str) -> str:
    """Ids written with the legacy prefix ``file_`` name the same file as their ``file-`` twin."""
    return _LEGACY_FILE.sub("file-", value)


def key_digest(secret: str) -> bytes:
    """Keys carry 192 random bits, so one plain hash is enough to store and to look up by."""
    return sha256(secret.encode("utf-8", "surrogateescape")).digest()
