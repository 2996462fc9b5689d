"""How processes of a fleet start, together and on what is not ready for them: SPEC F1, F5."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

from batchline.store.postgres.migrate import expected_version
from tests.support.postgres_server import Postgres
from tests.support.s3_server import Seaweed
from tests.support.service import (
    Program,
    Service,
    await_end,
    chat_lines,
    counts_of,
    running_mock,
    running_service,
    submit,
    wait_until,
)

_SERVE = ("-m", "batchline", "serve")
_NOBODY = {"api_key": "unknown", "project_id": "unknown"}
"""There are no tables for accounts yet."""


def test_several_bring_an_empty_database_up_to_date_at_once(
    tmp_path: Path, postgres: Postgres, seaweed: Seaweed
) -> None:
    """F1: four times `migrate` and two times `serve`, side by side; all are fine, and the two services share a batch:
    each is an API node and a worker in one."""
    url, environment = postgres.new_database(empty=True), seaweed.environment
    with running_mock() as mock, ExitStack() as ending:
        settings = {"database_url": url, "storage_url": seaweed.new_url(), "upstream_url": mock.url}
        services = [
            Service(tmp_path / name, _SERVE, {**settings}, account=_NOBODY, environment=environment)
            for name in ("first", "second")
        ]
        for service in services:
            ending.callback(service.end)
            service.start()
        migrations = [_program("migrate", database_url=url, data_dir=tmp_path) for _ in range(4)]
        for migration in migrations:
            ending.callback(migration.end)
        assert [migration.wait() for migration in migrations] == [0] * 4, [each.log for each in migrations]
        for service in services:
            service.await_ready()
        account = services[0].new_account("default")
        first, second = (service.client(account) for service in services)
        batch = await_end(second, submit(first, chat_lines(f"line {n}" for n in range(100))).id)
        assert counts_of(batch) == (100, 100, 0)
        assert mock.stats()["requests"] == 100


def test_a_database_without_tables_is_refused(tmp_path: Path, postgres: Postgres) -> None:
    """F5: the process ends and says what to do."""
    url = postgres.new_database(empty=True)
    told = _refused(tmp_path, "api", "worker", database_url=url, storage_url="s3://bucket")
    assert all("batchline migrate" in log for log in told)


def test_a_node_says_that_the_database_was_migrated_under_it(tmp_path: Path, postgres: Postgres) -> None:
    """F5: by a newer version, the node goes on and says so; by a restored backup of an older one, it is not ready."""
    url = postgres.new_database()
    version = f"UPDATE schema_version SET version = {expected_version()} + "
    with running_mock() as mock, running_service(tmp_path, mock.url, database_url=url) as service:
        for change, status in ((1, 200), (-1, 503), (0, 200)):
            postgres.execute(f"{version}({change})", database=url.rpartition("/")[2])
            wait_until(partial(_says, service, status, differs=change != 0), what=f"/readyz after a change of {change}")


def _says(service: Service, status: int, *, differs: bool) -> bool:
    reply = service.call("GET", "/readyz")
    return (reply.status, b"differ: the database has version" in reply.body) == (status, differs)


def test_what_is_not_shared_is_refused(tmp_path: Path) -> None:
    """F1: the process ends and names both settings that are missing, or the one."""
    for log in _refused(tmp_path, "api", "worker"):
        assert "BATCHLINE_DATABASE_URL" in log
        assert "BATCHLINE_STORAGE_URL" in log
    for log in _refused(tmp_path, "api", database_url="postgresql://127.0.0.1:1/nowhere"):
        assert "BATCHLINE_DATABASE_URL" not in log
        assert "BATCHLINE_STORAGE_URL" in log


def _refused(folder: Path, *roles: str, **settings: object) -> list[str]:
    """What processes said that ended by themselves."""
    always: dict[str, object] = {"upstream_url": "http://127.0.0.1:1/v1", "data_dir": folder, "port": 0}
    programs = [_program(role, **always, **settings) for role in roles]
    try:
        assert [program.wait() for program in programs] == [1] * len(roles)
    finally:
        for program in programs:
            program.end()
    assert not any("Traceback" in program.log for program in programs)
    return [program.log for program in programs]


def _program(command: str, **settings: object) -> Program:
    return Program(
        "-m", "batchline", command, *(f"--{name.replace('_', '-')}={value}" for name, value in settings.items())
    )
