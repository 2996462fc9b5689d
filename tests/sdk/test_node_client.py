"""The official Node client: file before purpose, chunked, without a Content-Length (B2), and its own paging (C9b)."""

import subprocess
from pathlib import Path

import pytest

from tests.support.service import running_mock, running_service

_NODE = Path(__file__).parents[1] / "node"


@pytest.mark.node
def test_the_whole_trip(tmp_path: Path) -> None:
    """B1, B5 to B8, C7 to C10, C12: upload, create, poll, list, download both files, cancel, delete."""
    with running_mock() as mock, running_service(tmp_path, mock.url) as service:
        trip = subprocess.run(
            ["node", "trip.mjs", service.base_url, *service.credentials.values()],
            cwd=_NODE,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert trip.returncode == 0, trip.stderr
    assert trip.stdout == "the trip is complete\n"
