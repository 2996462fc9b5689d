"""Cuts an input into pieces, as a network does."""

import random
from collections.abc import Iterator
from itertools import pairwise
from zlib import crc32

_MAX_CUTS = 5


def pieces_of(data: bytes) -> Iterator[bytes]:
    """Yield the input in pieces, none of them empty. Where it is cut follows from the input alone."""
    source = random.Random(crc32(data))
    cuts = sorted(source.randint(0, len(data)) for _ in range(source.randint(1, _MAX_CUTS)))
    for start, end in pairwise([0, *cuts, len(data)]):
        if start < end:
            yield data[start:end]
