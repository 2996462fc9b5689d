from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from api_server import Api


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A server that all tests share: none may lean on what others leave behind."""
    with Api(tmp_path_factory.mktemp("api")) as running:
        yield running


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Api]]:
    """A server of one's own, with settings of one's own."""
    with ExitStack() as running:
        yield lambda **options: running.enter_context(Api(tmp_path, **options))
