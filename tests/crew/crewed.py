"""A service that starts its hand at once, so that no test has to keep a core busy to see one."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from serving import Mock, Service, await_end, chat_lines, running_service, submit

RESCUED = "took over from a dead process"

_SERVE = """
from batchline import engine
from batchline.app import crew, staffing
from batchline.cli import main

staffing._BUSY = staffing._ROOM = 0.0
staffing._BUSY_LOOKS = 1
crew._LOOK_SECONDS = 0.05
engine._FINISH_SECONDS = 3600
{more}
main(prog_name="batchline")
"""


@contextmanager
def running_crew(folder: Path, upstream_url: str, *, more: str = "", **settings: object) -> Iterator[Service]:
    """A hand joins as soon as a line is in flight, and stays. That a batch is over is found by nobody who is not told.
    ``more`` is a statement of the program that serves."""
    script = folder / "serve.py"
    script.write_text(_SERVE.format(more=more))
    with running_service(
        folder, upstream_url, command=(str(script), "serve"), **{"worker_processes": 2} | settings
    ) as service:
        yield service


def hands_of(service: Service) -> list[psutil.Process]:
    return [process for process in service.program.family() if _is_hand(process)]


def bring_in_hand(service: Service, mock: Mock, *, cap: int) -> psutil.Process:
    """By lines that take their time, more of them than one process takes, until both asked the upstream."""
    names = count()
    while not any(asks(hand, mock) for hand in hands_of(service)):
        lines = chat_lines(f"[[delay=0.1]] first {next(names)}" for _ in range(4 * cap))
        await_end(service.client(), submit(service.client(), lines).id)
    (hand,) = hands_of(service)
    return hand


def asks(process: psutil.Process, mock: Mock) -> bool:
    """Whether it has a connection to the upstream."""
    try:
        return any(there.raddr and there.raddr.port == mock.port for there in process.net_connections())
    except psutil.Error:
        return False


def _is_hand(process: psutil.Process) -> bool:
    try:
        return "batchline.app.hand" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
