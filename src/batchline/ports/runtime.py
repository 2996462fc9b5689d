"""What the pipeline needs of the machine: time, randomness, threads, and validation off the event loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from msgspec import Struct

from batchline.domain.limits import InputLimits
from batchline.domain.records import InputFault, NewShard

T = TypeVar("T")


class Clock(Protocol):
    def now(self) -> float:
        """Unix time, which may jump."""

    def steady(self) -> float:
        """Seconds that only grow; they mean nothing in another process."""

    async def sleep(self, seconds: float) -> None: ...


class Random(Protocol):
    def bytes(self, count: int) -> bytes:
        """Unguessable, for keys and ids."""

    def uniform(self, low: float, high: float) -> float: ...


class Threads(Protocol):
    """Where blocking calls go so that the event loop never waits for a disk."""

    async def run(self, call: Callable[[], T]) -> T: ...


class Verdict(Struct, frozen=True, kw_only=True):
    """What validation found: the first hundred faults in file order, or the shards of the work file."""

    faults: list[InputFault]
    shards: list[NewShard]
    lines: int


class Validator(Protocol):
    async def validate(self, *, source: Path, work: Path, endpoint: str, limits: InputLimits) -> Verdict:
        """Check ``source`` in one pass and write its lines to ``work``, durably; off the event loop."""
