"""The embedded model's process as its parent sees it: start it, hear where it listens, know why it ended, end it."""

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
_LAST_WORD_SECONDS = 5.0
_CPUINFO = Path("/proc/cpuinfo")
_ELSEWHERE = "or set BATCHLINE_UPSTREAM_URL to an OpenAI-style server."
_NO_AVX2 = (
    "This CPU lacks the instructions that the embedded model's engine needs (AVX2 on x86). "
    "Run it on another machine, " + _ELSEWHERE
)
_NO_GOMP = (
    "The embedded model's engine needs a library of the system's. Install its package libgomp1 (libgomp on Fedora and "
    "Alpine), " + _ELSEWHERE
)


class ModelProcess:
    """One life of the model."""

    def __init__(self, process: Process, *, weights: Path, deadline: float) -> None:
        self._process = process
        self._weights = weights
        self._deadline = deadline

    @classmethod
    async def start(cls, *, weights: Path, secret: str, slots: int, clock: Clock) -> "ModelProcess":
        """Raises OSError."""
        process = await _spawn(stdin=PIPE)
        # Neither in its arguments nor in its environment, which others on the machine may read.
        order = encode({"weights": str(weights), "secret": secret, "slots": slots})
        cast(asyncio.StreamWriter, process.stdin).write(order + b"\n")
        return cls(process, weights=weights, deadline=clock.steady() + _START_SECONDS)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._process.returncode is None

    @property
    def code(self) -> int | None:
        """As of subprocess: None while it lives, negative when a signal ended it."""
        return self._process.returncode

    async def url(self, *, clock: Clock) -> str:
        """Wait until it serves. Raises ModelUnavailable when it ended instead, or takes too long."""
        try:
            async with asyncio.timeout(self._deadline - clock.steady()):
                told = await _listen(self._process)
        except TimeoutError:
            await self._kill()
            raise ModelUnavailable(f"The embedded model did not start within {_START_SECONDS:g} s") from None
        if told.url is None:
            await self.end()
            raise ModelUnavailable(_explain(told, self._process.returncode, self._weights))
        return told.url

    async def ended(self, *, within: float) -> bool:
        try:
            async with asyncio.timeout(within):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    async def end(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        if not await self.ended(within=_LAST_WORD_SECONDS):
            await self._kill()

    async def _kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


async def check_engine() -> None:
    """Find what will never work before anybody asks for an answer. Raises ModelUnavailable."""
    if sys.platform == "linux" and platform.machine() == "x86_64" and not _has_avx2(_CPUINFO):
        raise ModelUnavailable(_NO_AVX2)
    process = await _spawn(stdin=DEVNULL)
    told = await _listen(process)
    if await process.wait() != 0:
        raise ModelUnavailable(_explain(told, process.returncode, Path()))


class _Told(Struct):
    url: str | None = None
    problem: str | None = None
    detail: str = ""


_told = Decoder(_Told)


async def _spawn(*, stdin: int) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        # Without -P, a file in the current folder could stand in for a module.
        *("-P", "-m", "batchline.upstream.embedded.child"),
        stdin=stdin,
        stdout=PIPE,
        stderr=DEVNULL,
        env={name: value for name, value in os.environ.items() if not name.startswith("BATCHLINE_")},
    )


async def _listen(process: Process) -> _Told:
    line = await cast(asyncio.StreamReader, process.stdout).readline()
    try:
        return _told.decode(line)
    except DecodeError:
        await process.wait()
        return _Told()


def _explain(told: _Told, code: int | None, weights: Path) -> str:
    """Why it ended before it served, and what to do."""
    if told.problem == "engine":
        return _NO_GOMP if "libgomp" in told.detail else f"The embedded model's engine cannot be loaded: {told.detail}"
    if told.problem == "weights":
        return f"The embedded model's file {weights} cannot be loaded. If it is damaged, remove it and start again."
    if code == -signal.SIGILL:
        return _NO_AVX2
    if code == -signal.SIGKILL:
        return "The embedded model was killed, most likely for want of memory: it needs about 500 MB, " + _ELSEWHERE
    return f"The embedded model ended with code {code} before it served anything"


def _has_avx2(cpuinfo: Path) -> bool:
    try:
        return "avx2" in cpuinfo.read_text(errors="replace").split()
    except OSError:
        return True
