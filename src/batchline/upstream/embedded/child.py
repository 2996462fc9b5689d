"""Runs the embedded model in a child process: llama.cpp's own server, on loopback, for clients that have the secret.

::

    stdin     one line of JSON: {"weights", "secret", "slots"}; when it ends, the parent has exited and so does this
    stdout    one line of JSON: {"url"}, or {"problem", "detail"} with the problem "engine" or "weights"
    stderr    the log of llama.cpp, which quotes requests and must therefore not be kept

A new process is started after every crash of the model, so this module imports as little as possible. If stdin is
empty, the process only checks that the engine can be loaded.
"""

import json
import os
import resource
import signal
import sys
from typing import Any, NoReturn

from batchline.domain.embedded_model import EMBEDDED_MODEL

CONTEXT_TOKENS = 2048
"""The tokens of one slot: those of a request and of its answer together."""
SPARE_CALLS = 60
"""Calls at once beyond the slots. An open connection occupies a thread, so a call beyond these would wait for long."""

_DEFAULT_ANSWER_TOKENS = 512
"""The limit on an answer if the request sets none."""
_PROMPT_CACHE_MIB = 256
_MAX_THREADS = 4
"""With a model this small, more threads wait for each other longer than they compute."""
_MEMORY_BYTES = 2 * 1024**3
_SLOT_MEMORY_BYTES = 64 * 1024**2


def main() -> NoReturn:
    """Serve the model until stdin ends."""
    # The parent decides when the model ends: after a signal to the whole process group it may let lines finish first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        engine = load_engine()
    except ImportError as error:
        _fail(stdout, "engine", error)
    start = sys.stdin.buffer.readline()
    if start:
        server = _start(engine, stdout, **json.loads(start))
        _report(stdout, url=server.listening_address)
        sys.stdin.buffer.read()
    # Not sys.exit, which would wait for the answers that are still being made.
    os._exit(0)


def load_engine() -> Any:
    """Import llama.cpp's bindings. Raise ImportError if that fails."""
    # Threads that spin while they wait for each other starve on a machine that is also busy with other work: an answer
    # took ten times as long there.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    import xllamacpp  # type: ignore[import-untyped] # noqa: PLC0415

    return xllamacpp


def parameters(engine: Any, *, weights: str, secret: str, slots: int) -> Any:
    """Return the settings of llama.cpp's server."""
    params = engine.CommonParams()
    params.model.path = weights
    params.model_alias = {EMBEDDED_MODEL}
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [secret]
    params.cors_origins = ""
    params.cors_credentials = False
    params.ui = params.endpoint_slots = params.endpoint_props = params.endpoint_metrics = False
    params.n_threads_http = slots + SPARE_CALLS
    params.n_parallel = slots
    params.n_ctx = slots * CONTEXT_TOKENS
    # The engine would read the model once more, to adapt the context to the memory. The context is given.
    params.fit_params = False
    params.n_predict = _DEFAULT_ANSWER_TOKENS
    params.cache_ram_mib = _PROMPT_CACHE_MIB
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = min(_MAX_THREADS, _cores())
    params.verbosity = 0
    return params


def _start(engine: Any, stdout: int, *, weights: str, secret: str, slots: int) -> Any:
    if sys.platform == "linux":
        # A request can ask for gigabytes (repeat_last_n). The request must fail then, and not the machine.
        limit = _MEMORY_BYTES + slots * _SLOT_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        return engine.Server(parameters(engine, weights=weights, secret=secret, slots=slots))
    except (RuntimeError, MemoryError) as error:
        _fail(stdout, "weights", error)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _fail(stdout: int, problem: str, error: Exception) -> NoReturn:
    _report(stdout, problem=problem, detail=str(error))
    os._exit(1)


def _report(stdout: int, **facts: str) -> None:
    os.write(stdout, json.dumps(facts).encode() + b"\n")


if __name__ == "__main__":
    main()
