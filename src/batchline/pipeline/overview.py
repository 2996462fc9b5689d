"""Shows the operator the open batches, upstreams and workers of all projects."""

from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct

from batchline.domain.fleet import Report, UpstreamLoad
from batchline.domain.progress import Pause
from batchline.domain.records import Batch, Project
from batchline.pipeline.progress import Workers
from batchline.ports import Store


class WaitingLines(Struct, frozen=True, kw_only=True):
    """The lines of one model that workers hold and that wait for one reason."""

    model: str
    reason: str
    lines: int


class UpstreamState(Struct, frozen=True, kw_only=True):
    """An upstream as all workers see it."""

    name: str
    workers: int = 0
    in_flight: int = 0
    sync_calls: int = 0
    limit: int = 0
    rate: float | None = None
    """The number of lines that may start in a second; None if no worker is limited."""
    pauses: list[Pause] = []
    """The longest pause of the upstream and of each of its models."""
    holds: list[str] = []
    """The reason why no line starts although the upstream is available."""
    waiting: list[WaitingLines] = []
    """The waiting lines by model and reason, the most first."""


async def open_batches(store: Store, *, limit: int) -> list[tuple[Project, Batch]]:
    """Return batches of all projects that have not ended, oldest first, each with its project.

    The projects are read after the batches, so that none is missing that was created meanwhile. Only a project that was
    deleted meanwhile is missing: its batches have ended, and are left out.
    """
    batches = await store.open_batches(limit=limit)
    projects = {project.id: project for project in await store.projects()}
    return [(projects[batch.project_id], batch) for batch in batches if batch.project_id in projects]


class UpstreamsReader:
    """Reads the state of the upstreams from the reports of all workers. ``names`` are those that are configured."""

    def __init__(self, *, workers: Workers, names: Collection[str]) -> None:
        self._workers, self._names = workers, names

    async def upstreams(self) -> list[UpstreamState]:
        """Return every upstream by its name."""
        reports = [report for report in await self._workers.reports() if report.runs_batches]
        names = {*self._names, *(name for report in reports for name in report.upstream_loads)}
        return [state_of(name, reports) for name in sorted(names)]

    async def workers(self) -> int:
        """Return the number of processes that run batches."""
        return sum(report.runs_batches for report in await self._workers.reports())


def state_of(name: str, reports: Iterable[Report]) -> UpstreamState:
    """Return the state of an upstream as the sum of the reports of workers."""
    loads = [report.upstream_loads[name] for report in reports if name in report.upstream_loads]
    rates = [load.rate for load in loads if load.rate is not None]
    return UpstreamState(
        name=name,
        workers=len(loads),
        in_flight=sum(load.in_flight for load in loads),
        sync_calls=sum(load.sync_calls for load in loads),
        limit=sum(load.limit for load in loads),
        rate=sum(rates) if rates else None,
        pauses=_pauses(loads),
        holds=sorted({load.hold for load in loads if load.hold is not None}),
        waiting=_waiting(loads),
    )


def _pauses(loads: Sequence[UpstreamLoad]) -> list[Pause]:
    longest: dict[str | None, Pause] = {}
    for pause in sorted((pause for load in loads for pause in load.pauses), key=lambda pause: pause.since):
        longest.setdefault(pause.model, pause)
    return sorted(longest.values(), key=lambda pause: pause.model or "")


def _waiting(loads: Sequence[UpstreamLoad]) -> list[WaitingLines]:
    lines: dict[tuple[str, str], int] = {}
    for load in loads:
        for model, queue in load.queues.items():
            lines[model, queue.reason] = lines.get((model, queue.reason), 0) + queue.lines
    found = [WaitingLines(model=model, reason=reason, lines=count) for (model, reason), count in lines.items()]
    return sorted(found, key=lambda each: (-each.lines, each.model, each.reason))
