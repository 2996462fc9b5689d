from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.support.console import Visitor, visitor
from tests.support.fleet import running_fleet
from tests.support.postgres_server import Postgres
from tests.support.s3_server import Seaweed
from tests.support.service import Account, Service, await_end, chat_lines, running_mock, running_service, submit

BROKEN = "[[status=400]]"


class Console(NamedTuple):
    """A running service with an account that has a batch with failures, and another account."""

    service: Service
    batch_id: str
    stranger: Account

    @property
    def port(self) -> int:
        return self.service.port

    @property
    def key(self) -> str:
        return self.service.account["api_key"]


@pytest.fixture(scope="session", params=["sqlite", "postgres"])
def console(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """Return a console on each backend: a data folder, and PostgreSQL with a bucket."""
    folder = tmp_path_factory.mktemp("console")
    with running_mock() as mock:
        if request.param == "sqlite":
            with running_service(folder, mock.url) as service:
                yield _filled(service)
        else:
            postgres: Postgres = request.getfixturevalue("postgres")
            seaweed: Seaweed = request.getfixturevalue("seaweed")
            with running_fleet(folder, "serve", postgres=postgres, seaweed=seaweed, upstream_url=mock.url) as fleet:
                yield _filled(fleet.nodes[0])


def _filled(service: Service) -> Console:
    client = service.client()
    batch = submit(client, chat_lines([*(f"question {n}" for n in range(60)), BROKEN, BROKEN]))
    return Console(service, await_end(client, batch.id).id, service.new_account("stranger"))


@pytest.fixture
def person(console: Console) -> Iterator[Visitor]:
    """Return a browser that is signed in."""
    with visitor(console.port, console.key) as opened:
        yield opened
