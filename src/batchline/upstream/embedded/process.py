"""Starts, watches and ends the embedded model's process, and explains why it could not start."""

import asyncio
import os
import platform
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from pathlib import Path
from typing import cast

from msgspec import DecodeError, Struct
from msgspec.json import Decoder, encode

from batchline.ports import Clock
from batchline.upstream.embedded.download import ModelUnavailable

_START_SECONDS = 120.0
_END_SECONDS = 5.0
_CPUINFO = Path("/proc/cpuinfo")
_USE_A_SERVER = "or set BATCHLINE_UPSTREAM_URL to an OpenAI-style server."
_NO_AVX2 = (
    "This CPU lacks the instructions that the embedded model's engine needs (AVX2 on x86). "
    "Run it on another machine, " + _USE_A_SERVER
)
_NO_GOMP = (
    "The embedded model's engine needs the system library libgomp. Install its package libgomp1 (libgomp on Fedora and "
    "Alpine), " + _USE_A_SERVER
)


class ModelProcess:
    """One process of the model, from its start to its end."""

    def __init__(self, process: Process, *, weights: Path, deadline: float) -> None:
        self._process = process
        self._weights = weights
        self._deadline = deadline

    @classmethod
    async def start(cls, *, weights: Path, secret: str, slots: int, clock: Clock) -> "ModelProcess":
        """Start a process. Raise OSError if the system cannot start one."""
        process = await _spawn(stdin=PIPE)
        # Not in the arguments nor in the environment, which other users of the machine may read.
        parameters = encode({"weights": str(weights), "secret": secret, "slots": slots})
        cast(asyncio.StreamWriter, process.stdin).write(parameters + b"\n")
        return cls(process, weights=weights, deadline=clock.steady() + _START_SECONDS)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.returncode is None

    @property
    def code(self) -> int | None:
        """The exit code as subprocess gives it: None while it runs, negative if a signal ended it."""
        return self._process.returncode

    async def url(self, *, clock: Clock) -> str:
        """Wait until it serves and return its URL. Raise ModelUnavailable if it ended, or takes too long."""
        try:
            async with asyncio.timeout(self._deadline - clock.steady()):
                report = await _read_report(self._process)
        except TimeoutError:
            await self._kill()
            raise ModelUnavailable(f"The embedded model did not start within {_START_SECONDS:g} s") from None
        if report.url is None:
            await self.end()
            raise ModelUnavailable(_explain(report, self._process.returncode, self._weights))
        return report.url

    async def wait(self, *, timeout: float) -> bool:
        """Wait for its end and return whether it ended within the timeout."""
        try:
            async with asyncio.timeout(timeout):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    async def end(self) -> None:
        """Ask it to end by closing its stdin, and kill it if it does not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        if not await self.wait(timeout=_END_SECONDS):
            await self._kill()

    async def _kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


async def check_engine(cpuinfo: Path = _CPUINFO) -> None:
    """Raise ModelUnavailable if the engine can never work on this machine, before any request is accepted."""
    if sys.platform == "linux" and platform.machine() == "x86_64" and not _has_avx2(cpuinfo):
        raise ModelUnavailable(_NO_AVX2)
    process = await _spawn(stdin=DEVNULL)
    report = await _read_report(process)
    if await process.wait() != 0:
        raise ModelUnavailable(_explain(report, process.returncode, Path()))


class _Report(Struct):
    """The line that the child writes to its stdout."""

    url: str | None = None
    problem: str | None = None
    detail: str = ""


_report = Decoder(_Report)


async def _spawn(*, stdin: int) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        # Without -P, Python would import a file in the current folder in place of a module of the same name.
        *("-P", "-m", "batchline.upstream.embedded.child"),
        stdin=stdin,
        stdout=PIPE,
        stderr=DEVNULL,
        env={name: value for name, value in os.environ.items() if not name.startswith("BATCHLINE_")},
    )


async def _read_report(process: Process) -> _Report:
    line = await cast(asyncio.StreamReader, process.stdout).readline()
    try:
        return _report.decode(line)
    except DecodeError:
        await process.wait()
        return _Report()


def _explain(report: _Report, code: int | None, weights: Path) -> str:
    """Return why it ended before it served, and what to do."""
    if report.problem == "engine":
        detail = report.detail
        return _NO_GOMP if "libgomp" in detail else f"The embedded model's engine cannot be loaded: {detail}"
    if report.problem == "weights":
        return f"The embedded model's file {weights} cannot be loaded. If it is damaged, remove it and start again."
    if code == -signal.SIGILL:
        return _NO_AVX2
    if code == -signal.SIGKILL:
        return (
            "The embedded model was killed, most likely because memory ran out: it needs about 500 MB. "
            "Free that much memory, " + _USE_A_SERVER
        )
    return f"The embedded model ended with code {code} before it served a request"


def _has_avx2(cpuinfo: Path) -> bool:
    try:
        return "avx2" in cpuinfo.read_text(errors="replace").split()
    except OSError:
        return True
