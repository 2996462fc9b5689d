"""The length of the queue inside an inference engine, as the engine itself reports it."""

from msgspec import Struct


class QueueLength(Struct, frozen=True, kw_only=True):
    """The numbers of requests that an engine has at one moment, from all of its clients."""

    running: float | None
    """The requests that the engine processes now, or None if it does not report them."""
    waiting: float
    """The requests that the engine has accepted and not begun to process."""
