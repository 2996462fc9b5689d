"""Starts the upstream of all systems: ``upstream.c`` if it can be compiled, else ``batchline mock``."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

from msgspec import Struct, convert
from msgspec.structs import asdict

from tests.support.service import Mock, running_mock

_SOURCE = Path(__file__).with_name("upstream.c")


class Plan(Struct, frozen=True, kw_only=True):
    """How the upstream behaves; faults are in percent of the attempts."""

    latency_ms: float = 0
    internal: float = 0
    """Percentage answered with 500."""
    throttled: float = 0
    """Percentage answered with 429 and Retry-After: 1."""
    cut: float = 0
    """Percentage for which the connection is closed halfway through the answer."""


class Seen(Struct, frozen=True, kw_only=True):
    """What an upstream counted since it got its plan. Moments are of the monotonic clock, 0 if unknown."""

    requests: int
    answered: int
    lines: int
    repeated: int
    """Lines that were sent again although they had been answered completely."""
    peak_in_flight: int
    first_request: float = 0
    last_answer: float = 0
    cpu_seconds: float = 0

    @property
    def busy_seconds(self) -> float:
        """Seconds from the first request to the last answer."""
        return self.last_answer - self.first_request


class Upstream(Protocol):
    name: str
    url: str
    """The base URL with /v1, as clients want it."""

    def follow(self, plan: Plan) -> None:
        """Use this plan from now on, and reset the counters."""

    def seen(self) -> Seen: ...


class CompiledUpstream:
    """``upstream.c`` in its own process."""

    name = "upstream.c"

    def __init__(self, port: int) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=60)
        self.url = f"http://127.0.0.1:{port}/v1"

    def follow(self, plan: Plan) -> None:
        self._ask(f"/plan?{urlencode(asdict(plan))}")

    def seen(self) -> Seen:
        return convert(self._ask("/seen"), Seen)

    def _ask(self, path: str) -> Any:
        self._connection.request("GET", path)
        return json.loads(self._connection.getresponse().read())

    def close(self) -> None:
        self._connection.close()


class ScriptedUpstream:
    """``batchline mock``. Its counters are never reset, so earlier counts are subtracted; it reports no moments."""

    name = "batchline mock"

    def __init__(self, mock: Mock) -> None:
        self._mock = mock
        self.url = mock.url
        self._before = self._counted()

    def follow(self, plan: Plan) -> None:
        self._mock.follow(
            delay=plan.latency_ms / 1000,
            status={"500": plan.internal, "429": plan.throttled},
            cut=plan.cut,
            retry_after=1,
        )
        self._before = self._counted()

    def seen(self) -> Seen:
        counted, before = self._counted(), self._before
        return Seen(
            requests=counted.requests - before.requests,
            answered=counted.answered - before.answered,
            lines=counted.lines - before.lines,
            repeated=0,
            peak_in_flight=counted.peak_in_flight,
        )

    def _counted(self) -> Seen:
        stats = self._mock.stats()
        return Seen(
            requests=stats["requests"],
            answered=stats["requests_by_status"].get("200", 0),
            lines=stats["distinct"],
            repeated=0,
            peak_in_flight=stats["peak_in_flight"],
        )


@contextmanager
def running_upstream(folder: Path) -> Iterator[Upstream]:
    program = _compile(folder)
    if program is None:
        with running_mock() as mock:
            yield ScriptedUpstream(mock)
        return
    process = subprocess.Popen([program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        with closing(CompiledUpstream(int(process.stdout.readline().split()[-1]))) as upstream:
            yield upstream
    finally:
        process.kill()
        process.communicate()


def _compile(folder: Path) -> Path | None:
    """Compile the program and return it, or None without a C compiler or on another system than Linux."""
    compiler, program = shutil.which("cc"), folder / "upstream"
    if compiler is None:
        return None
    compiled = subprocess.run([compiler, "-O2", "-o", program, _SOURCE], check=False, capture_output=True)
    return program if compiled.returncode == 0 else None
