from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.api_server import Api
from tests.support.console import Visitor, visitor
from tests.support.fleet import running_fleet
from tests.support.postgres_server import Postgres
from tests.support.s3_server import Seaweed
from tests.support.service import Account, Service, await_end, chat_lines, running_mock, running_service, submit

BROKEN = "[[status=400]]"
ADMIN_TOKEN = "token-of-the-administrator"


class Console(NamedTuple):
    """A running service with an account that has a batch with failures, one with a webhook, and one without a batch."""

    service: Service
    batch_id: str
    stranger: Account
    newcomer: Account

    @property
    def port(self) -> int:
        return self.service.port

    @property
    def admin_token(self) -> str:
        return ADMIN_TOKEN

    @property
    def key(self) -> str:
        return self.service.account["api_key"]


@pytest.fixture(scope="session", params=["sqlite", pytest.param("postgres", marks=pytest.mark.proof)])
def console(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """Return a console on a data folder, and in the proof one on PostgreSQL with a bucket."""
    folder = tmp_path_factory.mktemp("console")
    with running_mock() as mock:
        if request.param == "sqlite":
            with running_service(folder, mock.url, admin_token=ADMIN_TOKEN) as service:
                yield _filled(service)
        else:
            postgres: Postgres = request.getfixturevalue("postgres")
            seaweed: Seaweed = request.getfixturevalue("seaweed")
            settings: dict[str, Any] = {"upstream_url": mock.url, "admin_token": ADMIN_TOKEN}
            with running_fleet(folder, "serve", postgres=postgres, seaweed=seaweed, **settings) as fleet:
                yield _filled(fleet.nodes[0])


def _filled(service: Service) -> Console:
    client = service.client()
    batch = submit(client, chat_lines([*(f"question {n}" for n in range(60)), BROKEN, BROKEN]))
    stranger, newcomer = (service.new_account(name) for name in ("stranger", "newcomer"))
    service.command("webhooks", "create", "https://hooks.example.invalid/batchline", "--project", "stranger")
    other = service.client(stranger)
    await_end(other, submit(other, chat_lines(["one"])).id)
    return Console(service, await_end(client, batch.id).id, stranger, newcomer)


@pytest.fixture
def person(console: Console) -> Iterator[Visitor]:
    """Return a browser that is signed in."""
    with visitor(console.port, console.key) as opened:
        yield opened


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Api]]:
    """Start a console without a worker for this test alone."""
    with ExitStack() as running:
        yield lambda **options: running.enter_context(
            Api(tmp_path, **{"has_console": True, "admin_token": ADMIN_TOKEN, **options})
        )
