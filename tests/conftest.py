"""Fixtures for real servers, each started once per process of a run: PostgreSQL, an S3 store and llama.cpp."""

import gc
import logging
import os
import sys
from collections.abc import Iterator

import hypothesis
import pytest

from tests.support.bytecode import store_bytecode

pytest_plugins = [
    "tests.support.scheduler",
    "tests.support.postgres_server",
    "tests.support.s3_server",
    "tests.support.llama_server",
]

# On a busy machine any example may take longer than Hypothesis allows by default, which says nothing about the code.
# Each run draws other examples, and make fuzz tries the parsers with many more.
hypothesis.settings.register_profile(
    "batchline", max_examples=50, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("batchline")


_LONG = ("crash", "fsck", "simulation", "fleet", "cli", "console", "app", "sdk", "docs", "backup", "pipeline")
"""Folders of tests that take long, the longest first."""


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile what changed before the processes of a run start, if it has more than one."""
    if session.config.getoption("numprocesses", None):
        store_bytecode()


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Collect no garbage while tests are collected: nearly all that is made stays, and each look at it takes long."""
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long tests first: a process that begins one last would run on while the others are done."""
    folders = tuple(f"tests/{folder}/" for folder in _LONG)
    items.sort(
        key=lambda item: next((n for n, each in enumerate(folders) if item.nodeid.startswith(each)), len(folders))
    )


def pytest_collection_finish() -> None:
    """Take all that was imported and collected out of garbage collection, which would look at it again and again."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Return the event loop of tests that are marked ``anyio``."""
    return "asyncio"


@pytest.fixture
def restored_process() -> Iterator[None]:
    """Undo what a role sets for its whole process: the log, the mode of new files, and how threads take turns."""
    root, interval, mask = logging.getLogger(), sys.getswitchinterval(), os.umask(0o022)
    os.umask(mask)
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    os.umask(mask)
    sys.setswitchinterval(interval)
