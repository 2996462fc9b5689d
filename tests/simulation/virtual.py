"""Virtual time: event loops that run one callback per step and never wait."""

import asyncio
import random
from asyncio import events
from collections import deque
from collections.abc import Callable
from contextvars import Context
from heapq import heappop
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, Unpack

from batchline.domain.limits import InputLimits
from batchline.domain.records import NewShard
from batchline.pipeline.rows.requests import write_requests
from batchline.pipeline.survey import digests_in_file, survey_file
from batchline.pipeline.validate import validate_file
from batchline.ports import ClockState, Survey, TableForm, TableVerdict, Verdict

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
EPOCH = 1_750_000_000.0


class Time:
    """The time that all loops of a world share."""

    def __init__(self) -> None:
        self.now = 0.0


class _Timer(asyncio.TimerHandle):
    """A timer without ``when``: with uvloop, the handle of a timer that is nearly due has none."""

    __slots__ = ()

    def when(self) -> float:
        raise AttributeError("when")


class Loop(asyncio.SelectorEventLoop):
    """Runs one callback per step. The world decides which loop is next and when time goes on."""

    _ready: deque[Any]
    _scheduled: list[Any]

    def __init__(self, time: Time) -> None:
        self._virtual = time
        self.discarded = False
        super().__init__()

    def time(self) -> float:
        return self._virtual.now

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = super().call_at(when, callback, *args, context=context)
        timer.__class__ = _Timer
        return timer

    def next_due(self) -> float | None:
        """Return the time of the next callback, or None if there is none."""
        while self._scheduled and self._scheduled[0]._cancelled:
            heappop(self._scheduled)._scheduled = False
        if self._ready:
            return self._virtual.now
        return max(self._virtual.now, self._scheduled[0]._when) if self._scheduled else None

    def step(self) -> None:
        while self._scheduled and self._scheduled[0]._when <= self._virtual.now:
            handle = heappop(self._scheduled)
            handle._scheduled = False
            self._ready.append(handle)
        handle = self._ready.popleft()
        if not handle._cancelled:
            events._set_running_loop(self)
            try:
                handle._run()
            finally:
                events._set_running_loop(None)

    def call_exception_handler(self, context: dict[str, object]) -> None:
        if not self.discarded:
            raise RuntimeError(f"unhandled in a callback: {context}")


class VirtualClock:
    """The clock of a store that is right, or by so many seconds behind the latest time that it has seen."""

    state = ClockState()

    def __init__(self, time: Time) -> None:
        self._time = time
        self.seconds_behind = 0.0

    def now(self) -> float:
        return EPOCH + self._time.now

    def steady(self) -> float:
        return self._time.now

    def due(self) -> float:
        return self.now() - self.seconds_behind

    async def check(self) -> ClockState:
        return self.state

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SeededRandom:
    def __init__(self, source: random.Random) -> None:
        self._source = source

    def bytes(self, count: int) -> bytes:
        return self._source.randbytes(count)

    def uniform(self, low: float, high: float) -> float:
        return self._source.uniform(low, high)


class InlineThreads:
    """Runs blocking calls with virtual time before and after each, so that a kill can happen on either side."""

    def __init__(self, source: random.Random, *, longest: float) -> None:
        self._source, self._longest = source, longest

    async def run(self, call: Callable[[], T]) -> T:
        await asyncio.sleep(self._source.uniform(0, self._longest))
        try:
            return call()
        finally:
            await asyncio.sleep(self._source.uniform(0, self._longest))


class InlineValidator:
    def __init__(self, threads: InlineThreads) -> None:
        self._threads = threads

    async def validate(
        self, *, project_id: str, source: Path, work: Path, endpoint: str, limits: InputLimits
    ) -> Verdict:
        return await self._threads.run(
            lambda: validate_file(source=source, work=work, endpoint=endpoint, limits=limits)
        )

    async def survey(self, *, project_id: str, work: Path, shards: list[NewShard]) -> Survey:
        return await self._threads.run(lambda: survey_file(work, shards))

    async def write_requests(
        self, *, project_id: str, source: Path, target: Path, form: TableForm, max_rows: int
    ) -> TableVerdict:
        return await self._threads.run(lambda: write_requests(source, target, form, max_rows=max_rows))

    async def digests(
        self, *, project_id: str, work: Path, shards: list[NewShard], endpoint: str, sent_as: bytes | None
    ) -> bytes:
        return await self._threads.run(
            lambda: digests_in_file(work, shards, project_id=project_id, endpoint=endpoint, sent_as=sent_as)
        )
