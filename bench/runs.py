"""Measures one run of each system: batchline, the scripts that people write, and wrk, which only sends."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import sleep

from msgspec import Struct

from bench.lines import Outcome, WrongResults, check_results, request_body, write_input
from bench.meter import Peak, metering
from bench.round_trip import RoundTrip, RoundTripTimes
from bench.services import Backend, Batchline, running_batchline
from bench.upstream import Plan, Seen, Upstream

CONCURRENCY = 64
"""Requests in flight for the systems that do not choose a number themselves."""
SCRIPTS = {"AsyncOpenAI script": ("openai", "openai_client"), "aiohttp script": ("aiohttp", "aiohttp_client")}
WRK = "wrk"

_WARM_UP_LINES = 250
_SECONDS_AFTER_DOWNLOAD = 1.0
"""How long CPU time is counted after the download, so that work that a service postpones is in its cost."""
_ROOT = Path(__file__).parents[1]
_WRK_SCRIPT = Path(__file__).with_name("wrk.lua")


class Run(Struct, frozen=True, kw_only=True):
    """One run of one system."""

    system: str
    plan: Plan
    lines: int
    seconds: float
    cpu_seconds: float
    """CPU time of its processes from the first byte sent to the last received; for a service, one second longer."""
    machine_cores: float
    peak: Peak
    servers_cpu_seconds: float = 0
    """CPU time of the database and the bucket, if they are processes of their own."""
    servers_peak: Peak = Peak()
    seen: Seen
    outcome: Outcome | None = None
    times: RoundTripTimes | None = None

    @property
    def lines_per_second(self) -> float:
        return self.lines / self.seconds

    @property
    def cpu_us(self) -> float:
        """CPU time per line, in microseconds."""
        return self.cpu_seconds / self.lines * 1e6


def missing_reason(system: str) -> str | None:
    """Return why a system cannot be measured here, or None if it can."""
    if system == WRK and shutil.which(WRK) is None:
        return "it is not installed (apt install wrk)"
    if system in SCRIPTS and find_spec(SCRIPTS[system][0]) is None:
        return f"{SCRIPTS[system][0]} is not installed"
    return None


def batchline_name(backend: Backend) -> str:
    """Return the name of batchline with this backend in the results."""
    return f"batchline, {backend.name}"


def run_batchline(
    folder: Path,
    backend: Backend,
    upstream: Upstream,
    plan: Plan,
    *,
    lines: int,
    line_bytes: int = 0,
    **settings: object,
) -> Run:
    """Measure a round trip through a new service, after a small one to warm it up."""
    with running_batchline(backend.storage(folder / "data"), backend, upstream.url, **settings) as service:
        warm_up(service, upstream, folder, plan)
        return run_round_trip(service, upstream, folder, plan, lines=lines, line_bytes=line_bytes)


def warm_up(service: Batchline, upstream: Upstream, folder: Path, plan: Plan) -> None:
    """Make a small round trip at the latency to come: batchline learns how many requests may be in flight."""
    upstream.follow(Plan(latency_ms=plan.latency_ms))
    trip = RoundTrip(service, upstream, folder, lines=_WARM_UP_LINES)
    trip.run()
    trip.check()


def run_round_trip(
    service: Batchline, upstream: Upstream, folder: Path, plan: Plan, *, lines: int, line_bytes: int = 0
) -> Run:
    """Measure a round trip through a running service."""
    trip = RoundTrip(service, upstream, folder, lines=lines, line_bytes=line_bytes)
    upstream.follow(plan)
    with metering(*service.backend.pids) as servers, metering(service.pid) as meter:
        times = trip.run()
        meter.stop_clock()
        sleep(_SECONDS_AFTER_DOWNLOAD)
    return Run(
        system=batchline_name(service.backend),
        plan=plan,
        lines=lines,
        seconds=times.seconds,
        cpu_seconds=meter.cpu_seconds,
        machine_cores=meter.machine_cores,
        peak=meter.peak,
        servers_cpu_seconds=servers.cpu_seconds,
        servers_peak=servers.peak,
        seen=upstream.seen(),
        outcome=trip.check(),
        times=times,
    )


def run_script(name: str, folder: Path, upstream: Upstream, plan: Plan, *, lines: int) -> Run:
    """Measure a script from its first request to its last answer, without its start and imports."""
    source, output, errors = (folder / f"{part}.jsonl" for part in ("input", "output", "errors"))
    write_input(source, range(lines))
    upstream.follow(plan)
    with _started_script(f"bench.scripts.{SCRIPTS[name][1]}", upstream.url, source, output, errors) as script:
        _expect(script, "ready\n")
        with metering(script.pid) as meter:
            _send(script, "go\n")
            _expect(script, "done\n")
        seen = upstream.seen()
        script.communicate()
    return Run(
        system=name,
        plan=plan,
        lines=lines,
        seconds=meter.seconds,
        cpu_seconds=meter.cpu_seconds,
        machine_cores=meter.machine_cores,
        peak=meter.peak,
        seen=seen,
        outcome=check_results(output, errors, range(lines)),
    )


def run_wrk(upstream: Upstream, plan: Plan, *, seconds: int) -> Run:
    """Measure wrk; its lines are the answers that the upstream gave."""
    upstream.follow(plan)
    options = ["-t1", f"-c{CONCURRENCY}", f"-d{seconds}s", "-s", str(_WRK_SCRIPT), upstream.url]
    body = {"BENCH_BODY": json.dumps(request_body(0)).replace("[line 0]", "")}
    process = subprocess.Popen([WRK, *options], stdout=subprocess.DEVNULL, env=os.environ | body)
    try:
        with metering(process.pid) as meter:
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()
    if process.returncode:
        raise WrongResults(f"wrk ended with {process.returncode}")
    seen = upstream.seen()
    return Run(
        system=WRK,
        plan=plan,
        lines=seen.answered,
        seconds=meter.seconds,
        cpu_seconds=used.ru_utime + used.ru_stime,
        machine_cores=meter.machine_cores,
        peak=meter.peak,
        seen=seen,
    )


@contextmanager
def _started_script(module: str, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _send(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


def _expect(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdout is not None
    printed = process.stdout.readline()
    if printed != line:
        raise WrongResults(f"a script printed {printed!r} and not {line!r}")
