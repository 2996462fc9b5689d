"""Reads files as a client does, and checks that each is there for as long as it must be, as it was written."""

from batchline.domain.errors import Damaged, FileDamaged, FileNotFound
from batchline.domain.records import File
from batchline.pipeline.download import Download
from batchline.ports import Files
from tests.simulation.disk import Disk
from tests.simulation.invariants import require
from tests.simulation.plan import Plan
from tests.simulation.virtual import Time


class FileChecks:
    """The files of a world, as its clients know them."""

    def __init__(self, plan: Plan, time: Time, disk: Disk) -> None:
        self._plan, self._time, self._disk = plan, time, disk
        self._created: dict[str, float] = {}
        self._deleted: set[str] = set()
        self._read: dict[str, bytes] = {}
        self.went_back = False
        """Whether the database forgot files, or knows files again that were deleted."""

    def note_created(self, file_id: str, *, at: float) -> None:
        """Note a time at which a file did not exist yet."""
        self._created.setdefault(file_id, at)

    def note_deleted(self, file_id: str) -> None:
        self._deleted.add(file_id)

    def check_gone(self, file_id: str) -> None:
        """Check that a file which cannot be found was deleted, or reached the end of its lifetime."""
        age = self._time.now - self._created[file_id]
        in_time = age >= self._plan.settings.file_retention_seconds - self._plan.clock_tolerance
        require(in_time or self.went_back or file_id in self._deleted, f"{file_id} is gone after {age:.0f} seconds")

    async def content(self, download: Download, rows: Files, project_id: str, file_id: str | None) -> bytes | None:
        """Return the content of a file, or None if it was rightly removed before any client has read it."""
        if file_id is None:
            return b""
        stored = await rows.file(project_id, file_id, at=0)
        key = "" if stored is None else stored.object_key
        data: bytes | None
        try:
            data = await _download(download, project_id, file_id)
        except FileNotFound:
            if key not in self._disk.originals:
                self.check_gone(file_id)
            data = self._disk.originals.get(key, self._read.get(file_id))
        except (FileDamaged, Damaged):
            require(key in self._disk.originals, f"{file_id} was not damaged")
            data = self._disk.originals[key]
        else:
            require(data == self._disk.originals.get(key, data), f"{file_id} was damaged and sent whole")
        if data is not None:
            self._read[file_id] = data
        return data


async def _download(download: Download, project_id: str, file_id: str) -> bytes:
    file: File = await download.find(project_id, file_id)
    chunks = await download.open(file, start=0, length=file.bytes)
    data = b"".join([chunk async for chunk in chunks])
    require(len(data) == file.bytes, f"{file_id} is not whole")
    return data
