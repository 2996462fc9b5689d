"""Bounds the bytes of answers that a process holds: those that arrive, and those that are not recorded yet.

A large answer reserves bytes before they are read. If none are left, its connection is not read from until other
answers were recorded. Everything happens on one thread.
"""

from collections import deque
from collections.abc import Callable

_MAX_EXCEEDING = 4
"""The number of answers that may exceed the limit at once. If one of them is very slow, the others still arrive."""


class HeldBytes:
    """The bytes of all answers that a process holds.

    If parts of answers take all bytes and no complete answer is there, those that have waited longest may exceed the
    limit. So an answer can always become complete, and no more than four answers are beyond the limit.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._reserved = 0
        self._unrecorded = 0
        self._complete: set[Reservation] = set()
        """The answers that are complete and will be recorded or dropped."""
        self._waiting: deque[Reservation] = deque()
        self._exceeding: set[Reservation] = set()

    @property
    def total(self) -> int:
        return self._reserved + self._unrecorded

    @property
    def full(self) -> bool:
        """Whether no further answer should be asked for."""
        return self.total >= self._limit

    def add_unrecorded(self, size: int) -> None:
        """Count bytes of a complete answer until they are recorded. They cannot be refused."""
        self._unrecorded += size

    def on_recorded(self, size: int) -> None:
        """Give back bytes that ``add_unrecorded`` counted."""
        self._unrecorded -= size
        self._grant()

    def request(self, reservation: "Reservation") -> None:
        """Give a reservation the bytes that it wants, now or when it is its turn."""
        if reservation in self._exceeding:
            self._give(reservation)
        else:
            self._waiting.append(reservation)
            self._grant()

    def end(self, reservation: "Reservation") -> None:
        """Take back all bytes of a reservation; it wants no more."""
        if reservation.waiting:
            self._waiting.remove(reservation)
        self._exceeding.discard(reservation)
        self._complete.discard(reservation)
        self._reserved -= reservation.size
        self._grant()

    def complete(self, reservation: "Reservation") -> None:
        """Note that a reservation keeps its bytes until it ends and wants no more."""
        self._exceeding.discard(reservation)
        self._complete.add(reservation)

    def _grant(self) -> None:
        """Give bytes to the reservations that wait, in the order of their requests."""
        while self._waiting and self._admit(self._waiting[0]):
            self._give(self._waiting.popleft())

    def _admit(self, reservation: "Reservation") -> bool:
        """Return whether a reservation gets its bytes now. One that exceeds the limit is noted as such."""
        if self.total + reservation.wanted <= self._limit:
            return True
        if self._unrecorded or self._complete or len(self._exceeding) >= _MAX_EXCEEDING:
            return False
        self._exceeding.add(reservation)
        return True

    def _give(self, reservation: "Reservation") -> None:
        self._reserved += reservation.wanted
        reservation.on_given()


class Reservation:
    """The bytes that are reserved for one answer. ``on_room`` is called each time it gets some."""

    def __init__(self, held_bytes: HeldBytes, *, on_room: Callable[[], None]) -> None:
        self._held_bytes, self._on_room = held_bytes, on_room
        self.size = 0
        self.wanted = 0

    @property
    def waiting(self) -> bool:
        """Whether the answer must not be read on, because no bytes are left for it now."""
        return self.wanted > 0

    def grow_to(self, size: int) -> None:
        """Reserve what is missing to this size, now or when it is this answer's turn."""
        if not self.waiting and size > self.size:
            self.wanted = size - self.size
            self._held_bytes.request(self)

    def on_given(self) -> None:
        """Take the bytes that were wanted."""
        self.size += self.wanted
        self.wanted = 0
        self._on_room()

    def complete(self) -> None:
        """Keep the bytes of an answer that is complete, until ``end``."""
        self._held_bytes.complete(self)

    def end(self) -> None:
        """Give all bytes back."""
        self._held_bytes.end(self)
        self.size = self.wanted = 0
