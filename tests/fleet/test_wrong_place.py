"""A database and a bucket or folder of different services: the start is refused (F1)."""

from pathlib import Path

import pytest

from tests.support.fleet import running_fleet
from tests.support.postgres_server import Postgres
from tests.support.s3_server import Seaweed
from tests.support.service import Program, Service, await_end, chat_lines, results_of, running_mock, submit

_LINES = chat_lines(f"[[huge=5000]] line {n}" for n in range(40))


@pytest.mark.rule("F1", "A second database on the bucket of a running fleet is refused.")
@pytest.mark.parametrize(
    "role", ["worker", *(pytest.param(role, marks=pytest.mark.proof) for role in ("serve", "api"))]
)
def test_an_empty_database_on_the_bucket_of_a_fleet_is_refused(
    tmp_path: Path, postgres: Postgres, seaweed: Seaweed, role: str
) -> None:
    """F1: a typo, or a staging copy. The fleet goes on and keeps its objects."""
    with (
        running_mock() as mock,
        running_fleet(tmp_path, "api", "worker", postgres=postgres, seaweed=seaweed, upstream_url=mock.url) as fleet,
    ):
        batch = await_end(fleet.client(), submit(fleet.client(), _LINES).id)
        before = seaweed.keys(str(fleet.settings["storage_url"]))
        said = _refusal(
            role,
            seaweed,
            data_dir=tmp_path / "second",
            upstream_url=mock.url,
            database_url=postgres.new_database(),
            storage_url=fleet.settings["storage_url"],
        )
        assert f"The bucket {fleet.settings['storage_url']} belongs to another database" in said
        assert "PostgreSQL database" in said
        assert "batchline adopt" in said
        assert seaweed.keys(str(fleet.settings["storage_url"])) == before
        results_of(fleet.client(), batch, _LINES)
        assert all(node.is_ready() for node in fleet.nodes)


@pytest.mark.rule("F1", "A second folder on the database of a running service is refused.")
def test_a_second_folder_on_one_database_is_refused(tmp_path: Path, postgres: Postgres, seaweed: Seaweed) -> None:
    """F1: the two services would share batches, and each would miss the objects of the other."""
    with running_mock() as mock:
        settings: dict[str, object] = {"database_url": postgres.new_database(), "upstream_url": mock.url}
        first = Service(tmp_path / "first", ("-m", "batchline", "serve"), settings)
        try:
            first.start()
            first.await_ready()
            said = _refusal("serve", seaweed, data_dir=tmp_path / "second", **settings)
            assert "keeps its objects elsewhere" in said
            assert f"the folder {tmp_path / 'second' / 'objects'}" in said
            results_of(first.client(), await_end(first.client(), submit(first.client(), _LINES).id), _LINES)
        finally:
            first.end()


def _refusal(role: str, seaweed: Seaweed, **settings: object) -> str:
    """Start a process, which must end by itself, and return what it said."""
    flags = (f"--{name.replace('_', '-')}={value}" for name, value in ({"port": 0} | settings).items())
    program = Program("-m", "batchline", role, *flags, environment=seaweed.environment)
    try:
        assert program.wait() == 1
        assert "Traceback" not in program.log
        return program.log
    finally:
        program.end()
