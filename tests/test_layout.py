"""Checks that tests mirror the package, and that a class is found by its name.

The tests of ``src/batchline/a/b.py`` are in ``tests/a/test_b.py``.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_TESTS = Path(__file__).parent
_PACKAGE = _TESTS.parent / "src" / "batchline"


class Elsewhere(NamedTuple):
    """Where the tests of a module are instead, and why."""

    tests: str
    reason: str


_STORE = "one suite runs on every store, SQLite and PostgreSQL"
_COMMAND = "a few lines around a part that has its own tests"
_DOCUMENT = "a part of the document, which is checked as a whole"
_THROUGH_API = "the steps of a batch are tested through the API"
_PART = "an inner part of a module, tested through that module"

EXCEPTIONS = {
    "api/event_stream": Elsewhere("api/test_inference_streams.py", _PART),
    "api/form_upload": Elsewhere("api/test_upload.py", _PART),
    "api/methods": Elsewhere("api/test_server.py", _PART),
    "api/openapi/answers": Elsewhere("api/openapi/test_document.py", _DOCUMENT),
    "api/openapi/operation": Elsewhere("api/openapi/test_document.py", _DOCUMENT),
    "api/openapi/operations": Elsewhere("api/openapi/test_document.py", _DOCUMENT),
    "api/openapi/routes": Elsewhere("api/openapi/test_document.py", _DOCUMENT),
    "api/openapi/schemas": Elsewhere("api/openapi/test_document.py", _DOCUMENT),
    "api/idle_connections": Elsewhere("api/test_protocol_bounds.py", _PART),
    "api/request_splitter": Elsewhere("api/test_protocol_bounds.py", _PART),
    "api/write_deadline": Elsewhere("api/test_protocol_bounds.py", _PART),
    "app/maintenance": Elsewhere("backup/test_restore.py", _COMMAND),
    "app/workers/child": Elsewhere("app/workers/test_pool.py", "the child is tested as the process that it is"),
    "backup/archive": Elsewhere("backup/test_backup.py", _PART),
    "backup/manifest": Elsewhere("backup/test_refused_restore.py", _PART),
    "backup/postgres": Elsewhere("backup/test_backup.py", _PART),
    "backup/rows": Elsewhere("backup/test_restore.py", _PART),
    "backup/workspace": Elsewhere("backup/test_interrupted_restore.py", _PART),
    "cli/batches/watch": Elsewhere("cli/batches/test_command.py", _PART),
    "cli/connection/explain": Elsewhere("cli/connection/test_session.py", _PART),
    "cli/connection/stopping": Elsewhere("cli/connection/test_session.py", _PART),
    "cli/connection/transfer": Elsewhere("cli/run/test_runner.py", _PART),
    "cli/new_key": Elsewhere("cli/test_keys.py", _PART),
    "cli/paging": Elsewhere("cli/test_files.py", _PART),
    "cli/restore": Elsewhere("backup/test_restore.py", _COMMAND),
    "cli/run/command": Elsewhere("cli/run/test_runner.py", _PART),
    "cli/run/context": Elsewhere("cli/run/test_runner.py", _PART),
    "cli/run/lines": Elsewhere("cli/run/test_runner.py", _PART),
    "cli/run/rows/command": Elsewhere("cli/run/rows/test_job.py", _PART),
    "cli/run/files": Elsewhere("cli/run/test_runner.py", _PART),
    "cli/connection/service_child": Elsewhere("cli/connection/test_local_service.py", _PART),
    "cli/top/command": Elsewhere("cli/top/test_screen.py", _PART),
    "cli/views": Elsewhere("cli/batches/test_views.py", _PART),
    "cli/store": Elsewhere("cli/test_keys.py", _PART),
    "store/hold": Elsewhere("conformance/test_store_hold.py", _STORE),
    "store/lanes": Elsewhere("conformance/test_store_shards.py", _STORE),
    "console/guard": Elsewhere("console/test_sessions.py", _PART),
    "console/routes": Elsewhere("console/test_pages.py", _PART),
    "console/views": Elsewhere("console/test_batches.py", _PART),
    "domain/reuse": Elsewhere("pipeline/test_reuse.py", _PART),
    "domain/identity": Elsewhere("pipeline/test_identity.py", _PART),
    "client/models": Elsewhere("client/test_client.py", _PART),
    "fsck/rules": Elsewhere("fsck/test_batches.py", _PART),
    "fsck/segments": Elsewhere("fsck/test_batches.py", _PART),
    "fsck/work": Elsewhere("fsck/test_batches.py", _PART),
    "objects/bucket_writer": Elsewhere("objects/test_bucket.py", _PART),
    "objects/keys": Elsewhere("conformance/test_objects.py", "one suite runs on every kind of storage"),
    "objects/spool": Elsewhere("objects/test_bucket.py", _PART),
    "objects/s3_errors": Elsewhere("objects/test_bucket_down.py", _PART),
    "objects/scratch": Elsewhere("conformance/test_objects.py", "one suite runs on every kind of storage"),
    "pipeline/assemble": Elsewhere("pipeline/test_finalize.py", _PART),
    "pipeline/dispatch/selection": Elsewhere("pipeline/dispatch/test_dispatcher.py", _PART),
    "pipeline/dispatch/waiting": Elsewhere("pipeline/test_progress.py", "it shows in the progress of a batch"),
    "pipeline/line_reader": Elsewhere("pipeline/test_rerun.py", _PART),
    "pipeline/check": Elsewhere("api/test_check.py", _THROUGH_API),
    "pipeline/rows/conversion": Elsewhere("console/test_new_batch.py", "it shows in the console"),
    "pipeline/rows/fault": Elsewhere("pipeline/rows/test_table.py", _PART),
    "pipeline/job": Elsewhere("pipeline/test_claim.py", _PART),
    "pipeline/segments": Elsewhere("conformance/test_segments.py", _STORE),
    "pipeline/storage_quota": Elsewhere("api/test_storage_quota.py", _THROUGH_API),
    "store/claim": Elsewhere("conformance/test_store_shards.py", _STORE),
    "store/postgres/migrate": Elsewhere("store/postgres/test_database.py", _PART),
    "store/postgres/pool": Elsewhere("store/postgres/test_database.py", _PART),
    "store/postgres/queries": Elsewhere("store/postgres/test_database.py", _PART),
    "store/store": Elsewhere("conformance/test_store_batches.py", _STORE),
}


def _modules() -> Iterator[str]:
    """Yield each module with behaviour, without its suffix: ``pipeline/validate``."""
    for path in sorted(_PACKAGE.rglob("*.py")):
        if not path.name.startswith("__") and _has_behaviour(path):
            yield path.relative_to(_PACKAGE).with_suffix("").as_posix()


def _has_behaviour(path: Path) -> bool:
    """Return whether a function of the module does anything, which those of a protocol do not."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return any(isinstance(node, functions) and _does_something(node) for node in ast.walk(ast.parse(path.read_text())))


def _does_something(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(not (isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant)) for step in function.body)


def _own_tests(module: str) -> list[Path]:
    """Return the tests at the module's path, those of its package as a whole, and those that every store must pass."""
    path = _TESTS / module
    places = [
        path.with_name(f"test_{path.name}"),
        path.parent.with_name(f"test_{path.parent.name}"),
        _TESTS / "conformance" / f"test_{module.replace('/', '_')}",
    ]
    return [tests for place in places for tests in place.parent.glob(f"{place.name}*.py") if _names(tests, place)]


def _names(tests: Path, place: Path) -> bool:
    return tests.stem == place.name or tests.stem.startswith(f"{place.name}_")


def test_each_module_has_tests_where_they_are_looked_for() -> None:
    """A reader who changes a module finds its tests by its path."""
    without = [module for module in _modules() if not _own_tests(module) and module not in EXCEPTIONS]
    assert without == [], (
        "these modules of src/batchline have no tests: the tests of a/b.py are in tests/a/test_b.py, "
        "or an exception here names the tests and the reason"
    )


def test_each_exception_names_a_module_and_tests_that_exist() -> None:
    """A renamed module or test does not leave a line behind in the table."""
    assert [module for module in EXCEPTIONS if not (_PACKAGE / f"{module}.py").is_file()] == []
    assert [module for module, other in EXCEPTIONS.items() if not (_TESTS / other.tests).is_file()] == []


def test_a_public_class_name_is_defined_once() -> None:
    """A reader who searches for a class finds one thing, and not two that have nothing to do with each other."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(_PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(_PACKAGE).as_posix())
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
