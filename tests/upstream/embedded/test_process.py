"""The embedded model's process (F2): when it starts, and what happens to calls when it dies or cannot start."""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.ports import Clock
from batchline.system import SystemClock, SystemRandom
from batchline.upstream.embedded.download import ModelUnavailable, find_weights
from batchline.upstream.embedded.process import check_engine
from batchline.upstream.embedded.upstream import EmbeddedUpstream
from tests.support.raw_server import ManualClock
from tests.support.service import wait_until

CHAT = "/v1/chat/completions"
# Without a message of the system, the model's template would add a long one of its own.
MESSAGES = b'[{"role":"system","content":"A"},{"role":"user","content":"Hi"}]'
HI = b'{"model":"m","messages":' + MESSAGES + b',"max_tokens":1}'
LONG = b'{"model":"m","messages":' + MESSAGES + b',"max_tokens":1500,"ignore_eos":true}'
CANNOT_START = "the embedded model cannot be started; the log of the service says why"
pytestmark = pytest.mark.anyio
WEIGHTS = find_weights(cache=Path()) or Path("make setup installs it")


@asynccontextmanager
async def opened(weights: Path = WEIGHTS, clock: Clock | None = None) -> AsyncIterator[EmbeddedUpstream]:
    upstream = EmbeddedUpstream(
        weights=weights,
        names=("m",),
        slots=2,
        connect_timeout=10,
        request_timeout=120,
        max_answer_bytes=2**24,
        clock=clock or SystemClock(),
        random=SystemRandom(),
    )
    try:
        yield upstream
    finally:
        await upstream.close()


def model_pids() -> set[int]:
    """Return the pids of models that are children of this process."""
    return {child.pid for child in psutil.Process().children() if _is_model(child)}


def _is_model(process: Any) -> bool:
    try:
        return any("embedded.child" in argument for argument in process.cmdline())
    except psutil.Error:
        return False


@pytest.fixture
def pids() -> "OwnModels":
    return OwnModels(model_pids())


class OwnModels:
    """Separates the models that this test starts from those that other tests keep running in this process."""

    def __init__(self, known: set[int]) -> None:
        self._known = known

    def own(self) -> list[int]:
        return sorted(model_pids() - self._known)


def is_answer(reply: Reply) -> bool:
    return isinstance(reply, Answer) and reply.status == 200


async def test_callers_at_once_start_one_process_and_closing_leaves_none(
    pids: OwnModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F2: no process before the first call; calls after the end are refused. The process inherits no keys."""
    monkeypatch.setenv("BATCHLINE_ADMIN_TOKEN", "not for it")
    async with opened() as upstream:
        assert pids.own() == []
        replies = await asyncio.gather(*(upstream.post(CHAT, HI) for _ in range(6)))
        assert all(is_answer(reply) for reply in replies)
        (pid,) = pids.own()
        assert "BATCHLINE_ADMIN_TOKEN" not in psutil.Process(pid).environ()
    assert pids.own() == []
    assert await upstream.post(CHAT, HI) == Fault(kind=FaultKind.REFUSED, detail="the embedded model was ended")
    assert pids.own() == []


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        # The port was being closed.
        return False
    return False


def kill(pid: int) -> None:
    """Kill it and wait until nothing listens on its port, some moments after its connections ended."""
    port = next(each.laddr.port for each in psutil.Process(pid).net_connections() if each.status == psutil.CONN_LISTEN)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_refused(port), what="its end")


async def all_closed(upstream: EmbeddedUpstream) -> None:
    """Wait until the connections are known to have ended."""
    server = upstream._server
    assert server is not None
    await asyncio.gather(*(connection.closed for connection in list(server._open)))


async def test_a_killed_process_is_replaced(pids: OwnModels, caplog: pytest.LogCaptureFixture) -> None:
    """D3, D5: a call that waits for its answer gets a fault; the next call is answered."""
    async with opened() as upstream:
        await upstream.post(CHAT, HI)
        (first,) = pids.own()
        waiting = asyncio.create_task(upstream.post(CHAT, LONG))
        await upstream.post(CHAT, HI)
        kill(first)
        await all_closed(upstream)
        reply = await waiting
        assert isinstance(reply, Fault)
        assert reply.kind is FaultKind.BROKEN
        assert is_answer(await upstream.post(CHAT, HI))
        (second,) = pids.own()
        assert second != first
        kill(second)
        await all_closed(upstream)
        async with upstream.stream(CHAT, HI.replace(b"]", b'],"stream":true')) as stream:
            assert not isinstance(stream, Reply)
    assert [record.getMessage() for record in caplog.records].count(
        "the embedded model died, the next request starts it again"
    ) == 2


async def test_a_process_whose_end_is_not_known_yet_is_replaced_too(pids: OwnModels) -> None:
    """D3: the connection is refused and nothing was sent, so the caller sees no error."""
    async with opened() as upstream:
        await upstream.post(CHAT, HI)
        assert upstream._server is not None
        await upstream._server.close()
        (pid,) = pids.own()
        # The loop stands still meanwhile.
        kill(pid)
        assert is_answer(await upstream.post(CHAT, HI))


async def being_started(upstream: EmbeddedUpstream, caller: "asyncio.Task[Reply]") -> None:
    while upstream._process is None and not caller.done():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_a_cancelled_caller_does_not_end_the_start(pids: OwnModels) -> None:
    """F2: the next caller gets the process that was being started."""
    async with opened() as upstream:
        cancelled = asyncio.create_task(upstream.post(CHAT, HI))
        await being_started(upstream, cancelled)
        (pid,) = pids.own()
        cancelled.cancel()
        assert is_answer(await upstream.post(CHAT, HI))
        assert pids.own() == [pid]


@pytest.mark.parametrize("begun", [False, True], ids=["before there is a process", "while it loads"])
async def test_closing_does_not_wait_for_a_start(pids: OwnModels, begun: bool) -> None:
    """F5: the service is stopped while the model is being started."""
    async with opened() as upstream:
        caller = asyncio.create_task(upstream.post(CHAT, HI))
        await asyncio.sleep(0)
        if begun:
            await being_started(upstream, caller)
        await upstream.close()
        assert isinstance(await caller, Fault)
        assert pids.own() == []


async def test_a_damaged_file_is_logged_once_and_tried_again_later(
    tmp_path: Path, pids: OwnModels, caplog: pytest.LogCaptureFixture
) -> None:
    """F2: after 1 s, then 2; once the file is right, calls succeed."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF, but not really")
    clock = ManualClock()
    async with opened(path, clock) as upstream:
        for wait in (0, 1, 2):
            clock.seconds += wait
            refused = await upstream.post(CHAT, HI)
            assert isinstance(refused, Fault)
            assert refused.kind is FaultKind.REFUSED
            assert refused.detail == CANNOT_START
        path.unlink()
        path.symlink_to(WEIGHTS)
        clock.seconds += 3.9
        assert await upstream.post(CHAT, HI) == refused
        clock.seconds += 0.1
        assert is_answer(await upstream.post(CHAT, HI))
    (reason,) = logged_reasons(caplog)
    assert reason.endswith("model.gguf cannot be loaded. If it is damaged, remove it and start again.")
    assert pids.own() == []


def logged_reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [vars(record)["reason"] for record in caplog.records if record.levelno == logging.ERROR]


@contextmanager
def instead_of_python(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Iterator[None]:
    """Run this shell script in place of the child, to behave as it does on other machines."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(program))
        yield


NO_GOMP = json.dumps({"problem": "engine", "detail": "libgomp.so.1: cannot open shared object file"})
BROKEN = json.dumps({"problem": "engine", "detail": "No module named xllamacpp"})
never_works = pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kill -ILL $$", "This CPU lacks the instructions that the embedded model's engine needs (AVX2 on x86)"),
        ("kill -KILL $$", "most likely because memory ran out"),
        (f"echo '{NO_GOMP}'; exit 1", "Install its package libgomp1"),
        (f"echo '{BROKEN}'; exit 1", "engine cannot be loaded: No module named xllamacpp"),
        ("exit 3", "ended with code 3"),
        ("echo garbage; exit 4", "ended with code 4"),
    ],
)


@never_works
async def test_the_log_says_why_it_cannot_start_and_a_refusal_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: str, words: str
) -> None:
    """F2: the log names the cause and the remedy. A refusal reaches clients, and the cause may name a file."""
    with instead_of_python(tmp_path, monkeypatch, script):
        async with opened() as upstream:
            refused = await upstream.post(CHAT, HI)
    assert isinstance(refused, Fault)
    assert refused.kind is FaultKind.REFUSED
    assert refused.detail == CANNOT_START
    (reason,) = logged_reasons(caplog)
    assert words in reason


@never_works
async def test_an_engine_that_cannot_work_is_found_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    """F2: before any request is accepted."""
    with instead_of_python(tmp_path, monkeypatch, script), pytest.raises(ModelUnavailable) as caught:
        await check_engine()
    assert words in str(caught.value)


async def test_the_engine_of_this_machine_works() -> None:
    await check_engine()


async def test_an_x86_without_avx2_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F2: the engine's wheels would die of an illegal instruction."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags : fpu sse4_2 avx avx2x\n")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.raises(ModelUnavailable, match="AVX2"):
        await check_engine(cpuinfo)


class LeapingClock(ManualClock):
    """Every reading is two and a half minutes after the one before."""

    def steady(self) -> float:
        self.seconds += 150
        return self.seconds


async def test_a_process_that_never_serves_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """F2: callers wait for two minutes at most, and the process is ended."""
    pid_file = tmp_path / "pid"
    with instead_of_python(tmp_path, monkeypatch, f"echo $$ > {pid_file}; exec sleep 1000"):
        async with opened(clock=LeapingClock()) as upstream:
            refused = await upstream.post(CHAT, HI)
    assert refused == Fault(kind=FaultKind.REFUSED, detail=CANNOT_START)
    assert logged_reasons(caplog) == ["The embedded model did not start within 120 s"]
    assert not pid_file.exists() or not psutil.pid_exists(int(pid_file.read_text() or "0"))
