"""Limits what one project, and all of them together, may have under way, so that none takes the service from others."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from batchline.domain.errors import RateLimited

_RETRY_AFTER_SECONDS = 1
_SMALL_BODY_BYTES = 64 * 1024
"""The size up to which a body is accepted at the limit of the service, if its project holds no other."""


class Throttle:
    """Counts the requests of every project; ``of`` names them in the error message, ``bound`` in the metrics."""

    def __init__(self, limit: int, *, of: str, bound: str) -> None:
        self._limit, self._of, self._bound = limit, of, bound
        self._in_flight: Counter[str] = Counter()

    @contextmanager
    def slot(self, project_id: str) -> Iterator[None]:
        """Hold one of the project's slots. Raise RateLimited if all are taken."""
        if self._in_flight[project_id] >= self._limit:
            raise RateLimited(
                f"This project has {self._limit} {self._of} under way already. Try again shortly.",
                retry_after=_RETRY_AFTER_SECONDS,
                bound=self._bound,
            )
        self._in_flight[project_id] += 1
        try:
            yield
        finally:
            self._in_flight[project_id] -= 1
            if not self._in_flight[project_id]:
                del self._in_flight[project_id]


class BodyBytes:
    """Counts the bytes of the bodies that calls hold, until each call has ended.

    For its project a body counts with the largest size that it can have, from before it is read. For the service it
    counts with what has arrived, so that bodies that arrive slowly do not keep out the calls of other projects.

    One body is always accepted, however large, if nothing else is held against the same limit. The service also accepts
    a body of up to ``_SMALL_BODY_BYTES`` of a project that holds no other.
    """

    def __init__(self, *, limit: int, project_limit: int) -> None:
        self._limit, self._project_limit = limit, project_limit
        self._arrived = 0
        self._by_project: Counter[str] = Counter()

    @contextmanager
    def reserve(self, project_id: str, size: int | None, *, max_size: int) -> Iterator["BodyReservation"]:
        """Hold room for one body, whose size is None if it is not known. Raise RateLimited if too much is held.

        The caller calls ``cover`` while the body arrives.
        """
        most = max_size if size is None else min(size, max_size)
        if 0 < self._by_project[project_id] > self._project_limit - most:
            raise RateLimited(
                f"This project has synchronous calls under way with {self._project_limit} bytes. Try again shortly.",
                retry_after=_RETRY_AFTER_SECONDS,
                bound="project_call_bytes",
            )
        reservation = BodyReservation(self, project_id, is_only_one=not self._by_project[project_id])
        # A body that cannot fit is refused before its bytes take the room of others.
        self.check_room(reservation, 0 if size is None else most)
        self.add_to_project(project_id, most)
        try:
            yield reservation
        finally:
            self.add_to_project(project_id, -most - reservation.answer_bytes)
            self.add_arrived(-reservation.bytes)

    def check_room(self, reservation: "BodyReservation", size: int) -> None:
        """Raise RateLimited if the service has no room for the first ``size`` bytes of a body."""
        others = self._arrived - reservation.bytes
        is_small = reservation.is_only_one and size <= _SMALL_BODY_BYTES
        if not is_small and 0 < others > self._limit - size:
            raise RateLimited(
                "The service has too many large synchronous calls under way. Try again shortly.",
                retry_after=_RETRY_AFTER_SECONDS,
                bound="call_bytes",
            )

    def add_arrived(self, size: int) -> None:
        """Count bytes that have arrived, or that are held no more if ``size`` is negative."""
        self._arrived += size

    def add_to_project(self, project_id: str, size: int) -> None:
        """Count bytes that a project holds, or that it holds no more if ``size`` is negative."""
        self._by_project[project_id] += size
        if not self._by_project[project_id]:
            del self._by_project[project_id]


class BodyReservation:
    """The bytes of one body that have arrived. ``is_only_one`` says that its project held no other when it began."""

    def __init__(self, body_bytes: BodyBytes, project_id: str, *, is_only_one: bool) -> None:
        self._body_bytes, self._project_id = body_bytes, project_id
        self.is_only_one = is_only_one
        self.bytes = self.answer_bytes = 0

    def cover(self, size: int) -> None:
        """Count the first ``size`` bytes of the body as held. Raise RateLimited if they do not fit."""
        self._body_bytes.check_room(self, size)
        self._body_bytes.add_arrived(size - self.bytes)
        self.bytes = size

    def add_answer(self, size: int) -> None:
        """Count the bytes of the answer too, for the project alone. They are charged already, so they always fit."""
        self._body_bytes.add_to_project(self._project_id, size)
        self.answer_bytes += size
