"""Fixtures for real servers, each started once per process of a run: PostgreSQL, an S3 store and llama.cpp."""

import hypothesis
import pytest

pytest_plugins = ["tests.support.postgres_server", "tests.support.s3_server", "tests.support.llama_server"]

# On a busy machine any example may take longer than Hypothesis allows by default, which says nothing about the code.
hypothesis.settings.register_profile(
    "batchline", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("batchline")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Return the event loop of tests that are marked ``anyio``."""
    return "asyncio"
