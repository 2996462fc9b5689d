"""Runs the tests of the HTTP client on both event loops."""

import asyncio

import pytest
import uvloop

from tests.support.raw_server import Run


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param  # type: ignore[no-any-return]
