"""The hands of `batchline serve`: processes that run lines beside it while one core is not enough for them."""

import asyncio
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import cast

from msgspec import DecodeError

from batchline.app.messages import (
    Allowed,
    Beat,
    Begin,
    FromHand,
    ShardDone,
    Stop,
    ToHand,
    packed,
    read_from_hand,
    told_settings,
)
from batchline.app.roster import Roster
from batchline.app.staffing import Meter, Staffing
from batchline.engine import Works
from batchline.ports import Clock, Random
from batchline.settings import Settings
from batchline.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_LAST_WORD_SECONDS = 5.0


def most_processes(settings: Settings) -> int:
    """How many may run lines here. On PostgreSQL one starts workers; and what answers on this machine needs its cores
    itself."""
    if settings.database_url is not None or settings.embeds_model or settings.classifies:
        return 1
    return settings.worker_processes or os.cpu_count() or 1


class Crew:
    def __init__(
        self,
        *,
        settings: Settings,
        works: Works,
        roster: Roster,
        staffing: Staffing,
        metrics: Metrics,
        clock: Clock,
        random: Random,
    ) -> None:
        self._settings, self._works, self._roster, self._staffing = settings, works, roster, staffing
        self._metrics, self._clock, self._random = metrics, clock, random
        self._meter = Meter(clock)
        self._hands: list[_Hand] = []
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Until ``stop``, and then until every hand has ended."""
        async with asyncio.TaskGroup() as group:
            while not await self._stopped_within(_LOOK_SECONDS):
                await self._look(group)
            for hand in self._hands:
                self._dismiss(hand)

    def stop(self) -> None:
        self._stopping.set()

    async def _stopped_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()

    async def _look(self, group: asyncio.TaskGroup) -> None:
        busy = [self._meter.read(), *(hand.busy for hand in self._hands)]
        if any(hand.leaves for hand in self._hands):
            return
        stations = self._works.worker.report().stations.values()
        runs_lines = any(station.in_flight for station in stations)
        change = self._staffing.look(busy, runs_lines=runs_lines, at=self._clock.steady())
        if change > 0:
            await self._hire(group)
        elif change < 0:
            self._dismiss(self._hands[-1])

    async def _hire(self, group: asyncio.TaskGroup) -> None:
        owner = self._random.bytes(8).hex()
        # Before it can claim anything, so that nobody takes it for a dead one.
        self._roster.join(owner)
        try:
            hand = _Hand(owner, await _spawn())
        except OSError as error:
            log.warning("no further process can be started", extra={"reason": str(error)})
            await self._roster.leave(owner)
            return
        hand.say(Begin(owner=owner, settings=told_settings(self._settings)))
        self._hands.append(hand)
        group.create_task(self._attend(hand))
        log.info("a further process runs lines", extra={"pid": hand.pid, "processes": 1 + len(self._hands)})

    def _dismiss(self, hand: "_Hand") -> None:
        """It has the time that this process would have for what is in flight, and for recording it."""
        if not hand.leaves:
            hand.leave(within=2 * self._settings.shutdown_grace_seconds + 2 * _LAST_WORD_SECONDS)

    async def _attend(self, hand: "_Hand") -> None:
        try:
            while True:
                await self._heed(hand, await hand.hear())
        except asyncio.IncompleteReadError:
            pass
        except DecodeError as error:
            log.exception("a further process is not understood", extra={"pid": hand.pid, "reason": str(error)})
            hand.kill()
        except asyncio.CancelledError:
            hand.kill()
            raise
        finally:
            await self._see_off(hand)

    async def _heed(self, hand: "_Hand", message: FromHand) -> None:
        if isinstance(message, ShardDone):
            self._works.shard_done()
            return
        self._metrics.elsewhere.tell(hand.owner, message.numbers)
        if isinstance(message, Beat):
            hand.busy = message.busy
            shares = await self._roster.tell(message.report, caps=message.caps, lease=self._settings.lease_seconds)
            hand.say(Allowed(shares=shares))

    async def _see_off(self, hand: "_Hand") -> None:
        code = await hand.ended()
        self._hands.remove(hand)
        await self._roster.leave(hand.owner)
        self._metrics.elsewhere.leave(hand.owner)
        self._works.hand_ended()
        told = {"pid": hand.pid, "code": code, "processes": 1 + len(self._hands)}
        if hand.leaves and code == 0:
            log.info("a further process is done", extra=told)
        else:
            log.warning("a further process died", extra=told)


class _Hand:
    def __init__(self, owner: str, process: Process) -> None:
        self.owner = owner
        self.busy = 0.0
        self.leaves = False
        self._process = process
        self._end: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, message: ToHand) -> None:
        """Little enough never to wait; what a dead one is told is lost."""
        cast(asyncio.StreamWriter, self._process.stdin).write(packed(message))

    async def hear(self) -> FromHand:
        return await read_from_hand(cast(asyncio.StreamReader, self._process.stdout))

    def leave(self, *, within: float) -> None:
        self.leaves = True
        self.say(Stop())
        self._end = asyncio.get_running_loop().call_later(within, self.kill)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def ended(self) -> int:
        """The code it ended with. It has said its last word, so that there is nothing more to wait for."""
        try:
            async with asyncio.timeout(_LAST_WORD_SECONDS):
                code = await self._process.wait()
        except TimeoutError:
            self.kill()
            code = await self._process.wait()
        if self._end is not None:
            self._end.cancel()
        cast(asyncio.StreamWriter, self._process.stdin).close()
        return code


async def _spawn() -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        # Without -P, a file in the current folder could stand in for a module.
        *("-P", "-m", "batchline.app.hand"),
        stdin=PIPE,
        stdout=PIPE,
        # A terminal sends Ctrl-C to the whole group; when hands end is for this process to say.
        start_new_session=True,
        # What was set is told, not found again.
        env={name: value for name, value in os.environ.items() if not name.upper().startswith("BATCHLINE_")},
    )
