"""Names the kinds of ends of requests, by what they say about the load of the upstream."""

from enum import Enum


class Sign(Enum):
    ANSWERED = "answered"
    """The upstream processed it, whatever the answer says."""
    THROTTLED = "throttled"
    """The answer was 429."""
    UNAVAILABLE = "unavailable"
    """The answer was 503 or 529. If it comes quickly, it is a refusal: some servers refuse with it what exceeds their
    limits."""
    OVERLOADED = "overloaded"
    """The answer was 408, 502 or 504, or there was a timeout. A few of these are no overload. If it comes quickly, it
    may be a refusal: a gateway answers 502 where its server accepts no connection."""
    FAULT = "fault"
    """The answer was another 5xx, or the connection was refused, or it broke at an upstream that is known to reset
    connections. If that comes quickly, it may be a refusal too. Else it says nothing about the load."""
    OTHER = "other"
    """The end says nothing about the load. A connection that breaks may be the fault of its line."""
