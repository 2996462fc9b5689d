"""A service and its upstream that the tests of client commands share; each test has its own project."""

import os
import select
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


class NamedPipe:
    """A named pipe with a reader. What is written to it is kept by the system until it is read, up to 64 KiB."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    @property
    def has_ended(self) -> bool:
        """Whether a writer opened the pipe and closed it again."""
        poll = select.poll()
        poll.register(self._reader, select.POLLHUP)
        return bool(poll.poll(0))

    def read(self) -> bytes:
        """Return what was written since the last call."""
        return os.read(self._reader, 65536)

    def close(self) -> None:
        os.close(self._reader)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[NamedPipe]:
    made = NamedPipe(tmp_path / "pipe")
    yield made
    made.close()
