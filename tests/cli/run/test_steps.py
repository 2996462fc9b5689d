"""The steps of `batchline run` that need no server (F4)."""

from pathlib import Path
from typing import Any

import pytest

from batchline.cli.run.steps import WaitMonitor, digest_of, endpoint_of
from batchline.client.models import Counts
from batchline.domain.wait_text import AnyWait
from tests.support.clocks import SettableClock


@pytest.mark.parametrize(
    ("content", "endpoint"),
    [
        (b'{"url": "/v1/embeddings"}\n{"url": "/v1/other"}\n', "/v1/embeddings"),
        (b'\xef\xbb\xbf \r\n\t\n{"url": "/v1/embeddings"}', "/v1/embeddings"),
        (b'{"url": ""}\n', "/v1/chat/completions"),
        (b"[" * 100_000 + b"\n", "/v1/chat/completions"),
        (b'{"url": "\xff"}\n', "/v1/chat/completions"),
        (b"", "/v1/chat/completions"),
    ],
)
def test_the_endpoint_is_that_of_the_first_line(tmp_path: Path, content: bytes, endpoint: str) -> None:
    """F4, C4: if it cannot be read, the default is used and the service reports what is wrong with the file."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    assert endpoint_of(path) == endpoint


def test_the_digest_changes_with_the_content(tmp_path: Path) -> None:
    """F4: a run is resumed only with the same input."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"one")
    first = digest_of(path)
    assert digest_of(path) == first
    path.write_bytes(b"two")
    assert digest_of(path) != first


class _ClientStub:
    """Gives the same reason each time, and counts how often it is asked."""

    def __init__(self) -> None:
        self.wait: AnyWait | None = None
        self.asked = 0

    def waiting_for(self, batch_id: str) -> AnyWait | None:
        self.asked += 1
        return self.wait


@pytest.mark.rule("D11", "`batchline run` says why lines wait if that is unusual or nothing moves.")
def test_a_run_says_why_lines_wait_if_nothing_moves() -> None:
    client, clock = _ClientStub(), SettableClock()
    untyped_client: Any = client
    monitor = WaitMonitor(untyped_client, clock, "batch_1")

    def problem(done: int, *, after: float) -> str | None:
        clock.advance(after)
        return monitor.problem(Counts(total=100, completed=done))

    client.wait = AnyWait(reason="slots", limit=4, in_flight=4)
    assert [problem(done, after=1) for done in range(1, 11)] == [None] * 10
    assert client.asked == 5
    assert problem(10, after=6) == "waiting for a slot: all 4 are taken"
    client.wait = AnyWait(reason="rate_limit", upstream="default", model="m", rate=5)
    assert problem(11, after=3) == "waiting: the upstream accepts 5 lines a second of model m"
    assert problem(100, after=1) is None
    client.wait = None
    assert problem(12, after=3) is None
