"""Writes the work file of a batch and divides it into shards.

Lines of one model stand together, and among them those whose prompts begin alike, so that an inference engine can reuse
its prefix cache. The first line of such a group stands further ahead, because many engines and hosted services can
reuse a prefix only after one request has computed it: if all lines of a group were sent at once, each would pay for it.
Apart from that, lines that may have the longest output come first, so that a batch does not end with a few long ones.
This is a single pass in bounded memory: prompts are compared within the last 16 MiB of lines.

A configured model always has its own shards. Of all other names, the first 64 of a file have their own, and the lines
of the rest share theirs. So a file that names 50,000 models has hardly more shards than one that names a few.
"""

from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate, pairwise
from os import pread
from typing import Any, BinaryIO

from msgspec import DecodeError, Raw
from msgspec.json import Decoder

from batchline.domain.checksum import checksum_of
from batchline.domain.limits import ShardLimits
from batchline.domain.models import MAX_MODEL_CHARACTERS
from batchline.domain.records import SHARED_LANE, NewShard
from batchline.durable import sync

MAX_BUFFERED_BYTES = 16 * 1024 * 1024

PREFIX_BYTES = (128, 1024, 8192)
"""The lengths at which the beginnings of two prompts are compared. A shorter common prefix saves almost nothing."""

FIRST_LINE_LEAD = 256
"""How many lines the first line of a group stands ahead of the others: about as many as are often in flight at once.

A larger lead would push prefixes out of small caches before the others come."""

_OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_MAX_OUTPUT_LIMIT = 2**31

Prefix = tuple[int, ...]

_read_text = Decoder(str).decode
_read_number = Decoder(int).decode


def grouping_key(body: Mapping[str, Raw]) -> str:
    """Return the key that the lines of a shard share: the model that they name, or an empty text.

    The name is stored once per shard, and a file can hold 200 MB of names that are too long for any model. Lines with
    such a name are grouped as if they named none; their bodies keep it.
    """
    try:
        name = _read_text(body["model"])
    except (KeyError, DecodeError):
        return SHARED_LANE
    return name if len(name) <= MAX_MODEL_CHARACTERS else SHARED_LANE


def prompt_prefix(body: Mapping[str, Raw]) -> Prefix:
    """Return hashes of the first 128, 1024 and 8192 bytes of the prompt, or of fewer of them if it is shorter.

    The messages are compared as raw JSON: parsing 4 KB of them would make validation a third slower. If hashes collide,
    a line gets a less useful place, which has no other effect.
    """
    text = bytes(body.get("messages", b""))
    short, middle, long = PREFIX_BYTES
    if len(text) < middle:
        return (hash(text[:short]),)
    if len(text) < long:
        return hash(text[:short]), hash(text[:middle])
    return hash(text[:short]), hash(text[:middle]), hash(text[:long])


def output_limit_of(body: Mapping[str, Raw]) -> int:
    """Return the most output tokens that a request sets as its limit, or 0 if it sets none."""
    largest = 0
    for name in _OUTPUT_LIMITS:
        if name in body:
            largest = max(largest, _output_limit(body[name]))
    return largest


def _output_limit(value: Raw) -> int:
    try:
        return min(_read_number(value), _MAX_OUTPUT_LIMIT)
    except DecodeError:
        # The parser refuses integers with thousands of digits.
        return _MAX_OUTPUT_LIMIT if bytes(value).isdigit() else 0


class _Block:
    """Lines of one model that will stand together in the work file."""

    def __init__(self) -> None:
        self._records: list[bytes] = []
        self._prefixes: dict[Prefix, int] = {}
        self._prefix_of = array("Q")
        self._limits = array("L")
        self.size = 0

    def append(self, prefix: Prefix, record: bytes, limit: int) -> None:
        prefixes = self._prefixes
        self._prefix_of.append(prefixes.setdefault(prefix, len(prefixes)))
        self._limits.append(limit)
        self._records.append(record)
        self.size += len(record)

    def records(self) -> list[bytes]:
        """Return the lines, grouped by prefix in the order of first occurrence, and otherwise in order of arrival.

        If the limits of their outputs differ, the longest come first. Groups with the same beginning are sorted by
        their longest output, and so are the lines of each prefix.
        """
        same_limits = min(self._limits) == max(self._limits)
        if len(self._prefixes) == 1 and same_limits:
            return self._records
        places = self._places()
        place_of: Sequence[Any] = [places[prefix] for prefix in self._prefix_of]
        if not same_limits:
            place_of = self._longest_first(place_of)
        lines = sorted(range(len(place_of)), key=place_of.__getitem__)
        return [self._records[line] for line in self._first_lines_ahead(lines)]

    def _first_lines_ahead(self, lines: Sequence[int]) -> Sequence[int]:
        """Return the lines with the first one of each group whose long prefix they share moved ahead.

        ::

            group    a a a a b b b b c c c c        lead of 4 lines
            sent     a b a a a c b b b c c c
        """
        prefix_of = self._prefix_of
        shared = {number for number, prefix in enumerate(self._prefixes) if len(prefix) > 1}
        if shared:
            shared.intersection_update(number for number, count in Counter(prefix_of).items() if count > 1)
        if not shared:
            return lines
        firsts: deque[int] = deque()
        for place, line in enumerate(lines):
            if prefix_of[line] in shared:
                shared.remove(prefix_of[line])
                firsts.append(place)
        moved: dict[int, None] = {}
        for place, line in enumerate(lines):
            while firsts and firsts[0] <= place + FIRST_LINE_LEAD:
                moved[lines[firsts.popleft()]] = None
            moved[line] = None
        return list(moved)

    def _longest_first(self, place_of: Sequence[Any]) -> Sequence[Any]:
        """Return sort keys for lines by their places, which put the longest output first."""
        beginnings = [prefix[0] if prefix else 0 for prefix in self._prefixes]
        longest: dict[int, int] = {}
        for prefix, limit in zip(self._prefix_of, self._limits, strict=True):
            beginning = beginnings[prefix]
            longest[beginning] = max(limit, longest.get(beginning, 0))
        return [
            (-longest[beginnings[prefix]], place, -limit)
            for prefix, place, limit in zip(self._prefix_of, place_of, self._limits, strict=True)
        ]

    def _places(self) -> Sequence[Any]:
        """Return the sort key of each prefix: the order in which its hashes were first seen."""
        # Most prompts are short. Their prefixes are in that order already.
        if all(len(prefix) == 1 for prefix in self._prefixes):
            return range(len(self._prefixes))
        seen: dict[int, int] = {}
        return [tuple([seen.setdefault(step, len(seen)) for step in prefix]) for prefix in self._prefixes]


class ShardWriter:
    """Writes a work file block by block. It is divided into shards at the end, when the number of lines is known.

    The checksums of the shards are read from the file then, so it must be open for reading too.
    """

    def __init__(self, out: BinaryIO, limits: ShardLimits, *, models: AbstractSet[str] = frozenset()) -> None:
        self._out = out
        self._limits = limits
        self._models = models
        self._other_models: set[str] = set()
        self._open: dict[str, _Block] = {}
        self._buffered = 0
        self._bounds = array("Q", [0])
        self._closed: list[tuple[str, int]] = []

    def add(self, model: str, prefix: Prefix, record: bytes, *, limit: int = 0) -> None:
        size = len(record)
        block = self._open.get(model)
        if block is None or self._buffered + size > MAX_BUFFERED_BYTES:
            self._make_room(size)
            block = self._open.setdefault(self._group_of(model), _Block())
        block.append(prefix, record, limit)
        self._buffered += size

    def finish(self) -> list[NewShard]:
        """Make the work file durable, and return its shards in the order of the file."""
        for model in list(self._open):
            self._close(model)
        self._out.flush()
        sync(self._out.fileno())
        return list(self._shards())

    def _group_of(self, model: str) -> str:
        """Return the model whose shards take a line of this model: its own, or the shared lane."""
        if model == SHARED_LANE or model in self._models or model in self._other_models:
            return model
        if len(self._other_models) == self._limits.max_other_models:
            return SHARED_LANE
        self._other_models.add(model)
        return model

    def _make_room(self, size: int) -> None:
        while self._open and self._buffered + size > MAX_BUFFERED_BYTES:
            self._close_fullest()

    def _close_fullest(self) -> None:
        self._close(max(self._open, key=lambda model: self._open[model].size))

    def _close(self, model: str) -> None:
        block = self._open.pop(model)
        records = block.records()
        self._out.writelines(records)
        self._bounds.extend(accumulate(map(len, records), initial=self._bounds.pop()))
        self._buffered -= block.size
        self._closed.append((model, len(records)))

    def _shards(self) -> Iterator[NewShard]:
        longest = self._limits.lines_for(len(self._bounds) - 1)
        first = 0
        for model, lines in self._closed:
            for start, end in self._runs(first, first + lines):
                pieces = -(-(end - start) // longest)
                # The pieces are of even size: a shard of one left-over line would cost a whole lease.
                cuts = [start + (end - start) * piece // pieces for piece in range(pieces + 1)]
                for begin, stop in pairwise(cuts):
                    offset = self._bounds[begin]
                    length = self._bounds[stop] - offset
                    checksum = checksum_of(pread(self._out.fileno(), length, offset))
                    yield NewShard(offset=offset, length=length, lines=stop - begin, model=model, checksum=checksum)
            first += lines

    def _runs(self, start: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of as many lines as a shard may have. A line that is too large for any range gets its own."""
        while start < last:
            end_by_bytes = bisect_right(self._bounds, self._bounds[start] + self._limits.max_bytes) - 1
            end = min(last, start + self._limits.max_lines, max(end_by_bytes, start + 1))
            yield start, end
            start = end
