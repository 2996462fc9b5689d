"""The states of batches, files and shards.

A batch::

    validating ──> in_progress ──> finalizing ──> completed
        │  │            │  │            │
        │  │            │  └─────────┐  └───────┐
        │  │            v            v          v
        │  │         expired     cancelling <───┘
        v  └───────────────────────> │
      failed                         v
                                 cancelled

completed, failed, expired and cancelled are terminal. A batch that is cancelled while it is validated has
no lines yet and becomes cancelled at once. A batch past its window stays ``in_progress`` with ``stop = expired``
until the lines in flight are recorded and its files are written. A batch whose results turn out to be damaged stays
``finalizing`` while the lost lines run again.

A file::

    uploading ──> stored ──> deleted      (by its owner, or by its batch's project; the row stays for audit)
        │            └─────> expired      (by time)
        v
    abandoned                             (the upload broke; the commit of a late writer finds no row)

A shard::

    open <──> leased ──> done             (every line is recorded)
      │          │
      └──> closed <─┘                     (its batch was stopped, or its lines cannot be read: what is not recorded
                                           does not run)

    withheld <──> open, leased            (its batch is held, or runs its trial first: see ``hold.py``)
    withheld ──> closed

    following ──> open, done, closed      (its batch reuses answers: its lines run only if they find none)

A repair sets the shards of a drained batch to what its readable segments hold: done or closed shards are open again if
they have lines that are lost.
"""

from enum import StrEnum


class BatchStatus(StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


TERMINAL = frozenset({BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})
OPEN_STATUSES = tuple(status for status in BatchStatus if status not in TERMINAL)


class Stop(StrEnum):
    """The reason why a batch may start no more attempts."""

    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"
    """An operator ended it: what has no result fails."""


class Hold(StrEnum):
    """Whether a batch that was created with ``hold`` is held, or may be: see ``hold.py``."""

    TRIAL = "trial"
    WATCHING = "watching"
    HELD = "held"
    OFF = "off"


class Reuse(StrEnum):
    """The next step of a batch that was created with ``reuse``: see ``pipeline/reuse.py``."""

    LOOKUP = "lookup"
    """No line may run before it was looked for among earlier answers."""
    FOLLOW = "follow"
    """The lines that no earlier answer was found for may run."""


class FileState(StrEnum):
    UPLOADING = "uploading"
    STORED = "stored"
    DELETED = "deleted"
    EXPIRED = "expired"
    ABANDONED = "abandoned"


class ShardState(StrEnum):
    OPEN = "open"
    LEASED = "leased"
    DONE = "done"
    CLOSED = "closed"
    WITHHELD = "withheld"
    """No worker may claim it now."""
    FOLLOWING = "following"
    """Its lines wait for an answer that they can take."""
