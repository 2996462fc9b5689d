"""Keeps the connections that wait for a request, so that the one that waits longest can give way to a new one."""

from itertools import islice
from typing import Protocol

_MAX_LOOKED_AT = 64
"""The most connections that are asked whether they can be closed, so that accepting a new one takes bounded time."""


class IdleConnection(Protocol):
    """A connection that has no request in progress."""

    def give_way(self) -> bool:
        """Close the connection and return True, unless it still holds something for its client."""


class IdleConnections:
    """All idle connections of a server. Those without an answered request are closed before those that had one."""

    def __init__(self) -> None:
        self._strangers: dict[IdleConnection, None] = {}
        self._known: dict[IdleConnection, None] = {}

    def add(self, connection: IdleConnection, *, answered: bool) -> None:
        """Note that a connection waits for its first request, or for the next one after an answer."""
        (self._known if answered else self._strangers)[connection] = None

    def remove(self, connection: IdleConnection) -> None:
        """Note that a connection has a request in progress, or is closed."""
        self._strangers.pop(connection, None)
        self._known.pop(connection, None)

    def make_room(self) -> bool:
        """Close the connection that waits longest, and return whether there was one."""
        for waiting in (self._strangers, self._known):
            for connection in list(islice(waiting, _MAX_LOOKED_AT)):
                if connection.give_way():
                    return True
        return False
