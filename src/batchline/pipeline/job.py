"""The objects in the memory of a worker process: batches, their leased shards, and a job for each line that may run."""

from batchline.domain.estimates import FREE
from batchline.domain.limits import runs_alone
from batchline.domain.lines import Line
from batchline.domain.models import Model
from batchline.domain.outcomes import Retryable
from batchline.domain.records import LeasedBatch, Shard
from batchline.domain.states import Stop
from batchline.pipeline.budget import Budget, LimitedBudget
from batchline.ports import LineTrace

_UNCHECKED = Model(id="", name="")
"""The model of a line that was not checked yet."""


class HeldBatch:
    """A batch of which this process holds shards."""

    def __init__(self, leased: LeasedBatch, *, budget: Budget | LimitedBudget) -> None:
        self.id = leased.id
        self.project_id = leased.project_id
        self.endpoint = leased.endpoint
        self.expires_at = leased.expires_at
        self.work_key = leased.work_key
        self.key_revoked = leased.key_revoked
        self.budget = budget
        self.stop: Stop | None = None
        self.shards: dict[int, HeldShard] = {}
        self.pending_lines = 0
        """The number of jobs of this batch that have no outcome yet and may still get one here."""


class HeldShard:
    """A shard that this process has leased."""

    def __init__(self, shard: Shard, batch: HeldBatch) -> None:
        self.batch = batch
        self.n = shard.n
        self.epoch = shard.epoch
        self.lines = shard.lines
        self.model = shard.model
        self.settled, self.all_settled = int.from_bytes(shard.settled, "little"), (1 << shard.lines) - 1
        self.alone = runs_alone(shard.strikes)
        self.lost = False
        self.withheld = False
        """Whether its batch is held. No further line of the shard starts then, and it is released when none is in
        flight."""

    @property
    def is_held(self) -> bool:
        """Whether it is still held: it has not ended, and no other worker holds it."""
        return self.batch.shards.get(self.n) is self

    def matches(self, stored: Shard | None) -> bool:
        """Return whether the store has the same lines as recorded."""
        return stored is not None and int.from_bytes(stored.settled, "little") == self.settled

    @property
    def key(self) -> tuple[str, int, int]:
        return self.batch.id, self.n, self.epoch


class Job:
    """One line on its way through this process."""

    __slots__ = (
        "answers_before",
        "attempts",
        "batch",
        "body",
        "breaks_alone",
        "broke",
        "estimate",
        "fails_alone",
        "held",
        "last_fault",
        "line",
        "model",
        "position",
        "probes",
        "refusal_cost",
        "shard",
        "suspect",
        "throttles",
        "trace",
        "tries",
        "within_limit",
        "yields_until",
    )

    def __init__(self, line: Line, *, position: int, shard: HeldShard) -> None:
        self.line = line
        self.body = line.body
        """The body to send. The dispatcher and the token limit change it."""
        self.model = _UNCHECKED
        self.estimate = FREE
        self.held = 0
        """The amount that is held against the budget while the line is in flight."""
        self.within_limit = False
        self.position = position
        self.shard = shard
        self.batch = shard.batch
        self.attempts = 0
        """The number of its attempts that failed and count against the limit of attempts: refusals do not."""
        self.tries = 0
        """The number of its attempts that failed, also of refused ones, but without those at a paused upstream."""
        self.throttles = 0.0
        """The sum of the costs of its refusals."""
        self.probes = 0
        """The number of its faults that were forgiven because its upstream was paused. They spend no attempt."""
        self.yields_until = 0.0
        """The time until which its next attempt lets other lines of its model start first."""
        self.refusal_cost: float | None = None
        """The cost of its last attempt if a limit refused it: 0 if the limiter was looking for the limit. Else None."""
        self.last_fault: Retryable | None = None
        self.answers_before: int | None = None
        """The number of answers that its model had given at its last fault."""
        self.fails_alone = False
        """Whether its model went on answering others after it had failed."""
        self.broke = False
        """Whether a connection has broken under it."""
        self.breaks_alone = False
        """Whether it broke while the connections of others stood, so that it is not suspected of a crash."""
        self.suspect = False
        """Whether it may have crashed its upstream, and is tried apart."""
        self.trace: LineTrace | None = None
        """Collects the trace of the line, if it is one of those that are traced."""

    @property
    def line_key(self) -> tuple[str, int]:
        """The batch and the index of its line, which identify it among the lines of all batches."""
        return self.batch.id, self.line.index

    @property
    def has_failed(self) -> bool:
        """Whether an earlier attempt of it has failed in any way."""
        return bool(self.tries or self.probes)

    def cost_of(self, fault: Retryable) -> tuple[int, float]:
        """Return the number of attempts and the part of a refusal that a fault costs."""
        if self.refusal_cost is not None:
            return 0, self.refusal_cost
        return (0, 1.0) if fault.throttled else (1, 0.0)

    def note_fault(self, *, answers: int) -> None:
        """Note that it failed, or that a fault is judged now, when its model has given so many answers."""
        if self.answers_before is not None and answers > self.answers_before:
            self.fails_alone = True
        self.answers_before = answers

    def is_refused_by(self, fault: Retryable) -> bool:
        """Return whether a fault of its last attempt was a refusal, which costs no attempt."""
        return self.cost_of(fault)[0] == 0
