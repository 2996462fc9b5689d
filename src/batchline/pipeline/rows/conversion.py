"""Turns a table that was uploaded into the input file of a batch, or returns its faults."""

from pathlib import Path

from batchline.domain.errors import ObjectMissing
from batchline.domain.records import File, InputFault, Owner
from batchline.pipeline.create import missing_object
from batchline.pipeline.storage_quota import StorageQuota
from batchline.pipeline.upload import Upload
from batchline.ports import Objects, TableForm, Validator


class TableConversion:
    """Makes input files of tables. ``max_rows`` is the number of lines that a batch may have."""

    def __init__(
        self, *, objects: Objects, upload: Upload, storage_quota: StorageQuota, validator: Validator, max_rows: int
    ) -> None:
        self._objects, self._upload, self._storage_quota = objects, upload, storage_quota
        self._validator, self._max_rows = validator, max_rows

    async def convert(self, owner: Owner, table: File, form: TableForm) -> File | list[InputFault]:
        """Return a new file with a request for each row. If the table has faults, return these and store nothing."""
        try:
            async with self._objects.local(table.object_key) as source, self._objects.scratch() as target:
                verdict = await self._validator.write_requests(
                    project_id=owner.project_id, source=source, target=target, form=form, max_rows=self._max_rows
                )
                if verdict.faults:
                    return verdict.faults
                return await self._store(owner, target, verdict.bytes, filename=form.filename)
        except ObjectMissing:
            raise missing_object(table) from None

    async def _store(self, owner: Owner, path: Path, size: int, *, filename: str) -> File:
        async with (
            self._storage_quota.reserve(owner, size),
            self._upload.begin(owner.project_id) as incoming,
        ):
            await incoming.accept(path, size)
            return await incoming.finish(filename=f"{filename}.jsonl", expires_after=None)
