"""The process that runs the embedded model: llama.cpp's own server, on loopback, for whoever knows the secret.

::

    stdin     one line of JSON: {"weights", "secret", "slots"}; when it ends the parent is gone, and so is the process
    stdout    one line of JSON: {"url"}, or {"problem", "detail"} where the problem is the "engine" or the "weights"
    stderr    what llama.cpp logs, which quotes requests: nobody may keep it

It is started for every life of the model, so it imports next to nothing. Without an order it only proves that the
engine can be loaded.
"""

import json
import os
import resource
import signal
import sys
from typing import Any, NoReturn

ALIAS = "smollm2-135m-instruct"
CONTEXT_TOKENS = 2048
"""Of a slot: a request and its answer."""
SPARE_CALLS = 60
"""Beyond the slots, at once. A connection has a thread to itself while it is open; one too many would wait for long."""

_MOST_ANSWER_TOKENS = 512
"""Where a request does not say."""
_PROMPT_CACHE_MIB = 256
_MOST_THREADS = 4
"""More of them wait for one another longer than they compute, with a model this small."""
_MEMORY_BYTES = 2 * 1024**3
_SLOT_MEMORY_BYTES = 64 * 1024**2


def main() -> NoReturn:
    # When the model ends is for the parent to say, which may let lines finish after a signal to the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    told = os.dup(1)
    os.dup2(2, 1)
    try:
        engine = load_engine()
    except ImportError as error:
        _fail(told, "engine", error)
    order = sys.stdin.buffer.readline()
    if order:
        server = _start(engine, told, **json.loads(order))
        _tell(told, url=server.listening_address)
        sys.stdin.buffer.read()
    # Not sys.exit, which would wait for the answers under way.
    os._exit(0)


def load_engine() -> Any:
    """Raises ImportError."""
    # Threads that spin while they wait for each other starve on a machine that has other things to do too: there, an
    # answer took ten times as long.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    import xllamacpp  # type: ignore[import-untyped] # noqa: PLC0415

    return xllamacpp


def parameters(engine: Any, *, weights: str, secret: str, slots: int) -> Any:
    params = engine.CommonParams()
    params.model.path = weights
    params.model_alias = {ALIAS}
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [secret]
    params.cors_origins = ""
    params.cors_credentials = False
    params.ui = params.endpoint_slots = params.endpoint_props = params.endpoint_metrics = False
    params.n_threads_http = slots + SPARE_CALLS
    params.n_parallel = slots
    params.n_ctx = slots * CONTEXT_TOKENS
    params.n_predict = _MOST_ANSWER_TOKENS
    params.cache_ram_mib = _PROMPT_CACHE_MIB
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = min(_MOST_THREADS, _cores())
    params.verbosity = 0
    return params


def _start(engine: Any, told: int, *, weights: str, secret: str, slots: int) -> Any:
    if sys.platform == "linux":
        # A request can ask for gigabytes (repeat_last_n). That shall fail, and not the machine.
        most = _MEMORY_BYTES + slots * _SLOT_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        return engine.Server(parameters(engine, weights=weights, secret=secret, slots=slots))
    except (RuntimeError, MemoryError) as error:
        _fail(told, "weights", error)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _fail(told: int, problem: str, error: Exception) -> NoReturn:
    _tell(told, problem=problem, detail=str(error))
    os._exit(1)


def _tell(told: int, **facts: str) -> None:
    os.write(told, json.dumps(facts).encode() + b"\n")


if __name__ == "__main__":
    main()
