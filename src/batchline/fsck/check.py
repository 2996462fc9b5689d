"""Checks everything that a service stores, and repairs it if asked to. The service may run meanwhile."""

from collections.abc import AsyncIterator

from msgspec.structs import replace

from batchline.domain.errors import WrongIdentity
from batchline.domain.identity import MARKER_FOLDER
from batchline.domain.money import units
from batchline.domain.records import BATCH_OUTPUT, InspectedFile
from batchline.domain.states import FileState
from batchline.fsck.batches import BatchChecker
from batchline.fsck.findings import Checked, Finding, Fix, FsckReport, Kind, RepairStatus
from batchline.fsck.reading import ObjectReader, Unreadable
from batchline.fsck.repair import BatchRepair
from batchline.fsck.results import ResultFileReader
from batchline.loops.sweep import batch_of, find_unneeded, pages_of
from batchline.pipeline.assemble import Assembler
from batchline.pipeline.damage import DamageLog
from batchline.pipeline.identity import IdentityCheck
from batchline.ports import Clock, Objects, Store

_PAGE_ROWS = 500


class Fsck:
    """One check of everything. It reads all results and work. Uploads have no checksum: only their size is checked."""

    def __init__(
        self,
        *,
        store: Store,
        objects: Objects,
        identity: IdentityCheck,
        damage_log: DamageLog,
        clock: Clock,
        work_retention_seconds: int,
        checked: Checked,
    ) -> None:
        self._store, self._objects, self._identity = store, objects, identity
        self._checked = checked
        self._reader = ObjectReader(objects, checked)
        self._results = ResultFileReader(self._reader)
        self._batches = BatchChecker(
            store=store,
            reader=self._reader,
            checked=checked,
            clock=clock,
            work_retention_seconds=work_retention_seconds,
        )
        assembler = Assembler(store=store, objects=objects, damage_log=damage_log)
        self._repair = BatchRepair(store=store, objects=objects, checker=self._batches, assembler=assembler)

    async def run(self, *, repair: bool) -> FsckReport:
        """Check everything, and repair what can be. Raise StoreDown, or ObjectsDown if no object can be read."""
        report = FsckReport(checked=self._checked)
        identity = await self._check_identity()
        report.add(identity)
        if identity:
            # All other findings would only say that the objects are those of another database.
            return report
        await self._check_money(report, repair=repair)
        await self._check_batches(report, repair=repair)
        async for finding in self._check_files():
            report.add([finding])
        async for finding in self._check_leftovers():
            report.add([finding])
        return report

    async def _check_identity(self) -> list[Finding]:
        try:
            await self._identity.check()
        except WrongIdentity as error:
            if await self._is_unused():
                return []
            return [Finding(kind=Kind.IDENTITY, problem=str(error), next="Nothing else was checked.")]
        return []

    async def _is_unused(self) -> bool:
        """Return whether no service has started on this database yet, and it names no object."""
        if (await self._store.identity()).objects_id is not None or await self._objects.names(MARKER_FOLDER):
            return False
        return not await self._store.needs_objects()

    async def _check_money(self, report: FsckReport, *, repair: bool) -> None:
        for organization in await self._store.organizations():
            finding = await self._check_books(organization.id)
            if finding is not None and repair:
                await self._store.set_to_ledger(organization.id)
                left = await self._check_books(organization.id)
                finding = replace(
                    finding, repair_status=RepairStatus.REPAIRED if left is None else RepairStatus.NOT_POSSIBLE
                )
            report.add([finding] if finding else [])
            self._checked.add(organizations=1)

    async def _check_books(self, organization_id: str) -> Finding | None:
        books = await self._store.books_of(organization_id)
        if books is None or (books.balance, books.credits) == (books.booked_balance, books.booked_credits):
            return None
        return Finding(
            kind=Kind.BALANCE,
            organization=organization_id,
            problem=(
                f"the organization {books.name} has {units(books.balance)} and {units(books.credits)} free credits, "
                f"but its ledger sums to {units(books.booked_balance)} and {units(books.booked_credits)}"
            ),
            next="Run with --repair: they are set to the sums of the ledger.",
            fix=Fix.SET_TO_LEDGER,
        )

    async def _check_batches(self, report: FsckReport, *, repair: bool) -> None:
        last = ""
        while page := await self._store.inspected_ids(after=last, limit=_PAGE_ROWS):
            for batch_id in page:
                findings = await self._batches.check(batch_id)
                segments = self._checked.segments
                if findings and repair:
                    findings = await self._repair.repair(batch_id, findings)
                # A repair reads them again.
                self._checked.segments = segments
                report.add(findings)
                self._checked.add(batches=1)
            last = page[-1]

    async def _check_files(self) -> AsyncIterator[Finding]:
        """Check uploads, and result files that no batch names; the others were checked with their batches."""
        last = ""
        while page := await self._store.inspect_files(after=last, limit=_PAGE_ROWS):
            stored = [file for file in page if file.state is FileState.STORED]
            named = await self._store.named_results(
                sorted({batch_of(file.object_key) for file in stored if _is_result(file)})
            )
            for file in stored:
                if file.id not in named and (finding := await self._check_file(file)) is not None:
                    yield finding
                self._checked.add(files=1)
            last = page[-1].id

    async def _check_file(self, file: InspectedFile) -> Finding | None:
        problem = "is named by no batch" if _is_result(file) else ""
        try:
            if _is_result(file):
                await self._results.verify(file)
            else:
                await self._reader.require_size(file.object_key, file.bytes)
        except Unreadable as error:
            problem = str(error)
        if not problem or await self._store.inspect_file(file.id) != file:
            return None
        return Finding(
            kind=Kind.RESULT if _is_result(file) else Kind.UPLOAD,
            file=file.id,
            object=file.object_key,
            problem=f"{file.id} ({file.object_key}) {problem}",
            next=(
                "Restore its object from a backup, or delete the file and let its owner upload it again. Batches that "
                "were created from it do not need it."
                if not _is_result(file)
                else "No batch refers to it, so no client finds it but in a list of files."
            ),
        )

    async def _check_leftovers(self) -> AsyncIterator[Finding]:
        async for keys in pages_of(self._objects):
            unneeded = await find_unneeded(self._store, keys)
            again = await find_unneeded(self._store, [*unneeded.removed, *unneeded.unknown])
            for key in again.removed:
                yield Finding(
                    kind=Kind.LEFTOVER,
                    object=key,
                    problem=f"{key} is not needed any more",
                    next="The sweep of a running service deletes it within an hour.",
                )
            for key in again.unknown:
                yield Finding(
                    kind=Kind.LEFTOVER,
                    object=key,
                    problem=f"{key} has no row",
                    next="The sweep deletes it after two sightings an hour apart, unless there are many of them.",
                )
            self._checked.add(objects=len(keys))


def _is_result(file: InspectedFile) -> bool:
    return file.purpose == BATCH_OUTPUT
