"""The invariants of every batch, at any time and at its end."""

import json
from collections import Counter
from typing import Any

from batchline.domain.limits import STRIKES
from batchline.domain.records import Batch, LedgerEntry, Organization, ProjectUsage
from batchline.domain.states import TERMINAL, BatchStatus, Stop
from batchline.ports import BatchSnapshot
from tests.simulation.plan import CODES, SUCCEEDS, BatchPlan, Plan
from tests.simulation.virtual import Time

AMPLE_WINDOW = 3600
"""Seconds in which any batch of a simulated world ends, whatever faults it meets."""

_NEXT = {
    BatchStatus.VALIDATING: {BatchStatus.IN_PROGRESS, BatchStatus.FAILED, BatchStatus.CANCELLED},
    BatchStatus.IN_PROGRESS: {BatchStatus.FINALIZING, BatchStatus.EXPIRED, BatchStatus.CANCELLING},
    BatchStatus.FINALIZING: {BatchStatus.COMPLETED, BatchStatus.CANCELLING},
    BatchStatus.CANCELLING: {BatchStatus.CANCELLED},
}
_TIMES = [
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at"),
    *("created_at", "expires_at"),
]


_ORDERED_TIMES = [
    ("created_at", "in_progress_at", "finalizing_at", "completed_at"),
    ("created_at", "in_progress_at", "finalizing_at", "cancelling_at", "cancelled_at"),
    ("created_at", "in_progress_at", "expired_at"),
    ("created_at", "failed_at"),
]


class Violation(AssertionError):
    pass


def require(condition: bool, text: str) -> None:
    if not condition:
        raise Violation(text)


def reachable(status: BatchStatus) -> set[BatchStatus]:
    following = set(_NEXT.get(status, ()))
    return {status} | following | {far for near in following for far in reachable(near)}


class BatchObserver:
    """Compares each state of a batch with the one that was seen before, and its window with the true time."""

    def __init__(self, plan: Plan, time: Time) -> None:
        self.seen: dict[str, Batch] = {}
        self._created: dict[str, float] = {}
        self._last_open_at: dict[str, float] = {}
        self._plan, self._time = plan, time
        self._window = plan.settings.completion_window_seconds

    def note_create(self, file_id: str, *, at: float) -> None:
        """Note when a client created a batch of a file for the first time."""
        self._created.setdefault(file_id, at)

    def last_open_at(self, batch: Batch) -> float:
        """Return the last time at which a batch was not seen as terminal."""
        return self._last_open_at.get(batch.id, self._created[batch.input_file_id])

    def forget(self) -> None:
        """Forget what was seen, because the database has gone back to an earlier state."""
        self.seen.clear()

    def check(self, batch: Batch) -> None:
        if batch.status not in TERMINAL:
            self._last_open_at[batch.id] = self._time.now
        before = self.seen.get(batch.id)
        self.seen[batch.id] = batch
        self._check_times(batch)
        require(batch.completed + batch.failed <= batch.total, f"{batch.id} counts more lines than it has")
        if batch.status in TERMINAL and batch.status is not BatchStatus.FAILED and batch.total:
            require(batch.completed + batch.failed == batch.total, f"{batch.id} is terminal with lines not counted")
            require((batch.output_file_id is not None) == (batch.completed > 0), f"{batch.id} output file")
            require((batch.error_file_id is not None) == (batch.failed > 0), f"{batch.id} error file")
        else:
            require(batch.output_file_id is None and batch.error_file_id is None, f"{batch.id} shows files early")
        if before is None:
            return
        require(batch.status in reachable(before.status), f"{batch.id} went from {before.status} to {batch.status}")
        # Lines whose results were damaged run again.
        fell = batch.completed < before.completed or batch.failed < before.failed
        require(not fell or self._plan.damaged, f"{batch.id} counts fell")
        for name in _TIMES:
            was = getattr(before, name)
            require(was is None or getattr(batch, name) == was, f"{batch.id} changed {name}")
        if before.status in TERMINAL:
            require(batch == before, f"{batch.id} changed after its end")

    def _check_times(self, batch: Batch) -> None:
        """Check that a batch did not expire before the end of its window, and that its times are in order."""
        age = self._time.now - self._created[batch.input_file_id]
        in_time = batch.stop is not Stop.EXPIRED or age >= self._window - self._plan.clock_tolerance
        require(in_time, f"{batch.id} expired after {age:.0f} of {self._window} seconds")
        for name in _ORDERED_TIMES:
            reached = [at for at in (getattr(batch, each) for each in name) if at is not None]
            require(reached == sorted(reached), f"{batch.id} has times that run backwards: {reached}")


def check_files(batch: Batch, plan: BatchPlan, output: bytes, errors: bytes, *, world: Plan) -> None:
    """Check that every line of the input is in exactly one of the two files, once, with the outcome of its fault."""
    in_time = batch.status is not BatchStatus.EXPIRED or world.settings.completion_window_seconds < AMPLE_WINDOW
    require(in_time, f"{batch.id} made no progress until its window ended")
    good = [json.loads(line) for line in output.splitlines()]
    bad = [json.loads(line) for line in errors.splitlines()]
    _check_lines(batch, list(plan.fates), good + bad, damaged=world.damaged)
    require((len(good), len(bad)) == (batch.completed, batch.failed), f"{batch.id} counts are not those of its files")
    for record in good:
        require(plan.fates[record["custom_id"]] in SUCCEEDS, f"{batch.id} succeeded at {record['custom_id']}")
        word = plan.name_in_prompt(int(record["id"].rpartition("_")[2]), record["custom_id"])
        require(f" {word} " in record["response"]["body"]["choices"][0]["message"]["content"] + " ", "answers mixed")
        require(plan.reuses or "reused" not in record, f"{batch.id} reuses answers")
    reported = [record["response"]["body"]["usage"] for record in good if "reused" not in record]
    tokens = [sum(usage[name] for usage in reported) for name in ("prompt_tokens", "completion_tokens")]
    require(tokens == [batch.input_tokens, batch.output_tokens], f"{batch.id} sums tokens that its lines do not report")
    for record in bad:
        _check_error(batch, plan, record, world=world)


def _check_lines(batch: Batch, custom_ids: list[str], records: list[dict[str, Any]], *, damaged: bool) -> None:
    """Check that every line has one result, under its own name. Damage may have taken the name away."""
    times = Counter(int(record["id"].rpartition("_")[2]) for record in records)
    missing = [custom_id for n, custom_id in enumerate(custom_ids) if n not in times]
    require(not missing and len(times) == len(custom_ids), f"{batch.id} lost {missing}")
    require(max(times.values()) == 1, f"{batch.id} has lines twice")
    for record in records:
        name = custom_ids[int(record["id"].rpartition("_")[2])]
        nameless = damaged and record["custom_id"] is None and record["error"]["code"] == "internal_error"
        require(record["custom_id"] == name or nameless, f"{batch.id}: {record['custom_id']} has the place of {name}")


def check_standing(snapshot: BatchSnapshot) -> None:
    """Check that the errors by code add up to the failed lines, as they must at any time."""
    counted = sum(each.count for each in snapshot.errors)
    require(counted == snapshot.batch.failed, f"{snapshot.batch.id} has {counted} errors, {snapshot.batch.failed} fail")


def check_errors(snapshot: BatchSnapshot, errors: bytes) -> None:
    """Check that the errors of a terminal batch are those of its error file, and that each sample is a line of it."""
    records = [json.loads(line) for line in errors.splitlines()]
    codes = Counter(record["error"]["code"] for record in records)
    require({each.code: each.count for each in snapshot.errors} == codes, f"{snapshot.batch.id} counts other errors")
    known = [
        (record["error"]["code"], record["custom_id"] or "", record["error"]["message"][:300]) for record in records
    ]
    for each in snapshot.errors:
        sample = json.loads(each.sample)
        require((each.code, sample["custom_id"], sample["message"]) in known, f"{snapshot.batch.id} shows {sample}")


def check_ledger(organization: Organization, entries: list[LedgerEntry], *, completed: int) -> None:
    """Check that the ledger adds up to what the organization has, and that it has an entry for each answer."""
    require(sum(entry.balance for entry in entries) == organization.balance, "the ledger is not the balance")
    require(sum(entry.credits for entry in entries) == organization.credits, "the ledger is not the credits")
    require(sum(entry.requests for entry in entries) == completed, "answers are not those of the ledger")


def check_reuse(usage: list[ProjectUsage], answers: list[bytes]) -> None:
    """Check that the ledger counts the lines that took an earlier answer."""
    marked = sum(answer.endswith(REUSED) for answer in answers)
    require(sum(row.reused for row in usage) == marked, "reused lines are not those of the ledger")


REUSED = b',"reused":true}'
"""The end of a line that took an earlier answer."""
_LARGEST_INPUT_ESTIMATE = 50 * 550
"""The most that the input of a line is estimated to cost, in nano-units: 200 bytes are 50 tokens."""


def check_money(plan: Plan, organization: Organization, *, answers: list[bytes], short: int) -> None:
    """Check that each answer was paid once, no failed line was, and an overdraft is at most what was in flight."""
    paid = [answer for answer in answers if not answer.endswith(REUSED)]
    costs = [_cost(json.loads(answer)["response"]["body"]) if plan.metered else 0 for answer in paid]
    left = organization.balance + organization.credits
    require(left == plan.funds - sum(costs), f"{plan.funds - left} was charged for answers of {sum(costs)}")
    slots = len(plan.settings.all_upstreams) * (plan.settings.max_concurrency or 0)
    in_flight = slots * (2 if plan.zombies else 1)
    if plan.shared:
        # The balance that a process of a fleet knows may be 2 seconds old.
        in_flight += round(slots * 2 / plan.latency)
    require(left >= -in_flight * max(costs, default=0), f"an overdraft of {-left}")
    # A process that died had spent, as far as it knew, the answers that it did not record. Money for answers that were
    # lost is given back, or was never taken.
    excused = plan.metered and (plan.deaths or plan.damaged or plan.goes_back or plan.storage_fails)
    require(not short or left < _LARGEST_INPUT_ESTIMATE or excused, f"{short} lines found no money, {left} is left")


def _cost(answer: dict[str, Any]) -> int:
    """Return half the price, in nano-units per million tokens, rounded down."""
    price_in, price_out = {"m0": (1_100_000_000, 700_000_000), "m1": (300_000_000, 2_900_000_000)}[answer["model"]]
    usage = answer["usage"]
    return int((usage["prompt_tokens"] * price_in + usage["completion_tokens"] * price_out) // 2_000_000)


def _check_error(batch: Batch, plan: BatchPlan, record: dict[str, dict[str, str]], *, world: Plan) -> None:
    if record["custom_id"] is None:
        return
    fate, error = plan.fates[str(record["custom_id"])], record["error"]
    never_ran = {BatchStatus.CANCELLED: "batch_cancelled", BatchStatus.EXPIRED: "batch_expired"}
    if error["code"] in never_ran.values():
        require(batch.status in never_ran, f"{batch.id}: {error['code']} in a batch that is {batch.status}")
    elif error["code"] == "insufficient_quota":
        require(world.metered, f"{batch.id}: {error} without metering")
    elif error["code"] == "authentication_error":
        require(plan.revoked, f"{batch.id}: {error} with a key that is valid")
    elif batch.stop is None and not (world.damaged and "storage_damaged" in error["message"]):
        lost_cancel = world.goes_back and plan.cancelled
        earned = lost_cancel or error["code"] in CODES.get(fate, set())
        require(earned or _excused(fate, error, world), f"{batch.id}: a line that is {fate} ended as {error}")


def _excused(fate: str, error: dict[str, str], world: Plan) -> bool:
    """Return whether the contract allows the error.

    An outage costs attempts if too few lines see it to recognise it (a pause takes 16 answers of 4 lines): few slots, a
    batch with a few lines for each process, or a shard that runs alone because its worker died. Three deaths of workers
    may hit the same line, also if another line caused them. A frozen process that wakes and takes leases from running
    ones makes these look dead. So does a database that goes back to a copy with leases, and a process that stops while
    the database is away, because it cannot release its leases. A claim that was committed and reported as failed leaves
    leases until the next renewal, and a worker that dies before dies with them, even if it runs another line alone.
    """
    kinds = [each.kind for each in world.disturbances]
    if "dlq_exhausted" in error["message"]:
        deaths = kinds.count("kill") + kinds.count("crash") + kinds.count("go back")
        deaths += kinds.count("stop") if world.has("store outage") or world.storage_fails else 0
        deaths += 2 * (world.poison == "kills worker") + (world.store_fault_chance > 0)
        return world.zombies or deaths >= STRIKES
    outage = "outage" in kinds or world.poison == "kills upstream"
    few_slots = (world.settings.max_concurrency or 0) < 8 or len(world.settings.all_upstreams) > 1
    few = few_slots or any(len(batch.fates) < (8 if world.shared else 4) for batch in world.batches)
    return outage and error["code"] == "internal_error" and (fate != "plain" or few or world.deaths)
