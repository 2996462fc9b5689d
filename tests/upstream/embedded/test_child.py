"""The embedded model and its parent (F2, F5): it ends with the parent, not before, and its log reaches nothing."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from batchline.upstream.embedded.download import find_weights
from tests.support.service import wait_until

CHAT = "/v1/chat/completions"
HI = b'{"model":"m","messages":[{"role":"user","content":"Hi"}],"max_tokens":1}'
BAD = b'{"model":"m","messages":[{"role":"user","content":"Hi"}],"tools":["PRIVATE WORDS"]}'
WEIGHTS = find_weights(cache=Path()) or Path("make setup installs it")

_PARENT = f"""
import asyncio, signal, sys
from pathlib import Path
from batchline.system import SystemClock, SystemRandom
from batchline.upstream.embedded.upstream import EmbeddedUpstream

# Handled, not ignored: that would be inherited.
signal.signal(signal.SIGINT, lambda *_: None)
signal.signal(signal.SIGTERM, lambda *_: None)

async def main():
    upstream = EmbeddedUpstream(
        weights=Path({str(WEIGHTS)!r}), names="m", slots=2, connect_timeout=10, request_timeout=120,
        max_answer_bytes=2**24, clock=SystemClock(), random=SystemRandom(),
    )
    while True:
        await upstream.post({CHAT!r}, {BAD!r})
        reply = await upstream.post({CHAT!r}, {HI!r})
        print(reply.status, upstream._process.pid, flush=True)
        if not sys.stdin.readline():
            return await upstream.close()

asyncio.run(main())
"""


class Parent:
    """A process with a model, which answers once for each line it is sent."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PARENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.model = psutil.Process(self.answer())

    def answer(self) -> int:
        assert self.process.stdout is not None
        status, pid = self.process.stdout.readline().split()
        assert status == "200"
        return int(pid)

    def ask(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write("again\n")
        self.process.stdin.flush()
        return self.answer()


@contextmanager
def running_parent() -> Iterator[Parent]:
    parent = Parent()
    try:
        yield parent
    finally:
        parent.process.kill()
        parent.process.communicate()


def has_ended(process: Any) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_it_ends_with_its_parent_even_after_sigkill() -> None:
    """F2: SIGKILL leaves the parent no time to end it."""
    with running_parent() as parent:
        assert not has_ended(parent.model)
        parent.process.send_signal(signal.SIGKILL)
        wait_until(lambda: has_ended(parent.model), what="the model's end")


def test_it_ignores_signals_to_the_whole_group() -> None:
    """F5: after Ctrl-C, or a supervisor's SIGTERM to the group, lines in flight may still finish.

    Nothing that the engine logs comes out of the parent.
    """
    with running_parent() as parent:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.killpg(parent.process.pid, number)
            assert parent.ask() == parent.model.pid
        _, written = parent.process.communicate()
        assert parent.process.returncode == 0
        assert has_ended(parent.model)
    assert written == ""
