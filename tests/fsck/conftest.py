"""Provides the data of a killed service on each kind of store, copied for each test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.postgres_server import Postgres
from tests.support.s3_server import Seaweed
from tests.support.stored_data import StoredData, empty_data, make_data

Maker = Callable[[str], StoredData]


@pytest.fixture(scope="session")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Maker]:
    """Return a function that makes the data of a kind, once for all tests. No test may change it."""
    known: dict[str, StoredData] = {}
    with pytest.MonkeyPatch.context() as patch:

        def make(kind: str) -> StoredData:
            if kind not in known:
                database_url = storage_url = None
                if "postgres" in kind:
                    database_url = request.getfixturevalue("postgres").new_database()
                if "bucket" in kind:
                    seaweed: Seaweed = request.getfixturevalue("seaweed")
                    storage_url = seaweed.new_url()
                    for name, value in seaweed.environment.items():
                        patch.setenv(name, value)
                folder = tmp_path_factory.mktemp("made")
                known[kind] = make_data(empty_data(folder, database_url=database_url, storage_url=storage_url))
            return known[kind]

        yield make


def copy_of(request: pytest.FixtureRequest, made: Maker, tmp_path: Path, kind: str) -> StoredData:
    postgres: Postgres | None = request.getfixturevalue("postgres") if "postgres" in kind else None
    bucket: Seaweed | None = request.getfixturevalue("bucket") if "bucket" in kind else None
    return made(kind).copy(tmp_path, postgres, bucket)


@pytest.fixture(params=["sqlite+folder", pytest.param("postgres+bucket", marks=pytest.mark.proof)])
def data(request: pytest.FixtureRequest, made: Maker, tmp_path: Path) -> StoredData:
    return copy_of(request, made, tmp_path, request.param)


@pytest.fixture(params=["sqlite+folder", pytest.param("postgres+folder", marks=pytest.mark.proof), "postgres+bucket"])
def any_data(request: pytest.FixtureRequest, made: Maker, tmp_path: Path) -> StoredData:
    return copy_of(request, made, tmp_path, request.param)


@pytest.fixture
def local_data(request: pytest.FixtureRequest, made: Maker, tmp_path: Path) -> StoredData:
    return copy_of(request, made, tmp_path, "sqlite+folder")
