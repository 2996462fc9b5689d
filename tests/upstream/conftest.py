import asyncio

import pytest
import uvloop
from wire import Run


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """On either loop."""
    return request.param  # type: ignore[no-any-return]
