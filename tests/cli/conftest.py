"""A service and its upstream that the tests of client commands share; each test has its own project."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.support.http_proxy import Between, between
from tests.support.run_process import Tenant
from tests.support.service import Mock, Service, chat_lines, running_mock, running_service

_numbers = count()


@pytest.fixture(scope="session")
def mock() -> Iterator[Mock]:
    with running_mock() as started:
        yield started


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory, mock: Mock) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("service"), mock.url, max_concurrency=4) as started:
        yield started


@pytest.fixture
def tenant(service: Service) -> Tenant:
    return Tenant(service, service.new_account(f"project-{next(_numbers)}"))


@pytest.fixture
def proxy(service: Service) -> Iterator[Between]:
    with between(service) as made:
        yield made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(chat_lines(f"question {n}" for n in range(20)))
    return path
