"""Checks that every batch has ended when the last client is done, that nothing is left over, and the money."""

import asyncio
from typing import TYPE_CHECKING

from batchline.domain.records import Batch, ProjectUsage
from batchline.domain.states import TERMINAL
from batchline.ports import KnownBatch
from tests.simulation.client import ORGANIZATION
from tests.simulation.invariants import check_files, check_ledger, check_money, check_reuse, require

if TYPE_CHECKING:
    from tests.simulation.process import Process

_POLL_SECONDS = 5.0
_LONGEST_CLEANING_SECONDS = 400.0
"""Far more than the retention of work, two sweeps, and the waits after a step that failed."""


class EndChecks:
    """The checks that one process makes."""

    def __init__(self, process: "Process") -> None:
        self._process, self._world = process, process.world
        self._plan = process.world.plan
        self._rows, self._objects = process.rows, process.stored

    async def run(self) -> None:
        """Check that every batch ends, also if its client got no reply, and that all of them are right together."""
        generation = -1
        while generation != self._world.generation:
            generation = self._world.generation
            batches = await self._ended_batches()
            # A frozen process may wake as late as now and write a segment under a lease that it lost. Only a sweep
            # after its death is sure to remove that.
            last_death = max(process.dies_at or 0.0 for process in self._world.processes)
            await asyncio.sleep(max(0.0, last_death - self._world.time.now))
            await self._wait_until_clean()
        self._world.drop_copy()
        await self._check_results(batches)
        await self._check_inputs()

    async def _ended_batches(self) -> list[Batch]:
        """Wait until every batch has ended, and return all of them."""
        while True:
            generation = self._world.generation
            batches = await self._batches()
            if generation == self._world.generation:
                for batch in batches:
                    self._world.observer.check(batch)
                if all(batch.status in TERMINAL for batch in batches):
                    return batches
            await asyncio.sleep(_POLL_SECONDS)

    async def _batches(self) -> list[Batch]:
        projects = sorted({plan.project_id for plan in self._plan.batches})
        return [
            batch
            for project_id in projects
            for batch in await self._rows.batches(project_id, after=None, limit=1000) or []
        ]

    async def _wait_until_clean(self) -> None:
        """Wait until no work file and no segment is left, and no object that no row needs.

        If a machine has a wrong clock, what is kept for a time after the end may be kept for longer.
        """
        until = self._world.time.now + _LONGEST_CLEANING_SECONDS
        while left := await self._left_over():
            require(self._world.time.now < until, f"objects are left at the end: {left}")
            await asyncio.sleep(_POLL_SECONDS)

    async def _left_over(self) -> list[str]:
        left = []
        for folder in ("work", "segments"):
            names = await self._objects.names(folder)
            known = await self._rows.known_batches(names)
            left += [f"{folder}/{name}" for name in names if self._is_left_over(known.get(name))]
        for folder in ("uploads", "results"):
            async for keys in self._objects.keys(folder):
                referenced = await self._rows.referenced_keys(keys)
                left += [key for key in keys if key not in referenced and not self._may_have_no_row]
        return left

    def _is_left_over(self, batch: KnownBatch | None) -> bool:
        return not self._may_have_no_row if batch is None else not (batch.has_work and self._plan.doubts_clock)

    @property
    def _may_have_no_row(self) -> bool:
        """Whether objects may have lost their row. They are kept until they were seen twice, an hour apart."""
        return self._plan.storage_fails or self._plan.goes_back

    async def _check_results(self, batches: list[Batch]) -> None:
        plans = {plan.file_id: plan for plan in self._plan.batches}
        answers: list[bytes] | None = []
        short = 0
        for batch in batches:
            files = await self._process.results(batch)
            if files is None:
                answers = None
                continue
            if batch.input_file_id in plans and batch.total:
                check_files(batch, plans[batch.input_file_id], *files, world=self._plan)
            if answers is not None:
                answers += files[0].splitlines()
            short += files[1].count(b'"insufficient_quota"')
        (organization,) = await self._rows.organizations()
        entries = await self._rows.entries(ORGANIZATION)
        usage = [row for project_id in {batch.project_id for batch in batches} for row in await self._usage(project_id)]
        reused = sum(row.reused for row in usage)
        check_ledger(organization, entries, completed=sum(batch.completed for batch in batches) - reused)
        if answers is not None:
            check_reuse(usage, answers)
            check_money(self._plan, organization, answers=answers, short=short)

    async def _usage(self, project_id: str) -> list[ProjectUsage]:
        return await self._rows.project_usage(
            project_id, model=None, since=0, until=1 << 60, bucket_seconds=86_400, limit=10_000
        )

    async def _check_inputs(self) -> None:
        """Check that no input file was removed that is younger than the time for which files are kept."""
        for plan in self._plan.batches:
            found = await self._process.content(plan.project_id, plan.file_id)
            require(found in (None, plan.input()), f"{plan.file_id} has changed")
