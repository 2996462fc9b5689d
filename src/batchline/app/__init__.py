"""The composition root: settings -> adapters -> engine -> server. The only package that knows the adapters."""

from batchline.app.backends import adopt_objects, check_stored_data, clock_file, migrate_store, open_store
from batchline.app.roles import api, run, serve, worker
from batchline.app.startup import StartupError

__all__ = [
    "StartupError",
    "adopt_objects",
    "api",
    "check_stored_data",
    "clock_file",
    "migrate_store",
    "open_store",
    "run",
    "serve",
    "worker",
]
