from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.api_server import Api
from tests.support.manual_upstream import HandUpstream


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Api]]:
    """A server with some settings, for all tests that ask for these: none may lean on what others leave behind."""
    running: dict[str, Api] = {}

    with ExitStack() as stack:

        def find(**settings: Any) -> Api:
            name = repr(sorted(settings.items()))
            if name not in running:
                running[name] = stack.enter_context(Api(tmp_path_factory.mktemp("api"), **settings))
            return running[name]

        yield find


@pytest.fixture(scope="session")
def api(shared: Callable[..., Api]) -> Api:
    """The server as it is by default."""
    return shared()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Api]]:
    """A server of one's own."""
    with ExitStack() as running:
        yield lambda **options: running.enter_context(Api(tmp_path, **options))


@pytest.fixture
def hand() -> Iterator[HandUpstream]:
    """An upstream that the test plays."""
    with HandUpstream() as upstream:
        yield upstream
