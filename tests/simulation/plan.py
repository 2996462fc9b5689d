"""Derives from a seed what happens in a world: settings, batches, and the disturbances of the service."""

import json
import random
from dataclasses import dataclass
from decimal import Decimal

from batchline.settings import ModelSettings, Settings, UpstreamSettings
from tests.simulation.clocks import ERRORS, SMALL_ERRORS
from tests.simulation.upstream import WORKER_POISON

ENDPOINT = "/v1/chat/completions"

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
    starts_at: float
    cancel_after: float | None
    idempotency_key: str | None
    file_id: str | None = None
    batch_id: str | None = None
    done: bool = False

    def input(self) -> bytes:
        return b"".join(
            json.dumps(
                {
                    "custom_id": custom_id,
                    "method": "POST",
                    "url": ENDPOINT,
                    "body": {
                        "model": f"m{len(custom_id) % 2}",
                        "messages": [{"role": "user", "content": f"{self.project_id} {custom_id} {FATES[fate]}"}],
                    },
                }
            ).encode()
            + b"\n"
            for custom_id, fate in self.fates.items()
        )


@dataclass
class Disturbance:
    """At a step of the world: kill the process, stop it cleanly, freeze it so that it wakes after its leases expired,
    make the upstream unavailable, or set the clock of a machine so that it is ahead by ``seconds``."""

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
        return self.zombies or self.poison == "kills worker" or any(each.kind == "kill" for each in self.disturbances)


def make_plan(source: random.Random, projects: list[str]) -> Plan:
    poison = source.choice(["", "", "", "kills upstream", "kills worker"])
    zombies = source.random() < 0.3
    metered = source.random() < 0.5
    shared = source.random() < 0.3
    settings = Settings.model_construct(
        **Settings().model_dump()
        | {
            "max_concurrency": source.choice([1, 3, 8, 20]),
            "lease_seconds": source.choice([2.0, 5.0, 30.0]),
            "request_timeout_seconds": 20.0,
            "retry_base_seconds": 0.5,
            "completion_window_seconds": source.choice([20, 600, 3600, 3600, 3600]),
            "work_retention_seconds": 30,
            "shutdown_grace_seconds": source.choice([1.0, 10.0, 30.0]),
            "upstream_url": "http://default/v1",
        }
        | (_METERED if metered else {})
    )
    batches = [_batch(source, n, projects, poison if n == 0 else "") for n in range(source.randint(1, 4))]
    return Plan(
        settings=settings,
        batches=batches,
        disturbances=sorted(_disturbances(source, zombies) + _jumps(source), key=lambda each: each.step),
        latency=source.choice([0.02, 0.3, 2.0]),
        disk_latency=source.choice([0.0005, 0.01, 0.2, 0.2]),
        inline_bytes=source.choice([0, 0, 400, 65536]),
        zombies=zombies,
        poison=poison,
        funds=source.choice([10**12, 10**12, 20_000, 100_000, 400_000]),
        shared=shared,
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
        starts_at=source.uniform(0, 5),
        cancel_after=source.choice([None, None, None, 0.0, 0.05, 1.0, 6.0]),
        idempotency_key=source.choice([None, f"key-{n}"]),
    )


def _disturbances(source: random.Random, zombies: bool) -> list[Disturbance]:
    kinds = ["kill", "kill", "kill", "stop", "outage", *(["freeze"] * 2 if zombies else [])]
    return [
        Disturbance(
            step=int(source.expovariate(1 / 1500)),
            kind=source.choice(kinds),
            seconds=source.choice([0.3, 3.0, 40.0]),
        )
        for _ in range(source.choice([0, 1, 2, 4, 7]))
    ]


def _jumps(source: random.Random) -> list[Disturbance]:
    return [
        Disturbance(step=int(source.expovariate(1 / 1500)), kind="clock", seconds=source.choice(ERRORS))
        for _ in range(source.choice([0, 0, 1, 2, 4]))
    ]
