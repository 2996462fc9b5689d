"""Restores a backup and checks all stored data. Only commands import this, so that no service loads its parts."""

from contextlib import closing

from batchline.app.backends import (
    DISK_THREADS,
    has_database,
    identity_check,
    migrate_own_store,
    open_objects,
    open_shared_objects,
    open_store,
    startup_errors,
)
from batchline.app.startup import StartupError, folder_lock, make_folder
from batchline.backup.archive import Archive
from batchline.backup.manifest import Progress
from batchline.backup.postgres import PostgresRows
from batchline.backup.restore import Restore, SqliteRows, TargetDatabase
from batchline.backup.workspace import workspace
from batchline.fsck.check import Fsck
from batchline.fsck.findings import Checked, FsckReport
from batchline.pipeline.damage import DamageLog
from batchline.settings import Settings
from batchline.system import SystemClock, SystemRandom, ThreadPool
from batchline.telemetry.metrics import Metrics


async def restore_backup(settings: Settings, archive: Archive, progress: Progress) -> None:
    """Restore a backup into the store that the settings name. It must be empty and unused.

    Raise StartupError or TransferError.
    """
    make_folder(settings.data_dir)
    url = settings.database_url
    with (
        closing(ThreadPool(DISK_THREADS, name="restore")) as threads,
        folder_lock(settings.data_dir),
        workspace(settings.data_dir) as folder,
    ):
        rows: TargetDatabase = SqliteRows(settings.data_dir)
        if url is not None:
            await migrate_own_store(settings)
            rows = PostgresRows(url.get_secret_value(), pooled=settings.database_pooler)
        async with open_objects(settings) as objects:
            restore = Restore(
                rows=rows, objects=objects, folder=folder, threads=threads, random=SystemRandom(), progress=progress
            )
            await restore.run(archive)


async def check_stored_data(settings: Settings, checked: Checked, *, repair: bool) -> FsckReport:
    """Check everything that the settings name, beside a service that may run. Raise StartupError."""
    if not has_database(settings):
        raise StartupError(
            f"There is no service in the data folder {settings.data_dir}. Name another with --data-dir, or name a "
            "PostgreSQL database with --database-url."
        )
    async with open_store(settings) as store, open_shared_objects(settings) as objects:
        fsck = Fsck(
            store=store,
            objects=objects,
            identity=identity_check(settings, store=store, objects=objects),
            damage_log=DamageLog(Metrics()),
            clock=SystemClock(),
            work_retention_seconds=settings.work_retention_seconds,
            checked=checked,
        )
        with startup_errors():
            return await fsck.run(repair=repair)
