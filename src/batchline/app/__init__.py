"""The composition root: settings -> adapters -> engine -> server. The only package that knows the adapters."""

from batchline.app.backends import (
    adopt_objects,
    await_migration,
    clock_file,
    has_database,
    migrate_store,
    open_store,
)
from batchline.app.roles import api, api_on_folder, run, serve, worker
from batchline.app.startup import FolderTaken, StartupError
from batchline.telemetry.logs import configure_logs

__all__ = [
    "FolderTaken",
    "StartupError",
    "adopt_objects",
    "api",
    "api_on_folder",
    "await_migration",
    "clock_file",
    "configure_logs",
    "has_database",
    "migrate_store",
    "open_store",
    "run",
    "serve",
    "worker",
]
