"""The steps of `batchline run` that need no server (F4)."""

from pathlib import Path

import pytest

from batchline.cli.run.steps import digest_of, endpoint_of


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
