"""The embedded model may die as often as it likes (D5, F2): ``batchline serve`` without any upstream."""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from batchline.domain.embedded_model import EMBEDDED_MODEL
from tests.support.service import CHAT, Service, await_end, counts_of, results_of, submit, wait_until


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_a_batch_outlives_the_deaths_of_the_embedded_model(tmp_path: Path, kills: int) -> None:
    """D5, F2: it is killed under the lines; each gets its answer from a real model all the same, and when the service
    ends, the model does too."""
    count = 12 * kills
    lines = b"".join(_line(number) for number in range(count))
    with _running_service(tmp_path) as service:
        client = service.client()
        batch = submit(client, lines)
        for life in range(1, kills + 1):
            os.kill(_pids(service, life)[-1], signal.SIGKILL)
        batch = await_end(client, batch.id)
        records = results_of(client, batch, lines)
        assert counts_of(batch) == (count, count, 0)
        assert {record["response"]["body"]["model"] for record in records.values()} == {EMBEDDED_MODEL}
        assert service.log.count("the embedded model died") == kills
        assert service.terminate() == 0
        assert not any(psutil.pid_exists(pid) for pid in _pids(service, kills + 1))


def _line(number: int) -> bytes:
    messages = [{"role": "user", "content": f"Which number comes after {number}?"}]
    body = {"model": "any", "messages": messages, "max_tokens": 8}
    return json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}).encode() + b"\n"


@contextmanager
def _running_service(folder: Path) -> Iterator[Service]:
    service = Service(folder / "data", ("-m", "batchline", "serve"), {})
    try:
        service.start()
        service.await_ready()
        yield service
    finally:
        service.end()


def _pids(service: Service, lives: int) -> list[int]:
    """Of the model's processes, once so many have come to serve."""

    def pids() -> list[int]:
        return [int(pid) for pid in re.findall(r"the embedded model serves.* pid=(\d+)\n", service.log)]

    wait_until(lambda: len(pids()) >= lives, what=f"{lives} lives of the model")
    return pids()
