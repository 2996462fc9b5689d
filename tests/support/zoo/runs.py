"""Runs lines through the limiter against one upstream, and says how long they took."""

from collections.abc import Callable
from zlib import crc32

from msgspec import Struct

from batchline.domain.engine_queue import QueueLength
from tests.support.jobs import make_jobs
from tests.support.zoo.dispatcher import SimulatedDispatcher, Work
from tests.support.zoo.upstreams import Engine, Upstream
from tests.support.zoo.world import World

_MOST = 0.99


class Result(Struct, frozen=True, kw_only=True):
    """What a run took. ``failed`` counts the lines that failed and could have succeeded."""

    seconds: float
    most_seconds: float
    """The time until 99 % of the lines were answered. The last ones may have waited for their next attempt."""
    ideal_seconds: float
    failed: int
    refused: int
    peak: int

    @property
    def share(self) -> float:
        """The part of the all-knowing client's speed that was reached."""
        return self.ideal_seconds / self.seconds

    @property
    def share_of_most(self) -> float:
        """The same for 99 % of the lines."""
        return _MOST * self.ideal_seconds / self.most_seconds


class Run:
    """One run of a case: the world, the upstream in it, and the dispatcher that sends lines to it."""

    def __init__(self, case: "Case", seed: int) -> None:
        self._case, self.world = case, World(seed)
        self.upstream = case.upstream(self.world)
        self.dispatcher = SimulatedDispatcher(self.world, self.upstream)
        self._limit_seconds = max(60.0, 8 * case.ideal_seconds)
        self.most_seconds = 0.0

    def seconds_for(self, *works: Work) -> float:
        """Return the time until all of the work is done."""
        since, few = self.world.time, (1 - _MOST) * sum(work.to_do for work in works)
        limit_seconds = self._limit_seconds + self._case.outage_seconds
        self.world.run_until(lambda: sum(work.to_do for work in works) <= few, limit_seconds=limit_seconds)
        self.most_seconds = max(self.most_seconds, self.world.time - since)
        self.world.run_until(lambda: all(work.is_done for work in works), limit_seconds=limit_seconds)
        return self.world.time - since

    def wait(self, seconds: float) -> None:
        self.world.run_until(lambda: False, limit_seconds=seconds)


Script = Callable[[Run], tuple[float, int]]
"""Adds lines, and returns how long they took and how many failed that could have succeeded."""


class Case(Struct, frozen=True, kw_only=True):
    upstream: Callable[[World], Upstream]
    script: Script
    ideal_seconds: float
    goal: float
    """The share of the ideal that must be reached. Where it is below 0.8, a comment says why."""
    outage_seconds: float = 0.0
    """The time in which nothing can be answered. It does not count."""

    def run(self, seed: int) -> Result:
        run = Run(self, seed)
        seconds, failed = self.script(run)
        return Result(
            seconds=seconds - self.outage_seconds,
            most_seconds=run.most_seconds - self.outage_seconds,
            ideal_seconds=self.ideal_seconds,
            failed=failed,
            refused=run.dispatcher.refused,
            peak=run.dispatcher.peak,
        )


def lines(number: int) -> Script:
    """Run one batch of so many lines."""

    def script(run: Run) -> tuple[float, int]:
        work = run.dispatcher.add(number)
        return run.seconds_for(work), work.failed

    return script


def lines_of_models(**numbers: int) -> Script:
    """Run one batch for each model, at the same time."""

    def script(run: Run) -> tuple[float, int]:
        works = [run.dispatcher.add(number, model=model) for model, number in numbers.items()]
        return run.seconds_for(*works), sum(work.failed for work in works)

    return script


def lines_with_metrics(number: int, reading: QueueLength | None = None) -> Script:
    """Run one batch at an engine that reports the length of its queue, or at an upstream with this one for all time."""

    def script(run: Run) -> tuple[float, int]:
        run.dispatcher.read_queue_length(lambda: reading or _queue_length(run.upstream))
        return lines(number)(run)

    return script


def _queue_length(upstream: Upstream) -> QueueLength:
    assert isinstance(upstream, Engine)
    return upstream.queue_length()


def beside_a_limited_model(run: Run) -> tuple[float, int]:
    """Run 4,000 lines while another project has lines of a model that is refused most of the time."""
    limited = run.dispatcher.add(400, project="two", model="limited")
    run.wait(4.0)
    work = run.dispatcher.add(4000)
    return run.seconds_for(work), work.failed + limited.failed


def beside_a_slow_model(number: int, *, project: str) -> Script:
    """Run so many lines of a quick model beside hundreds of a slow one, which a project submitted before."""

    def script(run: Run) -> tuple[float, int]:
        slow = run.dispatcher.add(400, project=project, model="slow")
        run.wait(4.0)
        work = run.dispatcher.add(number, model="quick")
        return run.seconds_for(work), work.failed + slow.failed

    return script


def with_two_names(number: int) -> Script:
    """Run so many lines of each of two models, the second 4 s after the first, and count the time from then on."""

    def script(run: Run) -> tuple[float, int]:
        first = run.dispatcher.add(number, model="a")
        run.wait(4.0)
        second = run.dispatcher.add(number, model="b")
        return run.seconds_for(first, second), first.failed + second.failed

    return script


def beside_refused_lines(run: Run) -> tuple[float, int]:
    """Run 4,000 lines, one of which is always refused, while another project has such a line too."""
    run.dispatcher.add(1, project="two")
    run.wait(4.0)
    work = run.dispatcher.add(4000, hopeless=1)
    return run.seconds_for(work), max(0, work.failed - 1)


def is_hopeless(custom_id: bytes, percent: int) -> bool:
    """Return whether a line is one of a part of all lines, chosen by chance."""
    return crc32(custom_id) % 100 < percent


def beside_hopeless_lines(lines: int, *, percent: int) -> Script:
    """Run lines of which a part is always refused. It does not wait for that part."""

    def script(run: Run) -> tuple[float, int]:
        hopeless = sum(is_hopeless(job.line.custom_id, percent) for job in make_jobs(lines))
        work = run.dispatcher.add(lines, hopeless=hopeless)
        return run.seconds_for(work), max(0, work.failed - hopeless)

    return script


def beside_a_refused_project(run: Run) -> tuple[float, int]:
    """Run 3,200 lines while another project has 1,000 lines of the same model that are always refused."""
    run.dispatcher.add(1000, project="two")
    run.wait(4.0)
    work = run.dispatcher.add(3200)
    return run.seconds_for(work), work.failed


def beside_hanging_lines(run: Run) -> tuple[float, int]:
    """Run six small batches one after another while another project has hundreds of lines that hang."""
    run.dispatcher.add(400, project="two", model="slow")
    run.wait(1.0)
    works, seconds = [], []
    for _ in range(6):
        works.append(run.dispatcher.add(50))
        seconds.append(run.seconds_for(works[-1]))
    return max(seconds), sum(work.failed for work in works)


def single_lines(number: int, *, every_seconds: float, after_seconds: float) -> Script:
    """Return a script that runs single lines now and then while another project has a large batch, for their mean time.

    It begins after some time, since the first requests of the batch cannot be taken back.
    """

    def script(run: Run) -> tuple[float, int]:
        run.dispatcher.add(2000, project="two")
        run.wait(after_seconds)
        works, seconds = [], []
        for _ in range(number):
            works.append(run.dispatcher.add(1))
            seconds.append(run.seconds_for(works[-1]))
            run.wait(max(0.0, every_seconds - seconds[-1]))
        return sum(seconds) / number, sum(work.failed for work in works)

    return script
