"""Runs the soak: ``python -m bench.soak --minutes 60 embedded postgres``. It fails if something is lost or grows."""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import mean, quantiles
from threading import Event, Thread
from time import monotonic

import psutil  # type: ignore[import-untyped]
from click.testing import CliRunner

from batchline.cli import main as main_command
from bench.services import BACKENDS, StorageSettings, running_backend
from bench.soak.tenants import Tally, Tenant, repeat
from tests.support.service import Mock, Service, await_end, chat_lines, running_mock, running_service, submit

_TENANTS = 10
_CAPACITY_LINES = 5_000
"""Lines of the batch by which the capacity of the machine is measured first."""
_LOAD_SHARE = 0.1
_SAMPLES = 30
_MIN_SAMPLES = 9
"""Fewer samples say nothing about growth from the second third of the run to the last one."""
_OUTAGE_SECONDS = 3.0
_JOIN_SECONDS = 600.0
"""The time that the clients have to end after the run: a batch may take 300 s, and so may an answer."""
_FLAP_SECONDS = 20.0
_UPSTREAM_LATENCY_SECONDS = 0.02
_MAX_GROWTH = 1.15
"""How much more memory the last third of the run may have on average than the second."""
_MAX_READ_SECONDS = 0.1
_MAX_LEFT_DESCRIPTORS = 12
"""Descriptors that the last third of the run may have in addition on average: pooled connections to the database, a
scratch file."""


class Sampler:
    """Samples memory and descriptors of the service's processes, connections to the upstream left out."""

    def __init__(self, service: Service, mock: Mock, tally: Tally) -> None:
        self._service, self._mock, self._tally = service, mock, tally
        self._began = monotonic()
        self.samples: list[tuple[float, float, int]] = []

    def sample(self) -> None:
        family = self._service.program.family()
        sizes = [self._size_of(process) for process in family]
        megabytes, descriptors = sum(size for size, _ in sizes) / 1e6, sum(opened for _, opened in sizes)
        minutes = (monotonic() - self._began) / 60
        self.samples.append((minutes, megabytes, descriptors))
        done = self._tally.done
        print(
            f"  {minutes:6.1f} min {megabytes:8.1f} MB {descriptors:5d} descriptors {len(family):3d} processes "
            f"{done['batches created']:6d} batches {done['lines accounted for']:8d} lines "
            f"{len(self._tally.faults)} faults",
            flush=True,
        )

    def cpu_seconds(self) -> tuple[float, float]:
        """Return how long the threads of the service ran, and how long they waited for a CPU that others used."""
        files = Path(f"/proc/{self._service.pid}/task").glob("*/schedstat")
        times = [list(map(int, file.read_text().split())) for file in files]
        return sum(ran for ran, *_ in times) / 1e9, sum(waited for _, waited, _ in times) / 1e9

    def _size_of(self, process: psutil.Process) -> tuple[int, int]:
        """Return the resident bytes and the descriptors of a process, or zeros if it has ended meanwhile."""
        try:
            return process.memory_info().rss, process.num_fds() - self._pooled(process)
        except psutil.NoSuchProcess:
            return 0, 0

    def _pooled(self, process: psutil.Process) -> int:
        """Return how many descriptors are connections to the upstream: a pool whose size follows the load."""
        return sum(
            bool(connection.raddr) and connection.raddr.port == self._mock.port
            for connection in process.net_connections("tcp")
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backends", nargs="*", default=[], help=f"some of: {', '.join(BACKENDS)}")
    parser.add_argument("--minutes", type=float, default=60, help="how long to run on each backend")
    options = parser.parse_args()
    problems = [found for name in options.backends or BACKENDS for found in _soak(name, minutes=options.minutes)]
    return 1 if problems else 0


def _soak(name: str, *, minutes: float) -> list[str]:
    with (
        tempfile.TemporaryDirectory() as folder,
        running_backend(name, Path(folder)) as backend,
        running_mock(delay=_UPSTREAM_LATENCY_SECONDS) as mock,
        running_service(Path(folder), mock.url, **_migrated(backend.storage(Path(folder)))) as service,
    ):
        capacity = _measure_capacity(service)
        print(f"{name}: {minutes:g} minutes at a tenth of {capacity:,.0f} lines/s, {_TENANTS} tenants", flush=True)
        tally = Tally()
        tenants = [
            Tenant(
                service,
                service.new_account(f"tenant-{number}"),
                tally,
                lines_per_second=capacity * _LOAD_SHARE / _TENANTS,
                seed=number,
            )
            for number in range(_TENANTS)
        ]
        sampler = Sampler(service, mock, tally)
        before = sampler.cpu_seconds()
        with _reading(service, tenants[0].credentials, tally):
            _run(tenants, mock, sampler, tally, seconds=60 * minutes)
        ran, waited = (after - former for former, after in zip(before, sampler.cpu_seconds(), strict=True))
        print(f"  the service ran for {ran:.0f} s and waited {waited:.0f} s for a CPU: delays include that wait")
        rate = tally.done["lines created"] / (60 * minutes)
        print(f"  the load was {rate:,.1f} lines/s; a tenth of the capacity is {capacity * _LOAD_SHARE:,.1f} lines/s")
        problems = _judge(tally, sampler.samples)
    _report(tally, problems)
    return problems


def _migrated(storage: StorageSettings) -> StorageSettings:
    """Create the tables, so that keys can be made before the service runs, and return what the nodes share."""
    shared = {name: value for name, value in storage.items() if name != "data_dir"}
    if "database_url" in shared:
        made = CliRunner().invoke(main_command, ["migrate", f"--database-url={shared['database_url']}"])
        assert made.exit_code == 0, made.output
    return shared


def _measure_capacity(service: Service) -> float:
    client = service.client()
    lines = chat_lines(f"capacity {n}" for n in range(_CAPACITY_LINES))
    began = monotonic()
    await_end(client, submit(client, lines).id)
    return _CAPACITY_LINES / (monotonic() - began)


@contextmanager
def _reading(service: Service, credentials: dict[str, str], tally: Tally) -> Iterator[None]:
    """Let another process read lists meanwhile, and tally what it measured."""
    with tempfile.TemporaryFile("w+") as written:
        reader = subprocess.Popen(
            [sys.executable, "-m", "bench.soak.reader"], stdin=subprocess.PIPE, stdout=written, text=True
        )
        assert reader.stdin is not None
        reader.stdin.write(json.dumps({"port": service.port, "credentials": credentials}) + "\n")
        reader.stdin.flush()
        try:
            yield
        finally:
            reader.stdin.close()
            if reader.wait() != 0:
                tally.note_fault(f"the reader ended with {reader.returncode}")
            written.seek(0)
            tally.note_reads(written.read().splitlines())


def _run(tenants: Sequence[Tenant], mock: Mock, sampler: Sampler, tally: Tally, *, seconds: float) -> None:
    stop, finished = Event(), Event()
    again = partial(repeat, stop=stop, tally=tally)
    extras = [
        partial(again, tenants[1].cut_upload, every=2.0),
        partial(again, partial(tenants[2].read_slowly, stop), every=2.0),
        partial(again, partial(tenants[3].upload_slowly, stop), every=2.0),
        partial(again, partial(tenants[4].leave_stream, stop), every=1.0),
        partial(again, partial(tenants[5].leave_results, stop), every=1.0),
        partial(again, partial(_flap, mock, stop, cycle(_OUTAGES)), every=_FLAP_SECONDS),
        partial(repeat, sampler.sample, every=max(2.0, seconds / _SAMPLES), stop=finished, tally=tally),
    ]
    threads = [Thread(target=tenant.run, args=(stop,), daemon=True) for tenant in tenants]
    threads += [Thread(target=extra, daemon=True) for extra in extras]
    sampler.sample()
    for thread in threads:
        thread.start()
    Event().wait(seconds)
    stop.set()
    deadline = monotonic() + _JOIN_SECONDS
    for thread in threads[:-1]:
        thread.join(max(0.0, deadline - monotonic()))
    if left := sum(thread.is_alive() for thread in threads[:-1]):
        tally.note_fault(f"{left} clients did not end within {_JOIN_SECONDS:.0f} s")
    # Idle connections and pooled descriptors are given back before the last sample.
    Event().wait(10)
    finished.set()
    threads[-1].join()
    sampler.sample()


_OUTAGES: tuple[dict[str, object] | None, ...] = (None, {"status": {"503": 100}}, {"drop": 50, "cut": 50})
"""The plans of the upstream during its outages, one after the other. With None it stands still, as if overloaded."""


def _flap(mock: Mock, stop: Event, outages: Iterator[dict[str, object] | None]) -> None:
    """Let the upstream fail for a few seconds: it stands still, refuses all requests, or resets its connections."""
    outage = next(outages)
    if outage is None:
        mock.program.send(signal.SIGSTOP)
    else:
        mock.follow(**outage)
    stop.wait(_OUTAGE_SECONDS)
    if outage is None:
        mock.program.send(signal.SIGCONT)
    else:
        mock.follow(delay=_UPSTREAM_LATENCY_SECONDS)


def _judge(tally: Tally, samples: Sequence[tuple[float, float, int]]) -> list[str]:
    """Return what is wrong."""
    problems = list(tally.faults)
    problems += _growth(samples)
    if not tally.read_seconds:
        problems.append("nothing was read")
    if (slowest := _p99(tally)) > _MAX_READ_SECONDS:
        problems.append(f"reads take {1000 * slowest:.0f} ms at the 99th percentile")
    if tally.done["lines created"] != tally.done["lines accounted for"]:
        problems.append(f"{tally.done['lines created']} lines, {tally.done['lines accounted for']} accounted for")
    return problems


def _growth(samples: Sequence[tuple[float, float, int]]) -> list[str]:
    """Return what grew from the second third of the run to the last one."""
    if len(samples) < _MIN_SAMPLES:
        return [f"too few samples to see growth: {len(samples)} of {_MIN_SAMPLES}"]
    third, problems = len(samples) // 3, []
    second, last = samples[third : 2 * third], samples[-third:]
    former, latter = (mean(megabytes for _, megabytes, _ in part) for part in (second, last))
    if latter > _MAX_GROWTH * former:
        problems.append(f"memory grew from {former:.0f} to {latter:.0f} MB")
    opened, left = (mean(descriptors for _, _, descriptors in part) for part in (second, last))
    if left > opened + _MAX_LEFT_DESCRIPTORS:
        problems.append(f"descriptors grew from {opened:.0f} to {left:.0f}")
    return problems


def _p99(tally: Tally) -> float:
    return quantiles(tally.read_seconds, n=100)[98] if len(tally.read_seconds) > 1 else 0.0


def _report(tally: Tally, problems: Sequence[str]) -> None:
    for what, times in sorted(tally.done.items()):
        print(f"  {what}: {times:,}")
    longest = max(tally.read_seconds, default=0.0)
    print(f"  reads: {len(tally.read_seconds):,}, p99 {1000 * _p99(tally):.1f} ms, longest {1000 * longest:.0f} ms")
    print(f"  {'nothing is wrong' if not problems else f'{len(problems)} problems:'}")
    for problem in problems[:20]:
        print(f"    {problem}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
