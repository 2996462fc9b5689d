"""Disconnects a client that does not read its answers, so that nothing is held for it any longer."""

import asyncio
from collections.abc import Callable

_CHECKS = 8
"""The number of checks of the bytes that wait before a client is given up. A client that reads may have unread bytes at
some of these checks, but not at all of them."""
_MIN_PROGRESS_BYTES = 128 * 1024
"""The bytes that a client must take within the deadline if it does not take everything. A phone at 10 KB/s takes twice
as much in 30 s, and the largest answer of a call cannot be held for much longer than an hour."""


class WriteDeadline:
    """Watches the write buffer of one connection while bytes wait in it."""

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        seconds: float,
        loop: asyncio.AbstractEventLoop,
        on_expired: Callable[[], None],
    ) -> None:
        self._transport, self._loop = transport, loop
        self._interval = seconds / _CHECKS
        self._on_expired = on_expired
        self._timer: asyncio.TimerHandle | None = None
        self._unread_bytes = 0
        self._checks = 0

    def start(self) -> None:
        """Begin to watch, unless the connection is watched already."""
        if self._timer is None:
            self.note_progress()
            self._timer = self._loop.call_later(self._interval, self._check)

    def note_progress(self) -> None:
        """Give the client the whole time again."""
        self._unread_bytes = self._transport.get_write_buffer_size()
        self._checks = 0

    def stop(self) -> None:
        """End the watch."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        unread = self._transport.get_write_buffer_size()
        if unread == 0:
            return
        self._checks += 1
        if unread <= self._unread_bytes - _MIN_PROGRESS_BYTES:
            self.note_progress()
        if self._checks >= _CHECKS:
            self._on_expired()
        else:
            self._timer = self._loop.call_later(self._interval, self._check)
