"""Defines what a check reports: findings by kind, what is done about each, and how much was checked."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

_MAX_NAMED = 1000
"""The most findings of one kind that are kept. If a whole disk is lost, further ones are of no use."""


class Kind(StrEnum):
    """The subject of a finding. The values are part of the JSON report."""

    IDENTITY = "identity"
    UPLOAD = "upload"
    RESULT = "result"
    WORK = "work"
    SEGMENT = "segment"
    LINES = "lines"
    COUNTS = "counts"
    STATE = "state"
    LEASE = "lease"
    LANE = "lane"
    USAGE = "usage"
    BALANCE = "balance"
    LEFTOVER = "leftover"


TITLES = {
    Kind.IDENTITY: "The database and the objects",
    Kind.UPLOAD: "Uploaded files",
    Kind.RESULT: "Result files",
    Kind.WORK: "Work files of batches that have not ended",
    Kind.SEGMENT: "Segments, which hold recorded results",
    Kind.LINES: "Lines that are not in the results exactly once",
    Kind.COUNTS: "Counts and tokens of batches",
    Kind.STATE: "States of batches",
    Kind.LEASE: "Leases",
    Kind.LANE: "Shards that no worker finds",
    Kind.USAGE: "Usage in the ledger",
    Kind.BALANCE: "Balances of organizations",
    Kind.LEFTOVER: "Objects that no row needs",
}

_NOTES = frozenset({Kind.LEFTOVER})
"""Kinds that say nothing is wrong: every killed process may leave an object behind, and the sweep deletes it."""


class Fix(StrEnum):
    """The way in which ``--repair`` repairs a finding."""

    REMAKE_RESULT = "remake_result"
    CORRECT_COUNTS = "correct_counts"
    CORRECT_DRAINED = "correct_drained"
    CORRECT_TIMES = "correct_times"
    CLOSE_SHARDS = "close_shards"
    OPEN_LANES = "open_lanes"
    HAND_OVER = "hand_over"
    SET_TO_LEDGER = "set_to_ledger"


class RepairStatus(StrEnum):
    """The result of a repair. The values are part of the JSON report."""

    NOT_TRIED = "not_tried"
    REPAIRED = "repaired"
    HANDED_OVER = "handed_over"
    NOT_POSSIBLE = "not_possible"


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that is wrong: what it is about, the problem, and what happens or what to do next."""

    kind: Kind
    problem: str
    next: str
    batch: str | None = None
    file: str | None = None
    object: str | None = None
    shard: int | None = None
    organization: str | None = None
    fix: Fix | None = None
    repair_status: RepairStatus = RepairStatus.NOT_TRIED

    @property
    def is_note(self) -> bool:
        """Whether nothing is wrong: something is only left over."""
        return self.kind in _NOTES

    @property
    def remains(self) -> bool:
        """Whether this is wrong and has not been repaired."""
        return not self.is_note and self.repair_status is not RepairStatus.REPAIRED

    def same_as(self, other: "Finding") -> bool:
        """Return whether another check found the same."""
        return replace(self, repair_status=RepairStatus.NOT_TRIED) == replace(
            other, repair_status=RepairStatus.NOT_TRIED
        )


@dataclass(kw_only=True)
class Checked:
    """The amounts that were checked so far. ``on_progress`` is called whenever it grows."""

    batches: int = 0
    files: int = 0
    segments: int = 0
    objects: int = 0
    organizations: int = 0
    bytes: int = 0
    on_progress: Callable[["Checked"], None] = field(default=lambda _: None, repr=False)

    def add(self, **more: int) -> None:
        """Add to the numbers."""
        for name, count in more.items():
            setattr(self, name, getattr(self, name) + count)
        self.on_progress(self)


@dataclass(kw_only=True)
class FsckReport:
    """All findings, up to a number of each kind, and how many there are in all."""

    checked: Checked
    findings: list[Finding] = field(default_factory=list)
    found: Counter[Kind] = field(default_factory=Counter)
    repaired: int = 0
    remaining: int = 0

    def add(self, findings: Iterable[Finding]) -> None:
        """Add findings."""
        for finding in findings:
            self.found[finding.kind] += 1
            self.repaired += finding.repair_status is RepairStatus.REPAIRED
            self.remaining += finding.remains
            if self.found[finding.kind] <= _MAX_NAMED:
                self.findings.append(finding)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong, or nothing any more."""
        return self.remaining == 0

    def of_kind(self, kind: Kind) -> list[Finding]:
        """Return the findings of a kind that are kept."""
        return [finding for finding in self.findings if finding.kind is kind]
