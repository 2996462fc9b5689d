"""A simulated world: one folder, upstreams, clients, and a service that is killed and started again."""

import gc
import logging
import random
import shutil
import sqlite3
import tempfile
import warnings
from bisect import insort
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

from batchline.domain.states import BatchStatus
from batchline.pipeline import record
from batchline.upstream.mock.script import Script
from tests.simulation.clocks import WallClock
from tests.simulation.disk import Disk
from tests.simulation.faults import object_faults, store_faults
from tests.simulation.file_checks import FileChecks
from tests.simulation.invariants import BatchObserver, require
from tests.simulation.plan import MAX_LOST_SECONDS, Disturbance, Plan, make_plan
from tests.simulation.process import Process
from tests.simulation.upstream import Machine
from tests.simulation.virtual import Time
from tests.support.earlier_copies import bring_back, copy_of

_MOST_STEPS = 3_000_000
_LONGEST = 4200.0
_PROJECTS = ["11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"]
_SHM = Path("/dev/shm")
_REPAIRED = "batch repaired"
_STEPS_TO_NEXT_TRY = 20
"""The steps until a disturbance is tried again that had nothing to act on."""


class World:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.source = random.Random(seed)
        self.time = Time()
        self.folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=_SHM if _SHM.is_dir() else None))
        self.plan: Plan = make_plan(self.source, _PROJECTS)
        self.disk = Disk(self.folder)
        self.observer = BatchObserver(self.plan, self.time)
        self.files = FileChecks(self.plan, self.time, self.disk)
        self.machines = {name: Machine(Script(seed=seed), self.time) for name in self.plan.settings.all_upstreams}
        self.store_faults = store_faults(self.source, self.time, chance=self.plan.store_fault_chance)
        self.object_faults = object_faults(self.source, self.time, chance=self.plan.object_fault_chance)
        self.log = ErrorLog(self.plan)
        self.steps = 0
        self.clocks = [WallClock() for _ in range(2 if self.plan.shared else 1)]
        self.processes: list[Process] = []
        self.dead: list[Process] = []
        self.generation = 0
        """How often the database has gone back to an earlier state."""
        self._copy: tuple[float, sqlite3.Connection] | None = None

    def run(self) -> None:
        """Run from the first start to the end of the last batch. Raise if an invariant is violated."""
        try:
            with ExitStack() as stack:
                stack.enter_context(mock.patch.object(record, "INLINE_SEGMENT_BYTES", self.plan.inline_bytes))
                stack.enter_context(self.log)
                if self.plan.has("crash"):
                    stack.enter_context(self.disk.watching_syncs())
                self._run()
        finally:
            self._discard_processes()
            shutil.rmtree(self.folder)

    def _run(self) -> None:
        disturbances = list(self.plan.disturbances)
        if self.plan.shared:
            self._start_peer()
        self._start()
        while not self.processes[-1].finished:
            if disturbances and disturbances[0].step <= self.steps:
                self._disturb(disturbances.pop(0), disturbances)
            self._step()
        seen = len(self.observer.seen) >= len(self.plan.batches)
        require(seen or self.generation > 0, "a client has no batch")

    def _discard_processes(self) -> None:
        """Unwind all processes. Killed ones leave files open, as they should."""
        with ErrorLog(self.plan), warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            for process in (*self.processes, *self.dead):
                process.discard()
            self.processes, self.dead = [], []
            # A coroutine that is collected closes, which may leave another cycle with an open file behind.
            for _ in range(3):
                gc.collect()

    def _start(self) -> None:
        self.processes.append(Process(self, wall=self.clocks[0]))

    def _start_peer(self) -> None:
        """Start a process on the second machine, which has no clients."""
        self.processes.insert(0, Process(self, wall=self.clocks[1], is_peer=True))

    def _disturb(self, disturbance: Disturbance, later: list[Disturbance]) -> None:
        """Disturb the world. If the disturbance has nothing to act on yet, add it to those that come later."""
        if not self._actions[disturbance.kind](disturbance.seconds):
            again = replace(disturbance, step=self.steps + _STEPS_TO_NEXT_TRY)
            insort(later, again, key=lambda each: each.step)

    @property
    def _actions(self) -> dict[str, Callable[[float], bool]]:
        """The actions by the kind of the disturbance. Each returns False if it is to be tried again."""
        return {
            "kill": self._kill_one,
            "crash": self._crash_machine,
            "stop": self._stop,
            "freeze": self._freeze,
            "freeze at end": self._freeze_at_end,
            "outage": self._crash_upstreams,
            "store outage": self.store_faults.go_down,
            "objects outage": self.object_faults.go_down,
            "clock": self._set_clock,
            "damage": lambda _: self.disk.damage(self.source),
            "copy": self._copy_database,
            "go back": self._go_back,
        }

    def _kill_one(self, _: float) -> bool:
        self._kill(self.source.choice([self.processes[-1], self.processes[0]]))
        return True

    def _stop(self, _: float) -> bool:
        if not self.processes[-1].clients.done():
            self.processes[-1].stop()
        return True

    def _freeze(self, seconds: float) -> bool:
        """Let the process stand still and wake for two seconds. Meanwhile another one takes its place."""
        process = self.processes[-1]
        process.frozen_until = self.time.now + seconds
        process.dies_at = process.frozen_until + 2
        process.clients.cancel()
        self._start()
        return True

    def _freeze_at_end(self, seconds: float) -> bool:
        return self._has_batch_in(BatchStatus.FINALIZING, BatchStatus.CANCELLING) and self._freeze(seconds)

    def _has_batch_in(self, *states: BatchStatus) -> bool:
        """Return whether a client has seen a batch in one of the states last."""
        return any(batch.status in states for batch in self.observer.seen.values())

    def _crash_upstreams(self, seconds: float) -> bool:
        for machine in self.machines.values():
            machine.crash(seconds)
        return True

    def _set_clock(self, error: float) -> bool:
        self.source.choice(self.clocks).error = error
        return True

    def _copy_database(self, _: float) -> bool:
        """Copy the database, while a batch runs."""
        if not self._has_batch_in(BatchStatus.IN_PROGRESS):
            return False
        self._copy = (self.time.now, copy_of(self.folder / "db.sqlite"))
        return True

    def _crash_machine(self, _: float) -> bool:
        """Kill all processes at once, let the disk forget what was not synced, and start the service again."""
        for process in self.processes:
            self.dead.append(process)
            process.database.close()
        self.processes = []
        self.disk.forget_unsynced(self.source)
        self._start()
        return True

    def _go_back(self, _: float) -> bool:
        """Bring the database back to the last copy, while processes run, unless that was too long ago."""
        if self._copy is None:
            return False
        if self.time.now - self._copy[0] <= MAX_LOST_SECONDS:
            bring_back(self._copy[1], self.folder / "db.sqlite")
            self.generation += 1
            self.observer.forget()
            self.files.went_back = True
        self._copy = None
        return True

    def drop_copy(self) -> None:
        """Let the database go back no more, because what it holds is being checked."""
        self._copy = None

    def _kill(self, process: Process) -> None:
        self.processes.remove(process)
        self.dead.append(process)
        process.database.close()
        if process.is_peer:
            self._start_peer()
        elif process.dies_at is None or all(other.is_peer for other in self.processes):
            self._start()

    def _step(self) -> None:
        self.steps += 1
        if self.log.errors:
            require(False, f"the log has errors: {self.log.errors}")
        if self.steps >= _MOST_STEPS or self.time.now >= _LONGEST:
            require(False, f"no end: {self._state()}")
        for process in list(self.processes):
            if process.stopped or process.killed or (process.dies_at is not None and self.time.now >= process.dies_at):
                self._kill(process)
        turn = min(self.processes, key=Process.due)
        due = turn.due()
        if due == float("inf"):
            require(False, f"no callback is scheduled: {self._state()}")
        self.time.now = max(self.time.now, due)
        turn.step()

    def _state(self) -> str:
        return f"seed {self.seed}, {self.time.now:.1f} s, {[(b.id, b.status) for b in self.observer.seen.values()]}"


class ErrorLog(logging.Handler):
    """The log of the service, which is not printed. An error or a repair in it fails the world, unless the world
    explains it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(logging.WARNING)
        self.errors: list[str] = []
        self._expected: set[str] = set()
        if plan.damaged:
            self._expected.add(_REPAIRED)
        if plan.storage_fails:
            self._expected |= {
                "storage unavailable: buffering results, dispatch paused",
                "failed to finalize a batch, retrying",
            }
        if plan.damaged or plan.zombies:
            # A frozen process may wake after its files were rightly removed.
            self._expected.add("stored data is damaged or missing")

    def emit(self, record: logging.LogRecord) -> None:
        is_fault = record.levelno >= logging.ERROR or record.getMessage() == _REPAIRED
        if is_fault and record.getMessage() not in self._expected:
            self.errors.append(f"{record.getMessage()}: {record.exc_info[1] if record.exc_info else ''}")

    def __enter__(self) -> "ErrorLog":
        self._logger = logging.getLogger("batchline")
        self._logger.addHandler(self)
        self._logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = True
