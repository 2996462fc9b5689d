from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.api_server import Api
from tests.support.manual_upstream import ManualUpstream


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Api]]:
    """Return a server with some settings, shared by all tests with the same: none may rely on what another left."""
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
    """Return the shared server with default settings."""
    return shared()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Api]]:
    """Start a server for this test alone."""
    with ExitStack() as running:
        yield lambda **options: running.enter_context(Api(tmp_path, **options))


@pytest.fixture
def manual_upstream() -> Iterator[ManualUpstream]:
    """Open an upstream that the test plays itself."""
    with ManualUpstream() as upstream:
        yield upstream
