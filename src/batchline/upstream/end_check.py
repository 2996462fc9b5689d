"""Tells whether the server has ended a connection, before the event loop has read the end from it.

It is asked before every request, in the thread that holds the interpreter lock nearly all the time. A call that
releases the lock wakes each thread that waits for it, mostly for nothing: with ``poll`` here, the threads that write to
the database and the disk took 13 us of CPU per line in place of 8. ``getsockopt`` does not release it.
"""

import atexit
import select
import socket
import sys

_OPEN_STATE = 1
"""The state of an open connection of TCP, by its number in Linux."""
_SO_MEMINFO = 55
"""The option by which Linux tells how much memory is taken by bytes that were received and not read."""

_borrowed: set[socket.socket] = set()
"""The socket objects of all checks. One that was collected would close its descriptor, which the event loop owns."""


class EndCheck:
    """The check of one connection, from when it was made until it was lost.

    It has a socket object of its own, because that of the event loop makes a new one for each call.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = socket.socket(connected.family, connected.type, connected.proto, fileno=connected.fileno())
        _borrowed.add(self._socket)
        self._poll: select.poll | None = None
        if not self._is_told():
            self._poll = select.poll()
            self._poll.register(self._socket, select.POLLIN)

    def has_ended(self) -> bool:
        """Return whether the server has closed or reset the connection, or sent bytes that were not asked for."""
        return bool(self._poll.poll(0)) if self._poll is not None else not self._is_quiet()

    def _is_told(self) -> bool:
        """Return whether the system tells what is asked for: not every one that runs programs of Linux does."""
        try:
            return sys.platform == "linux" and self._is_quiet()
        except OSError:
            return False

    def _is_quiet(self) -> bool:
        get = self._socket.getsockopt
        # The first byte of what Linux tells about a connection is its state.
        is_open = get(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _OPEN_STATE
        return is_open and get(socket.SOL_SOCKET, _SO_MEMINFO) == 0

    def close(self) -> None:
        """End the check. The event loop owns the descriptor and closes it."""
        self._socket.detach()
        _borrowed.discard(self._socket)


@atexit.register
def _return_descriptors() -> None:
    """Leave the descriptors of checks that were never closed to the end of the process."""
    while _borrowed:
        _borrowed.pop().detach()
