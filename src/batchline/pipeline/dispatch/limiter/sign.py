"""Names the kinds of ends of requests, by what they say about the load of the upstream."""

from enum import Enum


class Sign(Enum):
    ANSWERED = "answered"
    """The upstream processed it, whatever the answer says."""
    THROTTLED = "throttled"
    """The answer was 429."""
    UNAVAILABLE = "unavailable"
    """The answer was 503. If it comes quickly, it is a refusal: some servers use it for what exceeds their limits."""
    OVERLOADED = "overloaded"
    """The answer was 502 or 504, or there was a timeout. A few of these are no overload."""
    OTHER = "other"
    """The end says nothing: the connection broke, the answer was 500, or the request was never sent."""
