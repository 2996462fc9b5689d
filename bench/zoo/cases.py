"""What is measured of each kind of upstream, and the goals.

::

    Capacity    one batch                               the time of a client that knows the capacity in advance
    Neighbour   a batch beside another project's lines  the time of the same batch alone, measured too
    Outage      an upstream that refuses for a minute   a fixed time from its end until it is used fully again
"""

import time
from collections import deque
from statistics import median
from typing import Protocol

from msgspec import Struct

from bench.zoo.runs import POLL_SECONDS, End, Seen, prompts, running
from bench.zoo.upstreams import OUTAGE_ENDS

_RECOVERED, _RATE_SECONDS = 0.95, 2.0
"""An upstream is fully used again when the answers of so many seconds reach this part of its capacity."""
_LONGEST_RECOVERY_SECONDS = 60.0


class Result(Struct, frozen=True):
    ideal_seconds: float
    end: End
    seen: Seen


class Case(Protocol):
    @property
    def goal(self) -> float:
        """The share of the ideal to reach."""

    def measure(self, kind: str) -> Result:
        """Run an upstream of this kind, and a service before it."""


class Capacity(Struct, frozen=True):
    lines: int
    ideal_seconds: float
    goal: float

    def measure(self, kind: str) -> Result:
        with running(kind) as run:
            end = run.finish(prompts(self.lines), most_seconds=max(60.0, 8 * self.ideal_seconds))
            return Result(self.ideal_seconds, end, run.seen())


class Neighbour(Struct, frozen=True):
    lines: int
    others: bytes
    """The lines of the other project."""
    hopeless: bytes = b""
    """Lines of the batch itself that are never answered."""
    goal: float = 1 / 1.3
    pairs: int = 3
    """How often the batch runs alone and beside the other project, in turns."""
    head_start_seconds: float = 4.0
    """The lines of the other project are there so long before the batch."""

    def measure(self, kind: str) -> Result:
        pairs = [(self._measure(kind, beside=False), self._measure(kind, beside=True)) for _ in range(self.pairs)]
        alone, beside = zip(*pairs, strict=True)
        ends = [end for end, _ in beside]
        end = End(
            seconds=median(end.seconds for end in ends),
            open=max(end.open for end in ends),
            failed=max(end.failed for end in ends),
        )
        return Result(median(end.seconds for end, _ in alone), end, beside[-1][1])

    def _measure(self, kind: str, *, beside: bool) -> tuple[End, Seen]:
        with running(kind) as run:
            if beside:
                run.submit_for_another_project(self.others)
            time.sleep(self.head_start_seconds)
            lines, hopeless = self.hopeless + prompts(self.lines), self.hopeless.count(b"\n")
            return run.finish(lines, hopeless=hopeless, most_seconds=120.0), run.seen()


class Outage(Struct, frozen=True):
    lines: int
    capacity: float
    """Answers per second."""
    ideal_seconds: float = 15.0
    goal: float = 1.0

    def measure(self, kind: str) -> Result:
        with running(kind) as run:
            run.submit(prompts(self.lines))
            while run.seen().seconds < OUTAGE_ENDS:
                time.sleep(POLL_SECONDS)
            counted = deque([run.seen()])
            while True:
                time.sleep(POLL_SECONDS)
                seen, before = run.seen(), counted[0]
                counted.append(seen)
                if seen.seconds - before.seconds < _RATE_SECONDS:
                    continue
                rate = (seen.answered - before.answered) / (seen.seconds - before.seconds)
                if rate >= _RECOVERED * self.capacity or before.seconds > OUTAGE_ENDS + _LONGEST_RECOVERY_SECONDS:
                    return Result(self.ideal_seconds, End(seconds=before.seconds - OUTAGE_ENDS), seen)
                counted.popleft()


CASES: dict[str, Case] = {
    "clean20": Capacity(20_000, 5.7, 0.9),
    "hard8": Capacity(1600, 20.0, 0.9),
    "hard200": Capacity(15_000, 15.0, 0.9),
    "hard64slow": Capacity(1920, 30.0, 0.8),
    "growing": Capacity(12_000, 16.5, 0.85),
    "silent256": Capacity(8000, 15.6, 0.9),
    "halving": Capacity(9600, 20.0, 0.85),
    "tail64": Capacity(3000, 23.2, 0.85),
    "engine16": Capacity(1200, 30.0, 0.85),
    "knee32": Capacity(6000, 18.75, 0.9),
    "bucket500": Capacity(10_000, 20.0, 0.9),
    "bucket100ra": Capacity(2000, 20.0, 0.9),
    "window": Capacity(4000, 30.5, 0.9),
    "tokens": Capacity(3900, 30.5, 0.85),
    "random429": Capacity(6000, 5.0, 0.7),
    "random503": Capacity(6000, 5.0, 0.7),
    "per_model": Neighbour(20_000, prompts(400, model="limited")),
    "poison": Neighbour(20_000, prompts(1, "poison"), hopeless=prompts(1, "poison")),
    "refused": Neighbour(20_000, prompts(400, "poison")),
    "failing": Neighbour(20_000, prompts(400, "failing")),
    "hanging": Neighbour(20_000, prompts(400, "hang", model="slow")),
    "outage500": Outage(45_000, 500.0),
    "outage64": Outage(45_000, 640.0),
    "outagequeue": Outage(45_000, 640.0),
}
