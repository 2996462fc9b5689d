"""What it pays that lines whose prompts begin alike run one after another: the same batch with and without, on a real
engine that remembers less than all of them.

Run as a program, this file is that engine, or the service without the grouping.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
import pytest

from batchline.app import roles
from batchline.cli import main
from batchline.domain.limits import InputLimits
from batchline.pipeline import validate
from batchline.ports import Verdict
from batchline.upstream.embedded.child import load_engine, parameters
from batchline.upstream.embedded.download import find_weights
from tests.support.service import CHAT, Program, await_end, counts_of, running_service, submit

_PREFIXES = 8
_PROMPTS = 40
_SLOTS = 2
_LEAST_GAIN = 1.5
_WORDS = "time year people way day man thing woman life child world school state family student group country problem"


class Run(NamedTuple):
    seconds: float
    prompt_tokens: int
    cached_tokens: int


@pytest.mark.proof
def test_prompts_that_begin_alike_are_faster_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 prompts over 8 beginnings of 300 tokens, interleaved in the file."""
    monkeypatch.setattr("tests.support.service.PATIENCE", 1200.0)
    lines = _interleaved()
    interleaved = _run(tmp_path / "interleaved", lines, command=("-m", __name__, "serve"))
    grouped = _run(tmp_path / "grouped", lines)
    gain = interleaved.seconds / grouped.seconds
    print(f"\ninterleaved {interleaved}\ngrouped     {grouped}\n{gain:.2f} times faster")
    assert grouped.prompt_tokens == interleaved.prompt_tokens >= _PROMPTS * 300
    assert grouped.cached_tokens > 2 * interleaved.cached_tokens
    assert gain >= _LEAST_GAIN


def _run(folder: Path, lines: bytes, *, command: tuple[str, ...] = ("-m", "batchline", "serve")) -> Run:
    """By an engine that has seen nothing yet."""
    with (
        _running_engine() as url,
        running_service(folder, url, command=command, max_concurrency=_SLOTS) as service,
    ):
        client = service.client()
        began = time.monotonic()
        batch = await_end(client, submit(client, lines).id)
        seconds = time.monotonic() - began
    assert counts_of(batch) == (_PROMPTS, _PROMPTS, 0)
    assert batch.usage is not None
    return Run(seconds, batch.usage.input_tokens, batch.usage.input_tokens_details.cached_tokens)


def _interleaved() -> bytes:
    words = Random(1)
    prefixes = [" ".join(words.choices(_WORDS.split(), k=300)) for _ in range(_PREFIXES)]
    return b"".join(_line(n, prefixes[n % _PREFIXES]) for n in range(_PROMPTS))


def _line(n: int, prefix: str) -> bytes:
    messages = [{"role": "system", "content": prefix}, {"role": "user", "content": f"What is word {n}?"}]
    body = {"model": "m", "messages": messages, "max_tokens": 1}
    return msgspec.json.encode({"custom_id": f"line-{n}", "method": "POST", "url": CHAT, "body": body}) + b"\n"


@contextmanager
def _running_engine() -> Iterator[str]:
    program = Program("-m", __name__, "engine")
    try:
        yield program.wait_for_log(r"engine listens on (http://\S+)\n") + "/v1"
    finally:
        program.end()


def _serve_engine() -> None:
    """The embedded model's, but that it remembers no more than what its slots hold."""
    parent = os.getppid()
    weights = find_weights(cache=Path())
    assert weights is not None, "make setup installs it"
    engine = load_engine()
    params = parameters(engine, weights=str(weights), secret="", slots=_SLOTS)
    params.api_keys, params.cache_ram_mib = [], 0
    server = engine.Server(params)
    os.write(1, f"engine listens on {server.listening_address}\n".encode())
    while os.getppid() == parent:
        time.sleep(1)


class _FileOrder:
    """Validates in the service's own process, where prefixes can be made to look all the same."""

    async def validate(
        self, *, project_id: str, source: Path, work: Path, endpoint: str, limits: InputLimits
    ) -> Verdict:
        return validate.validate_file(source=source, work=work, endpoint=endpoint, limits=limits)

    def close(self) -> None:
        pass


def _serve_in_file_order() -> None:
    vars(validate)["prompt_prefix"] = lambda _: ()
    vars(roles)["ValidationPool"] = _FileOrder
    main()


if __name__ == "__main__":
    _serve_engine() if sys.argv[1] == "engine" else _serve_in_file_order()
