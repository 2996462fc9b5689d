"""Defines what the pipeline needs of the machine: time, randomness, threads, and validation off the event loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from msgspec import Struct

from batchline.domain.limits import InputLimits
from batchline.domain.records import InputFault, NewShard

T = TypeVar("T")


class Clock(Protocol):
    """The time of day, a monotonic clock, and sleep."""

    def now(self) -> float:
        """Return the Unix time, which may jump."""

    def steady(self) -> float:
        """Return seconds that only grow. They mean nothing in another process."""

    async def sleep(self, seconds: float) -> None:
        """Wait for that many seconds."""


class MachineClock(Clock, Protocol):
    """The clocks of the machine itself. Only the clock of a store reads them to learn the time."""

    def uptime(self) -> float:
        """Return seconds that only grow, also while the machine is suspended. They mean the same in all processes."""


class StoreClock(Clock, Protocol):
    """The time as the store has it. ``now`` is for times that are written: if it is wrong, it is too late."""

    def due(self) -> float:
        """Return the time up to which windows and lifetimes have certainly ended; 0 while the time is in doubt.

        Everything that cannot be undone is decided by it: if it is wrong, it is too early.
        """


class ClockState(Struct, frozen=True, kw_only=True):
    """The difference between the clock of the machine and the time of the store."""

    ahead_seconds: float = 0.0
    """The seconds that the clock of the machine is ahead; negative if it is behind."""
    held: bool = False
    """Whether nothing expires and nothing is deleted, because the time is in doubt."""
    problem: str | None = None
    """A sentence that says what is wrong and what ends it."""


class WatchedClock(StoreClock, Protocol):
    """The clock of a service, which is compared with another clock every few seconds."""

    @property
    def state(self) -> ClockState:
        """The result of the last comparison."""

    async def check(self) -> ClockState:
        """Compare the clocks and return the result. Raise StoreDown."""


class Random(Protocol):
    """A source of randomness."""

    def bytes(self, count: int) -> bytes:
        """Return unguessable bytes, for keys and ids."""

    def uniform(self, low: float, high: float) -> float:
        """Return a number between ``low`` and ``high``."""


class Threads(Protocol):
    """A pool of threads for blocking calls, so that the event loop never waits for a disk."""

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call in a thread and return its result."""


class Verdict(Struct, frozen=True, kw_only=True):
    """The result of validation: the first hundred faults in file order, or the shards of the work file."""

    faults: list[InputFault]
    shards: list[NewShard]
    lines: int


class ModelSurvey(Struct, frozen=True, kw_only=True):
    """The lines of one model in an input, and their estimated tokens."""

    model: str
    """Empty if the lines name none."""
    lines: int
    input_tokens: int
    output_tokens_at_most: int | None
    """None if a line sets no limit."""
    sample: list[bytes] = []
    """The bodies of a few lines, evenly from all of them; of every line if there are few."""


class Survey(Struct, frozen=True, kw_only=True):
    """The tokens and the cost of an input, by model, and how many of its lines repeat the body of an earlier one."""

    models: list[ModelSurvey]
    duplicates: int


class TableForm(Struct, frozen=True, kw_only=True):
    """A table that was uploaded, and what to ask for each of its rows, as a person wrote it."""

    filename: str
    """Its suffix says which character is between two values."""
    prompt: str
    system: str
    """Empty if there is none."""
    model: str


class TableVerdict(Struct, frozen=True, kw_only=True):
    """The result of turning a table into requests: the first hundred faults in file order, or the size of the file."""

    faults: list[InputFault]
    bytes: int = 0


class Validator(Protocol):
    """Validates input files off the event loop."""

    async def validate(
        self, *, project_id: str, source: Path, work: Path, endpoint: str, limits: InputLimits
    ) -> Verdict:
        """Check ``source`` in one pass and write its lines to ``work``, durably. The projects take turns."""

    async def survey(self, *, project_id: str, work: Path, shards: list[NewShard]) -> Survey:
        """Return what the lines of a work file would take. The projects take turns."""

    async def write_requests(
        self, *, project_id: str, source: Path, target: Path, form: TableForm, max_rows: int
    ) -> TableVerdict:
        """Write a request for each row of the table ``source`` to ``target``, durably. The projects take turns."""

    async def digests(
        self, *, project_id: str, work: Path, shards: list[NewShard], endpoint: str, sent_as: bytes | None
    ) -> bytes:
        """Return the digests of all lines of a work file, in the order of the input. Raise Damaged."""
