"""Who is measured: batchline, the scripts that people write, and wrk, which only sends."""

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
from bench.services import Backend, Batchline, running_batchline
from bench.trip import Travelled, Trip
from bench.upstream import Plan, Seen, Upstream

AT_ONCE = 64
"""Requests in flight of whoever has no mind of its own about it."""
SCRIPTS = {"AsyncOpenAI script": ("openai", "openai_client"), "aiohttp script": ("aiohttp", "aiohttp_client")}
WRK = "wrk"

_WARM_UP_LINES = 250
_AFTERWARDS_SECONDS = 1.0
"""After the download, so that what a service puts off until then is in its cost."""
_ROOT = Path(__file__).parents[1]
_WRK_SCRIPT = Path(__file__).with_name("wrk.lua")


class Run(Struct, frozen=True, kw_only=True):
    """One contestant, once."""

    contestant: str
    plan: Plan
    lines: int
    seconds: float
    cpu_seconds: float
    """Of its processes, from the first byte sent to the last received, and of a service for a second more."""
    machine_cores: float
    peak: Peak
    servers_cpu_seconds: float = 0
    """Of the database and the bucket, where they are processes of their own."""
    servers_peak: Peak = Peak()
    seen: Seen
    outcome: Outcome | None = None
    travelled: Travelled | None = None

    @property
    def lines_per_second(self) -> float:
        return self.lines / self.seconds

    @property
    def cpu_us(self) -> float:
        """A line."""
        return self.cpu_seconds / self.lines * 1e6


def why_not(contestant: str) -> str | None:
    """What keeps a contestant from taking part here."""
    if contestant == WRK and shutil.which(WRK) is None:
        return "it is not installed (apt install wrk)"
    if contestant in SCRIPTS and find_spec(SCRIPTS[contestant][0]) is None:
        return f"{SCRIPTS[contestant][0]} is not installed"
    return None


def ours(backend: Backend) -> str:
    """batchline as a contestant."""
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
    """A whole trip through a new service that has just made a little one."""
    with running_batchline(backend.places(folder / "data"), backend, upstream.url, **settings) as service:
        warm_up(service, upstream, folder, plan)
        return travel(service, upstream, folder, plan, lines=lines, line_bytes=line_bytes)


def warm_up(service: Batchline, upstream: Upstream, folder: Path, plan: Plan) -> None:
    """A little trip, at the latency that is to come: batchline learns how many may be in flight."""
    upstream.follow(Plan(latency_ms=plan.latency_ms))
    trip = Trip(service, upstream, folder, lines=_WARM_UP_LINES)
    trip.run()
    trip.check()


def travel(service: Batchline, upstream: Upstream, folder: Path, plan: Plan, *, lines: int, line_bytes: int = 0) -> Run:
    trip = Trip(service, upstream, folder, lines=lines, line_bytes=line_bytes)
    upstream.follow(plan)
    with metering(*service.backend.pids) as servers, metering(service.pid) as meter:
        travelled = trip.run()
        meter.lap()
        sleep(_AFTERWARDS_SECONDS)
    return Run(
        contestant=ours(service.backend),
        plan=plan,
        lines=lines,
        seconds=travelled.seconds,
        cpu_seconds=meter.cpu_seconds,
        machine_cores=meter.machine_cores,
        peak=meter.peak,
        servers_cpu_seconds=servers.cpu_seconds,
        servers_peak=servers.peak,
        seen=upstream.seen(),
        outcome=trip.check(),
        travelled=travelled,
    )


def run_script(name: str, folder: Path, upstream: Upstream, plan: Plan, *, lines: int) -> Run:
    source, output, errors = (folder / f"{part}.jsonl" for part in ("input", "output", "errors"))
    write_input(source, range(lines))
    upstream.follow(plan)
    with _started(f"bench.scripts.{SCRIPTS[name][1]}", upstream.url, source, output, errors) as script:
        _expect(script, "ready\n")
        with metering(script.pid) as meter:
            _send(script, "go\n")
            _expect(script, "done\n")
        seen = upstream.seen()
        script.communicate()
    return Run(
        contestant=name,
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
    """Its lines are the answers that the upstream gave."""
    upstream.follow(plan)
    options = ["-t1", f"-c{AT_ONCE}", f"-d{seconds}s", "-s", str(_WRK_SCRIPT), upstream.url]
    body = {"BENCH_BODY": json.dumps(request_body(0)).replace("[line 0]", "")}
    sending = subprocess.Popen([WRK, *options], stdout=subprocess.DEVNULL, env=os.environ | body)
    try:
        with metering(sending.pid) as meter:
            _, status, used = os.wait4(sending.pid, 0)
            sending.returncode = os.waitstatus_to_exitcode(status)
    finally:
        if sending.returncode is None:
            sending.kill()
            sending.wait()
    if sending.returncode:
        raise WrongResults(f"wrk ended with {sending.returncode}")
    seen = upstream.seen()
    return Run(
        contestant=WRK,
        plan=plan,
        lines=seen.answered,
        seconds=meter.seconds,
        cpu_seconds=used.ru_utime + used.ru_stime,
        machine_cores=meter.machine_cores,
        peak=meter.peak,
        seen=seen,
    )


@contextmanager
def _started(module: str, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
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
    told = process.stdout.readline()
    if told != line:
        raise WrongResults(f"a script said {told!r} and not {line!r}")
