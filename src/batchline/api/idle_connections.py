"""Keeps the connections that can give way to a new one, in the order in which they are closed."""

from itertools import islice
from typing import Protocol

_MAX_LOOKED_AT = 64
"""The most connections that are asked whether they can be closed, so that accepting a new one takes bounded time."""


class IdleConnection(Protocol):
    """A connection that has no request of an authenticated client in progress."""

    def give_way(self) -> bool:
        """Close the connection and return True, unless it still holds something for an authenticated client."""


class IdleConnections:
    """All connections of a server that can give way.

    Idle connections without an answered request are closed first, then idle ones that had an answer, then those that
    only wait for a client without a valid key to send its body or to read its answer.
    """

    def __init__(self) -> None:
        self._strangers: dict[IdleConnection, None] = {}
        self._known: dict[IdleConnection, None] = {}
        self._unauthenticated: dict[IdleConnection, None] = {}

    def add(self, connection: IdleConnection, *, answered: bool) -> None:
        """Note that a connection waits for its first request, or for the next one after an answer."""
        (self._known if answered else self._strangers)[connection] = None

    def add_unauthenticated(self, connection: IdleConnection) -> None:
        """Note that a connection waits for its client within a request that nobody authenticated."""
        self._unauthenticated[connection] = None

    def remove(self, connection: IdleConnection) -> None:
        """Note that a connection has a request in progress, or is closed."""
        self._strangers.pop(connection, None)
        self._known.pop(connection, None)
        self._unauthenticated.pop(connection, None)

    def make_room(self) -> bool:
        """Close the connection that waits longest, and return whether there was one."""
        for waiting in (self._strangers, self._known, self._unauthenticated):
            for connection in list(islice(waiting, _MAX_LOOKED_AT)):
                if connection.give_way():
                    return True
        return False
