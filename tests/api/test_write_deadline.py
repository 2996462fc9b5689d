"""How slowly a client may read: A14."""

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from batchline.api.write_deadline import WriteDeadline

KiB = 1024
_CHECKS_AT_MOST = 100


class _Connection:
    """A transport and its loop at once: each check of the deadline comes when the test runs it."""

    def __init__(self, *, unread: int) -> None:
        self.unread = unread
        self.check: Callable[[], None] | None = None
        self.expired = False
        self.deadline = WriteDeadline(
            cast(asyncio.Transport, self),
            seconds=30.0,
            loop=cast(asyncio.AbstractEventLoop, self),
            on_expired=self._on_expired,
        )

    def get_write_buffer_size(self) -> int:
        return self.unread

    def call_later(self, _delay: float, check: Callable[[], None]) -> None:
        self.check = check

    def _on_expired(self) -> None:
        self.expired = True

    def run(self, *, taken_by_check: int) -> None:
        """Let the client take bytes before each check, until no more checks come."""
        self.deadline.start()
        for _ in range(_CHECKS_AT_MOST):
            if self.check is None:
                return
            check, self.check = self.check, None
            self.unread = max(0, self.unread - taken_by_check)
            check()


@pytest.mark.rule("A14", "A client that reads slower than 128 KiB in the time is disconnected.")
@pytest.mark.parametrize(("taken", "expired"), [(0, True), (2 * KiB, True), (15 * KiB, True), (16 * KiB, False)])
def test_a_client_must_take_enough_of_a_large_answer(taken: int, expired: bool) -> None:
    connection = _Connection(unread=16 * KiB * KiB)
    connection.run(taken_by_check=taken)
    assert connection.expired == expired


def test_the_rest_of_an_answer_may_be_small() -> None:
    connection = _Connection(unread=20 * KiB)
    connection.run(taken_by_check=3 * KiB)
    assert not connection.expired
    assert connection.unread == 0
