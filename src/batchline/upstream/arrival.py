"""Tells whether the first bytes that were sent on a connection have reached the server.

The system of a server holds only a few connections that the server has not yet accepted, in many servers 5 or 100. A
further one seems open to its client, but whatever is sent on it is ignored, and after a minute it is forgotten. Its
client sends again after 0.2 s, 0.4 s and so on. If many clients do so at the same times, few get in each time, and a
line waits for a minute or two before an idle server.

A connection on which all acknowledgements are lost on the way looks the same, though its bytes have arrived.
"""

import socket
import struct
import sys
from enum import Enum, auto

_TCP_INFO = struct.Struct("=2xB21xI92xQ")
"""Linux tells how often the oldest segment was sent again, how many segments are not acknowledged, and how many bytes
are."""
_OPENING_BYTES = 1
"""The opening of a connection counts as one byte that was acknowledged."""
_IGNORED_REPEATS = 2


class Arrival(Enum):
    ARRIVED = auto()
    UNKNOWN = auto()
    IGNORED = auto()
    """It was sent several times, and never acknowledged."""


def arrival_of(sock: socket.socket) -> Arrival:
    """Return what is known of the bytes sent on this connection. Where the system does not tell, they have arrived."""
    if sys.platform != "linux":
        return Arrival.ARRIVED
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(info) < _TCP_INFO.size:
        return Arrival.ARRIVED
    repeats, unacknowledged_segments, acknowledged_bytes = _TCP_INFO.unpack(info)
    if unacknowledged_segments == 0 or acknowledged_bytes > _OPENING_BYTES:
        return Arrival.ARRIVED
    return Arrival.IGNORED if repeats >= _IGNORED_REPEATS else Arrival.UNKNOWN
