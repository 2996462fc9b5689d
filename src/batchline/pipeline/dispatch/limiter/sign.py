"""Names what the end of a request says about how much its upstream can take."""

from enum import Enum


class Sign(Enum):
    ANSWERED = "answered"
    """The upstream processed it, whatever the answer says."""
    THROTTLED = "throttled"
    """429."""
    OVERLOADED = "overloaded"
    """502, 503, 504 and timeouts. A few of them are no overload."""
    OTHER = "other"
    """It says nothing: a broken connection, a 500, or the request was never sent."""
