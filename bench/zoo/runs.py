"""Runs a fresh service before an upstream of one kind, and batches on it."""

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct, convert
from openai.types import Batch

from tests.support.service import CHAT, Program, Service, call, counts_of, running_service, submit

POLL_SECONDS = 0.05


class Seen(Struct, frozen=True, kw_only=True):
    """What an upstream has counted."""

    answered: int
    refused: int
    """Answers that were not 200."""
    peak: int
    """The most requests in flight."""
    seconds: float
    """The time since the first request."""


class End(Struct, frozen=True, kw_only=True):
    """How a batch ended."""

    seconds: float
    open: int = 0
    """Lines that had no answer when the time was over."""
    failed: int = 0


class Run:
    """A service before one upstream."""

    def __init__(self, service: Service, upstream_url: str) -> None:
        self._service = service
        self._upstream_port = int(upstream_url.rsplit(":", 1)[1])

    def submit(self, lines: bytes) -> Batch:
        return submit(self._service.client(), lines)

    def submit_for_another_project(self, lines: bytes) -> None:
        submit(self._service.client(self._service.new_account("two")), lines)

    def finish(self, lines: bytes, *, most_seconds: float, hopeless: int = 0) -> End:
        """Run a batch until all lines but the hopeless ones are answered, or the time is over."""
        since, batch = time.monotonic(), self.submit(lines)
        while True:
            batch = self._service.client().batches.retrieve(batch.id)
            total, completed, failed = counts_of(batch)
            seconds = time.monotonic() - since
            is_done = batch.status == "completed" or (total and completed + max(failed, hopeless) >= total)
            if is_done or seconds > most_seconds:
                unanswered = (total or lines.count(b"\n")) - completed - max(failed, hopeless)
                return End(seconds=seconds, open=max(0, unanswered), failed=max(0, failed - hopeless))
            time.sleep(POLL_SECONDS)

    def seen(self) -> Seen:
        return convert(call(self._upstream_port, "GET", "/seen", headers={}).json, Seen)


@contextmanager
def running(kind: str) -> Iterator[Run]:
    """Run an upstream of this kind and a service with default settings before it."""
    upstream = Program("-m", "bench.zoo.upstreams", kind)
    try:
        url = upstream.wait_for_log(r"(http://\S+)")
        with (
            tempfile.TemporaryDirectory(prefix="batchline-zoo-") as folder,
            running_service(Path(folder), f"{url}/v1") as service,
        ):
            yield Run(service, url)
    finally:
        upstream.end()


def prompts(count: int, prompt: str = "say ok", *, model: str = "m") -> bytes:
    """Return an input file with so many equal lines."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
    lines = ({"custom_id": f"{prompt} {n}", "method": "POST", "url": CHAT, "body": body} for n in range(count))
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)
