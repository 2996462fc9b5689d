"""Runs a target on its corpus and on changed inputs, and keeps those that reach new lines."""

import random
import time
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Protocol

from tests.fuzz.coverage import LineCoverage
from tests.fuzz.mutator import Mutator

CORPUS = Path(__file__).parent / "corpus"


class Target(Protocol):
    """What is fuzzed. A run that raises anything is a find."""

    name: str
    modules: tuple[ModuleType, ...]
    """The modules whose lines guide the fuzzer and are counted."""
    dictionary: tuple[bytes, ...]
    """Words that mean something to the parser."""

    seeds: tuple[bytes, ...]
    """Inputs that are made by code, beside those of the corpus."""

    def run(self, data: bytes) -> None:
        """Give the input to the parser and check what must hold for every input."""

    def close(self) -> None:
        """Remove what the runs left."""


@dataclass
class Find:
    """An input that broke a rule, and how."""

    data: bytes
    error: Exception

    def keep(self, folder: Path) -> Path:
        """Write the input into the corpus, so that every later run begins with it."""
        path = folder / f"found-{sha256(self.data).hexdigest()[:12]}"
        path.write_bytes(self.data)
        return path


@dataclass
class Report:
    """What a run of a fuzzer did."""

    executions: int = 0
    seconds: float = 0.0
    inputs: int = 0
    coverage: float = 0.0
    missing: list[str] = field(default_factory=list)
    finds: list[Find] = field(default_factory=list)


class Fuzzer:
    """Fuzzes one target from a seed."""

    def __init__(self, target: Target, *, seed: int) -> None:
        self._target = target
        self._source = random.Random(f"{target.name} {seed}")
        self._mutator = Mutator(self._source, target.dictionary)
        self._coverage = LineCoverage(target.modules)
        self._inputs: list[bytes] = []
        self._kinds: set[str] = set()
        self.report = Report()

    @property
    def folder(self) -> Path:
        """The folder of the target's corpus."""
        return CORPUS / self._target.name

    def run_corpus(self) -> None:
        """Run every input of the corpus once."""
        kept = [path.read_bytes() for path in sorted(self.folder.iterdir())]
        for data in (*self._target.seeds, *kept):
            self._inputs.append(data)
            self._execute(data)
        self._mutator.max_bytes = max(self._mutator.max_bytes, *map(len, self._inputs))

    def run_executions(self, count: int) -> None:
        """Run this many new inputs."""
        for _ in range(count):
            self._run_next()

    def run_seconds(self, seconds: float) -> None:
        """Run new inputs for so long."""
        start = time.monotonic()
        while time.monotonic() < start + seconds:
            self._run_next()
        self.report.seconds += time.monotonic() - start

    def close(self) -> Report:
        """End the target, and return what was done."""
        self._target.close()
        self.report.inputs = len(self._inputs)
        self.report.coverage = self._coverage.share
        self.report.missing = [f"{Path(file).name}:{line}" for file, line in self._coverage.missing]
        return self.report

    def _run_next(self) -> None:
        data = self._mutator.mutate(self._source.choice(self._inputs), self._source.choice(self._inputs))
        known = len(self._coverage.reached)
        self._execute(data)
        if len(self._coverage.reached) > known:
            self._inputs.append(data)

    def _execute(self, data: bytes) -> None:
        self.report.executions += 1
        try:
            with self._coverage.recording():
                self._target.run(data)
        except Exception as error:  # noqa: BLE001 (any error is a find)
            kind = f"{type(error).__name__} {_place(error)}"
            if kind not in self._kinds:
                self._kinds.add(kind)
                self.report.finds.append(Find(data, error))


def _place(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}"
