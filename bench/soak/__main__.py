"""Runs the soak: ``python -m bench.soak --minutes 60 embedded postgres``. It fails if something is lost or grows."""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
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
_FLAP_SECONDS = 20.0
_UPSTREAM_LATENCY_SECONDS = 0.02
_MAX_GROWTH = 1.15
"""How much more memory the last third of the run may have on average than the second."""
_MAX_READ_SECONDS = 0.1
_MAX_LEFT_DESCRIPTORS = 12
"""Descriptors that may be open in addition after the end: pooled connections to the database, a scratch file."""


class Sampler:
    """Samples memory and descriptors of the service's processes, connections to the upstream left out."""

    def __init__(self, service: Service, mock: Mock, tally: Tally) -> None:
        self._service, self._mock, self._tally = service, mock, tally
        self._began = monotonic()
        self.samples: list[tuple[float, float, int]] = []

    def sample(self) -> None:
        family = self._service.program.family()
        megabytes = sum(process.memory_info().rss for process in family) / 1e6
        descriptors = sum(process.num_fds() - self._pooled(process) for process in family)
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
        _run(tenants, mock, sampler, tally, seconds=60 * minutes)
        ran, waited = (after - former for former, after in zip(before, sampler.cpu_seconds(), strict=True))
        print(f"  the service ran for {ran:.0f} s and waited {waited:.0f} s for a CPU: delays include that wait")
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


def _run(tenants: Sequence[Tenant], mock: Mock, sampler: Sampler, tally: Tally, *, seconds: float) -> None:
    stop, finished = Event(), Event()
    again = partial(repeat, stop=stop, tally=tally)
    extras = [
        partial(again, tenants[0].read, every=0.1),
        partial(again, tenants[1].cut_upload, every=2.0),
        partial(again, partial(tenants[2].read_slowly, stop), every=2.0),
        partial(again, partial(_flap, mock, stop), every=_FLAP_SECONDS),
        partial(repeat, sampler.sample, every=max(2.0, seconds / _SAMPLES), stop=finished, tally=tally),
    ]
    threads = [Thread(target=tenant.run, args=(stop,)) for tenant in tenants]
    threads += [Thread(target=extra) for extra in extras]
    sampler.sample()
    for thread in threads:
        thread.start()
    Event().wait(seconds)
    stop.set()
    for thread in threads[:-1]:
        thread.join()
    # Idle connections and pooled descriptors are given back before the last sample.
    Event().wait(10)
    finished.set()
    threads[-1].join()
    sampler.sample()


def _flap(mock: Mock, stop: Event) -> None:
    """Let the upstream stand still for a few seconds, as one that is overloaded does."""
    mock.program.send(signal.SIGSTOP)
    stop.wait(3)
    mock.program.send(signal.SIGCONT)


def _judge(tally: Tally, samples: Sequence[tuple[float, float, int]]) -> list[str]:
    """Return what is wrong."""
    problems = list(tally.faults)
    memory = [megabytes for _, megabytes, _ in samples]
    third = len(memory) // 3
    if third and mean(memory[-third:]) > _MAX_GROWTH * mean(memory[third : 2 * third]):
        problems.append(f"memory grew from {mean(memory[third : 2 * third]):.0f} to {mean(memory[-third:]):.0f} MB")
    if samples[-1][2] > samples[0][2] + _MAX_LEFT_DESCRIPTORS:
        problems.append(f"descriptors grew from {samples[0][2]} to {samples[-1][2]}")
    if (slowest := _p99(tally)) > _MAX_READ_SECONDS:
        problems.append(f"reads take {1000 * slowest:.0f} ms at the 99th percentile")
    if tally.done["lines created"] != tally.done["lines accounted for"]:
        problems.append(f"{tally.done['lines created']} lines, {tally.done['lines accounted for']} accounted for")
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
