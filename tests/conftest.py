"""Fixtures for real servers, each started once a run: PostgreSQL, an S3 store and llama.cpp."""

import pytest

pytest_plugins = ["tests.support.postgres_server", "tests.support.s3_server", "tests.support.llama_server"]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of tests that are marked ``anyio``."""
    return "asyncio"
