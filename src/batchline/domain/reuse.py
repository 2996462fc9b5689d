"""Finds answers to lines that were asked before: digests of lines, indexes of answers, and lines with a copied answer.

An *index* belongs to one batch. It has a digest for each line that ran and succeeded, sorted, and for each digest the
place of the answer in the output file of the batch. It is a cache: it can be made again at any time.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import NamedTuple

from msgspec import Struct
from msgspec.json import Decoder
from msgspec.json import encode as encode_json

from batchline.domain.checksum import checksum_of
from batchline.domain.models import Catalog
from batchline.domain.result_lines import after_custom_id

DIGEST_BYTES = 16
_DIGEST = struct.Struct(f"{DIGEST_BYTES}s")
_PLACE = struct.Struct("<QIQ")
_LINES_PER_SEARCH = 32
"""Searching a sorted index for a digest takes as long as looking at so many of its lines."""
_END, _REUSED_END = b'"error":null}\n', b'"error":null,"reused":true}\n'
_rules = Decoder(dict[str, list[str | int | None]])


class Place(NamedTuple):
    """The place of an answer in an output file, and the checksum of its line."""

    offset: int
    length: int
    checksum: int


class Source(Struct, frozen=True, kw_only=True):
    """A batch whose answers may be reused: its files, and its index if there is one."""

    batch_id: str
    endpoint: str
    total: int
    completed: int
    input_file_id: str
    work_key: str | None
    sent_as: bytes | None
    output_file_id: str
    output_key: str
    output_bytes: int
    output_checksum: int | None
    index_bytes: int | None
    index_checksum: int | None
    index_key: str | None
    index_data: bytes | None


class StoredIndex(Struct, frozen=True, kw_only=True):
    """An index as it is stored: in its row if it is small, else as an object."""

    lines: int
    size: int
    checksum: int
    object_key: str | None = None
    data: bytes | None = None


class LineDigests:
    """Computes the digests of lines: of the project, the url, the body, and how the model is sent to its upstream."""

    def __init__(self, project_id: str, endpoint: str, sent_as: bytes | None) -> None:
        self._beginning = f"{project_id}\n{endpoint}\n".encode()
        self._rules = {} if sent_as is None else _rules.decode(sent_as)
        self._prefixes: dict[str, blake2b] = {}

    def of(self, model: str, body: bytes) -> bytes:
        """Return the digest of a line of a shard with this model."""
        prefix = self._prefixes.get(model)
        if prefix is None:
            rules = encode_json(self._rules.get(model, []))
            prefix = blake2b(self._beginning + rules, digest_size=DIGEST_BYTES)
            self._prefixes[model] = prefix
        digest = prefix.copy()
        digest.update(body)
        return digest.digest()


def sending_rules(catalog: Catalog, models: Iterable[str], project_id: str) -> bytes | None:
    """Return how models are sent to their upstreams, if one of them is not sent as it is: by another name, or cut."""
    rules: dict[str, list[str | int | None]] = {}
    for name in sorted(models):
        model = catalog.find(name, project_id) if name else None
        if model is not None and (model.name != model.id or model.max_tokens is not None):
            rules[name] = [model.name, model.max_tokens, int(model.error_on_max_token)]
    return encode_json(rules) if rules else None


def models_with_rules(sent_as: bytes | None) -> frozenset[str]:
    """Return the models that ``sending_rules`` names: the digests of their lines depend on their rules."""
    return frozenset() if sent_as is None else frozenset(_rules.decode(sent_as))


def encode_index(entries: Iterable[tuple[bytes, Place]]) -> bytes:
    """Return an index: the digests in their order, and then the places in the same order."""
    ordered = sorted(entries)
    return b"".join([digest for digest, _ in ordered]) + b"".join([_PLACE.pack(*place) for _, place in ordered])


def find_in_index(index: bytes, wanted: Mapping[bytes, object]) -> dict[bytes, Place]:
    """Return those of the wanted digests that an index has, with the places of their answers."""
    lines = len(index) // (DIGEST_BYTES + _PLACE.size)
    places_at = lines * DIGEST_BYTES
    if len(wanted) * _LINES_PER_SEARCH < lines:
        return {
            digest: Place._make(_PLACE.unpack_from(index, places_at + n * _PLACE.size))
            for n, digest in _search(index, lines, wanted)
        }
    view = memoryview(index)
    digests = [digest for (digest,) in _DIGEST.iter_unpack(view[:places_at])]
    # Most earlier batches have none of the digests.
    if wanted.keys().isdisjoint(digests):
        return {}
    places = _PLACE.iter_unpack(view[places_at:])
    return {digest: Place._make(place) for digest, place in zip(digests, places, strict=True) if digest in wanted}


def _search(index: bytes, lines: int, wanted: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield which lines of an index have one of a few digests."""
    for digest in wanted:
        low, high = 0, lines
        while low < high:
            middle = (low + high) // 2
            if index[middle * DIGEST_BYTES : (middle + 1) * DIGEST_BYTES] < digest:
                low = middle + 1
            else:
                high = middle
        if low < lines and index[low * DIGEST_BYTES : (low + 1) * DIGEST_BYTES] == digest:
            yield low, digest


def is_reused(line: bytes) -> bool:
    """Return whether a line of an output file has a copied answer."""
    return line.endswith(_REUSED_END)


def answer_of(line: bytes) -> bytes:
    """Return the end of a line of an output file as it stands in a copy of it. Raise Damaged if it is no such line."""
    return line[after_custom_id(line) : -len(_END if line.endswith(_END) else _REUSED_END)] + _REUSED_END


def copied_line(batch: bytes, index: int, custom_id: bytes, answer: bytes) -> bytes:
    """Return the result of a line of a batch with an answer of ``answer_of``. The batch is named without its prefix."""
    return b'{"id":"batch_req_%b_%d","custom_id":%b,%b' % (batch, index, custom_id, answer)


def place_of(line: bytes, offset: int) -> Place:
    """Return the place of a line at an offset."""
    return Place(offset, len(line), checksum_of(line))
