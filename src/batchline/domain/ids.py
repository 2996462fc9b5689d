"""Makes ids. Time and entropy are arguments, so that a run can be repeated from a seed."""

import re
from hashlib import sha256

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_LEGACY_FILE = re.compile(r"\Afile_(?=[A-Za-z0-9])")


def ulid(at: float, entropy: bytes) -> str:
    """Return 48 bits of milliseconds and 80 random bits as 26 characters that sort by time."""
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
    """Return the id of a line, which is the same for every attempt in every process."""
    return f"batch_req_{batch.removeprefix('batch_')}_{index}"


def canonical_file_id(value: str) -> str:
    """Return a file id with the prefix ``file-``; the legacy prefix ``file_`` names the same file."""
    return _LEGACY_FILE.sub("file-", value)


def key_digest(secret: str) -> bytes:
    """Return the hash that a key is stored and looked up by; keys have 192 random bits, so one plain hash is enough."""
    return sha256(secret.encode("utf-8", "surrogateescape")).digest()
