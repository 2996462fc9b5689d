"""Derives from a seed what happens in a world: settings, batches, and the disturbances of the service."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal

from batchline.domain.result_order import START, Cursor
from batchline.settings import ModelSettings, Settings, UpstreamSettings
from batchline.store.sqlite.clock import TOLERANCE_SECONDS
from tests.simulation.clocks import ERRORS, SMALL_ERRORS
from tests.simulation.upstream import WORKER_POISON

ENDPOINT = "/v1/chat/completions"
SHORT_RETENTION_SECONDS = 150
"""A lifetime of files that some of them reach. Else they live for longer than any world."""
WORK_RETENTION_SECONDS = 15
MAX_LOST_SECONDS = 10.0
"""How far a database goes back at most: not so far that work which it needs again may be deleted."""

FATES = {
    "plain": "",
    "refused": "[[status=400]]",
    "flaky": "[[status=503 times=2]]",
    "throttled": "[[status=429 retry-after=2 times=3]]",
    "dropped": "[[drop times=1]]",
    "cut": "[[cut times=2]]",
    "slow": "[[delay=7]]",
    "hangs": "[[hang times=1]]",
    "broken": "[[status=500]]",
    "kills upstream": "[[crash]]",
    "kills worker": WORKER_POISON.decode(),
}
SUCCEEDS = frozenset({"plain", "flaky", "throttled", "dropped", "cut", "slow", "hangs"})
CODES = {
    "refused": {"invalid_request_error"},
    "broken": {"internal_error"},
    "kills upstream": {"internal_error"},
    "kills worker": {"internal_error"},
}


_METERED = {
    "metering": True,
    "upstreams": {"second": UpstreamSettings(url="http://second/v1")},
    "models": {
        "m0": ModelSettings(input_price=Decimal("1.1"), output_price=Decimal("0.7")),
        "m1": ModelSettings(upstream=("second",), input_price=Decimal("0.3"), output_price=Decimal("2.9")),
    },
}
"""Two models, each on its own upstream, at prices that lead to fractions of a nano-unit for every line."""


@dataclass
class BatchPlan:
    """One client and its batch. A client keeps what it knows when the service dies."""

    project_id: str
    fates: dict[str, str]
    key_id: str
    models: int
    starts_at: float
    cancel_after: float | None
    revoke_after: float | None
    """Seconds after which the key of the batch is revoked."""
    idempotency_key: str | None
    creates_twice: bool
    """Whether the client gets no reply to its create and sends it again."""
    deletes_input: bool
    """Whether the client deletes its input file as soon as the batch exists."""
    deletes_results: bool
    """Whether the client deletes the result files once it has them."""
    file_id: str | None = None
    batch_id: str | None = None
    tried: bool = False
    """Whether a create of the file was sent before."""
    cancelled: bool = False
    """Whether a cancel was sent. The database may have lost it."""
    revoked: bool = False
    cursor: Cursor = START
    """The place behind the results that the client has read while the batch ran."""
    read: list[int] = field(default_factory=list)
    """The lines that it has read so far."""
    read_generation: int = 0
    done: bool = False

    @property
    def reuses(self) -> bool:
        """Whether the batch is created with ``reuse``."""
        return int(self.starts_at * 1000) % 3 == 0

    def name_in_prompt(self, n: int, custom_id: str) -> str:
        """Return the word in the prompt of a line. Some lines of batches that reuse answers are equal."""
        return f"same-{n // 4}" if self.reuses and self.fates[custom_id] == "plain" else custom_id

    def input(self) -> bytes:
        return b"".join(
            json.dumps(
                {
                    "custom_id": custom_id,
                    "method": "POST",
                    "url": ENDPOINT,
                    "body": {
                        "model": f"m{n * 7 % self.models}",
                        "messages": [{"role": "user", "content": self._prompt(n, custom_id, fate)}],
                    },
                }
            ).encode()
            + b"\n"
            for n, (custom_id, fate) in enumerate(self.fates.items())
        )

    def _prompt(self, n: int, custom_id: str, fate: str) -> str:
        return f"{self.project_id} {self.name_in_prompt(n, custom_id)} {FATES[fate]}"


@dataclass
class Disturbance:
    """Something that happens at a step of the world::

    kill            a process is killed
    crash           the machine crashes, and its disk forgets what was not synced
    stop            a process is stopped cleanly
    freeze          a process stands still, so that it wakes after its leases expired
    outage          the upstream is unavailable
    store outage    the database is unavailable, and likewise "objects outage"
    clock           the clock of a machine is set, so that it is ahead by ``seconds``
    damage          the disk damages an object
    copy, go back   the database goes back to the state that it had at the copy
    """

    step: int
    kind: str
    seconds: float = 0.0


@dataclass
class Plan:
    settings: Settings
    batches: list[BatchPlan]
    disturbances: list[Disturbance]
    latency: float
    disk_latency: float
    inline_bytes: int
    zombies: bool
    poison: str
    funds: int
    """The nano-units of the organization at the start."""
    shared: bool
    """Whether two machines work on one database, or one machine on its own."""
    store_fault_chance: float
    """How likely each call to the database fails, and likewise for the objects."""
    object_fault_chance: float
    sweep_seconds: float
    stranger: bool
    """Whether a process with an empty database of its own is started on the same objects."""

    @property
    def metered(self) -> bool:
        return self.settings.metering

    @property
    def doubts_clock(self) -> bool:
        """Whether the clock of a machine is wrong at some time."""
        jumps = (each.seconds for each in self.disturbances if each.kind == "clock")
        return any(seconds not in SMALL_ERRORS for seconds in jumps)

    @property
    def deaths(self) -> bool:
        return self.zombies or self.poison == "kills worker" or self.has("kill") or self.has("crash")

    @property
    def clock_tolerance(self) -> float:
        """By how many seconds the clock that ends things may be wrong."""
        return 1.0 if self.shared else TOLERANCE_SECONDS

    @property
    def damaged(self) -> bool:
        return self.has("damage")

    @property
    def goes_back(self) -> bool:
        return self.has("go back")

    @property
    def short_retention(self) -> bool:
        """Whether files may reach the end of their lifetime."""
        return self.settings.file_retention_seconds == SHORT_RETENTION_SECONDS

    @property
    def storage_fails(self) -> bool:
        return self.store_fault_chance > 0 or self.object_fault_chance > 0

    def has(self, kind: str) -> bool:
        """Return whether a disturbance of this kind is planned."""
        return any(each.kind == kind for each in self.disturbances)


def make_plan(source: random.Random, projects: list[str]) -> Plan:
    poison = source.choice(["", "", "", "kills upstream", "kills worker"])
    zombies = source.random() < 0.3
    shared = source.random() < 0.35
    large = source.random() < 0.02
    metered = not large and source.random() < 0.5
    storage_fails = source.random() < 0.25
    store_fault_chance = source.choice([0.0, 0.002, 0.02]) if storage_fails else 0.0
    object_fault_chance = source.choice([0.002, 0.02]) if storage_fails else 0.0
    goes_back = shared and source.random() < 0.4
    damaged = not goes_back and source.random() < 0.15
    settings = Settings.model_construct(
        **Settings().model_dump()
        | {
            "max_concurrency": 200 if large else source.choice([1, 3, 8, 20]),
            "lease_seconds": source.choice([2.0, 5.0, 30.0]),
            "request_timeout_seconds": 20.0,
            "retry_base_seconds": 0.5,
            "upstream_patience_seconds": 300.0,
            "completion_window_seconds": source.choice([20, 600, 3600, 3600, 3600]),
            "work_retention_seconds": WORK_RETENTION_SECONDS,
            "shutdown_grace_seconds": source.choice([1.0, 10.0, 30.0]),
            "upstream_url": "http://default/v1",
        }
        | ({"file_retention_seconds": SHORT_RETENTION_SECONDS} if source.random() < 0.1 else {})
        | (_METERED if metered else {})
    )
    batches = [_batch(source, n, projects, poison if n == 0 else "") for n in range(source.randint(1, 4))]
    if large:
        batches[-1] = _large_batch(source, batches[-1])
    disturbances = [
        *_disturbances(source, zombies=zombies, shared=shared, storage_fails=storage_fails),
        *_jumps(source),
        *(_damages(source) if damaged else []),
        *(_lost_commits(source) if goes_back else []),
    ]
    return Plan(
        settings=settings,
        batches=batches,
        disturbances=sorted(disturbances, key=lambda each: each.step),
        latency=0.02 if large else source.choice([0.02, 0.3, 2.0]),
        disk_latency=0.0005 if large else source.choice([0.0005, 0.01, 0.2, 0.2]),
        inline_bytes=source.choice([0, 0, 400] if damaged else [0, 0, 400, 65536]),
        zombies=zombies,
        poison=poison,
        funds=source.choice([10**12, 10**12, 20_000, 100_000, 400_000]),
        shared=shared,
        store_fault_chance=store_fault_chance,
        object_fault_chance=object_fault_chance,
        sweep_seconds=source.choice([15.0, 15.0, 1.0]),
        stranger=source.random() < 0.1,
    )


def _batch(source: random.Random, n: int, projects: list[str], poison: str) -> BatchPlan:
    common = ["plain"] * source.choice([5, 20, 60]) + ["refused", "flaky", "throttled", "dropped", "cut"]
    rare = source.choice([[], ["slow"], ["hangs"], ["broken"]])
    fates = {f"b{n}-{i}": source.choice(common + rare) for i in range(source.choice([1, 7, 30, 90]))}
    if poison:
        fates[source.choice(list(fates))] = poison
    return BatchPlan(
        project_id=source.choice(projects),
        fates=fates,
        key_id=f"key_{n}",
        models=2,
        starts_at=source.uniform(0, 5),
        cancel_after=source.choice([None, None, None, 0.0, 0.05, 1.0, 6.0]),
        revoke_after=source.choice([*[None] * 10, 0.0, 2.0]),
        idempotency_key=source.choice([None, f"key-{n}"]),
        creates_twice=source.random() < 0.2,
        deletes_input=source.random() < 0.2,
        deletes_results=source.random() < 0.2,
    )


def _large_batch(source: random.Random, plan: BatchPlan) -> BatchPlan:
    """Return a batch of thousands of lines and hundreds of models, in place of a small one."""
    fates = {f"large-{i}": "plain" for i in range(source.choice([1500, 3000]))}
    return replace(plan, fates=plan.fates | fates, models=source.choice([2, 300, 300]), cancel_after=None)


def _disturbances(source: random.Random, *, zombies: bool, shared: bool, storage_fails: bool) -> Iterator[Disturbance]:
    kinds = ["kill", "kill", "kill" if shared else "crash", "stop", "outage"]
    kinds += ["freeze", "freeze at end"] if zombies else []
    kinds += ["store outage", "objects outage"] if storage_fails else []
    for _ in range(source.choice([0, 1, 2, 4, 7])):
        yield Disturbance(step=_step(source), kind=source.choice(kinds), seconds=source.choice([0.3, 3.0, 40.0]))


def _jumps(source: random.Random) -> Iterator[Disturbance]:
    for _ in range(source.choice([0, 0, 1, 2, 4])):
        yield Disturbance(step=_step(source), kind="clock", seconds=source.choice(ERRORS))


def _damages(source: random.Random) -> Iterator[Disturbance]:
    for _ in range(source.choice([1, 2, 5])):
        yield Disturbance(step=_step(source), kind="damage")


def _lost_commits(source: random.Random) -> Iterator[Disturbance]:
    copied = 0
    for _ in range(source.choice([1, 3, 5])):
        copied += int(source.expovariate(1 / 500))
        yield Disturbance(step=copied, kind="copy")
        copied += 20 + int(source.expovariate(1 / 300))
        yield Disturbance(step=copied, kind="go back")


def _step(source: random.Random) -> int:
    return int(source.expovariate(1 / 1500))
