"""Changes inputs at random, in the ways in which parsers are known to go wrong."""

import random
import re
from collections.abc import Callable, Sequence

MAX_INPUT_BYTES = 64 * 1024
_MAX_STEPS = 6
_MAX_REPEATS = 400
"""Enough to exceed the depth to which a recursive function may go."""
_MAX_REPEATED_BYTES = 4096
_NUMBER = re.compile(rb"[0-9]+")
_NUMBERS = (b"0", b"-1", b"1", b"255", b"65536", b"2147483648", b"18446744073709551616", b"1e9", b"00", b"+1", b"0x10")


class Mutator:
    """Makes new inputs from known ones. The same source of randomness makes the same inputs."""

    def __init__(self, source: random.Random, dictionary: Sequence[bytes]) -> None:
        self._source, self._dictionary = source, dictionary
        self.max_bytes = MAX_INPUT_BYTES
        self._steps: list[Callable[[bytes, bytes], bytes]] = [
            self._flip_bit,
            self._set_byte,
            self._insert_word,
            self._insert_word,
            self._replace_by_word,
            self._delete,
            self._duplicate,
            self._repeat,
            self._splice,
            self._change_number,
        ]

    def mutate(self, data: bytes, other: bytes) -> bytes:
        """Return a changed input. Some of its bytes may come from another one."""
        for _ in range(self._source.randint(1, _MAX_STEPS)):
            data = self._source.choice(self._steps)(data, other)
        return data[: self.max_bytes]

    def _span(self, data: bytes, longest: int = 64) -> tuple[int, int]:
        start = self._source.randint(0, len(data))
        return start, min(len(data), start + self._source.randint(0, longest))

    def _word(self) -> bytes:
        return self._source.choice(self._dictionary)

    def _flip_bit(self, data: bytes, _: bytes) -> bytes:
        if not data:
            return data
        at = self._source.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << self._source.randrange(8)]) + data[at + 1 :]

    def _set_byte(self, data: bytes, _: bytes) -> bytes:
        at, _end = self._span(data)
        return data[:at] + bytes([self._source.randrange(256)]) + data[at + 1 :]

    def _insert_word(self, data: bytes, _: bytes) -> bytes:
        at, _end = self._span(data)
        return data[:at] + self._word() + data[at:]

    def _replace_by_word(self, data: bytes, _: bytes) -> bytes:
        start, end = self._span(data)
        return data[:start] + self._word() + data[end:]

    def _delete(self, data: bytes, _: bytes) -> bytes:
        start, end = self._span(data)
        return data[:start] + data[end:]

    def _duplicate(self, data: bytes, _: bytes) -> bytes:
        start, end = self._span(data, len(data))
        at, _end = self._span(data)
        return data[:at] + data[start:end] + data[at:]

    def _repeat(self, data: bytes, _: bytes) -> bytes:
        start, end = self._span(data, 4)
        repeated = data[start:end] or self._word()
        times = min(self._source.randint(2, _MAX_REPEATS), max(2, _MAX_REPEATED_BYTES // len(repeated)))
        return data[:start] + repeated * times + data[end:]

    def _splice(self, data: bytes, other: bytes) -> bytes:
        end, _end = self._span(data)
        start, _end = self._span(other)
        return data[:end] + other[start:]

    def _change_number(self, data: bytes, _: bytes) -> bytes:
        found = list(_NUMBER.finditer(data))
        if not found:
            return data
        number = self._source.choice(found)
        return data[: number.start()] + self._source.choice(_NUMBERS) + data[number.end() :]
