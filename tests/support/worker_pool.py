"""Runs a service that starts its worker process at once, so that no test has to keep a core busy for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.support.service import Mock, Service, await_end, chat_lines, running_service, submit

RESCUED = "took over from a dead process"

_SERVE = """
from functools import partial

from batchline import app
from batchline.app.workers.autoscaler import Autoscaler
from batchline.cli import main
from batchline.engine import Intervals

app.serve = partial(
    app.serve,
    intervals=Intervals(finalize_seconds=3600),
    autoscaler=Autoscaler(max_processes=2, busy_cpu_share=0, busy_checks=1, spare_cpu_share={spare}, idle_seconds=1.5),
    pool_check_seconds=0.05,
)
{more}
main(prog_name="batchline")
"""


@contextmanager
def running_pool(
    folder: Path, upstream_url: str, *, spare: float = 0.0, more: str = "", **settings: object
) -> Iterator[Service]:
    """Run a service whose second process joins as soon as a line is in flight, and stays unless there is CPU to spare.

    Batches are finalized only when a worker reports that it holds no shard of one any more. ``more`` is a statement of
    the program.
    """
    script = folder / "serve.py"
    script.write_text(_SERVE.format(spare=spare, more=more))
    with running_service(
        folder, upstream_url, command=(str(script), "serve"), **{"worker_processes": 2} | settings
    ) as service:
        yield service


def worker_processes_of(service: Service) -> list[psutil.Process]:
    return [process for process in service.program.family() if _is_worker_process(process)]


def start_worker_process(service: Service, mock: Mock, *, cap: int) -> psutil.Process:
    """Run slow lines, more than one process takes, until the second process asks the upstream; return that process."""
    names = count()
    while not any(is_connected_to(child, mock) for child in worker_processes_of(service)):
        lines = chat_lines(f"[[delay=0.1]] first {next(names)}" for _ in range(4 * cap))
        await_end(service.client(), submit(service.client(), lines).id)
    (child,) = worker_processes_of(service)
    return child


def is_connected_to(process: psutil.Process, mock: Mock) -> bool:
    """Return whether the process has a connection to the upstream."""
    try:
        return any(peer.raddr and peer.raddr.port == mock.port for peer in process.net_connections())
    except psutil.Error:
        return False


def _is_worker_process(process: psutil.Process) -> bool:
    try:
        return "batchline.app.workers.child" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
