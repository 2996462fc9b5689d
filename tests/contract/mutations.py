"""Break the code on purpose and check that a test fails: ``python -m tests.contract.mutations [RULE ...]``.

``mutations.toml`` lists the mutations. Each is made in a private copy of the sources, never in the checkout, and the
tests that it names must fail there. The same tests must pass in the copy without the mutation.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from shutil import copy, copytree, ignore_patterns
from typing import Literal

from msgspec import Struct, convert
from msgspec.structs import replace

from tests.contract.markers import ROOT, path_of_test
from tests.contract.patterns import PatternError
from tests.contract.places import Edit, edit_python, edit_query

_PACKAGE = ROOT / "src" / "batchline"
_RUNS_AT_ONCE = 2
_LONGEST_TEST_SECONDS = 300.0
_HANG_SECONDS, _HANG_FACTOR = 75.0, 5
"""A mutated test counts as one that hangs after this time, or after this many times the time that it takes without the
mutation if that is longer, as on a machine that is busy."""

_PYTEST = (
    *("-m", "pytest", "-m", "", "-x", "--tb=no", "-rfE"),
    *("-p", "no:randomly", "-p", "no:cacheprovider", "--hypothesis-seed=0"),
)
_PASSED, _FAILED, _HANGS = "green", "red", "red (hangs)"


class Mutation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of ``mutations.toml``, which explains the fields."""

    rule: str
    effect: str
    tests: tuple[str, ...]
    name: str = ""
    query: str = ""
    backend: Literal["", "sqlite", "postgres", "both"] = ""
    find: str
    replace: str

    @property
    def backends(self) -> tuple[str, ...]:
        return ("sqlite", "postgres") if self.backend == "both" else (self.backend,)

    def edit(self, backend: str) -> Edit:
        """Return the mutated source file. Raises PatternError if the mutation cannot be made."""
        if bool(self.name) == bool(self.query) or bool(self.query) != bool(self.backend):
            raise PatternError(f"{self.effect}: give either a name, or a query and its backend")
        if self.name:
            return edit_python(_PACKAGE, name=self.name, find=self.find, new=self.replace)
        return edit_query(_PACKAGE, backend=backend, name=self.query, find=self.find, new=self.replace)


def mutations() -> list[Mutation]:
    """Return the entries of ``mutations.toml``."""
    with Path(__file__).with_name("mutations.toml").open("rb") as file:
        return convert(tomllib.load(file)["mutation"], list[Mutation])


class Run(Struct, frozen=True, kw_only=True):
    """One run of one test. Without an edit the code is not mutated."""

    test: str
    rule: str = ""
    effect: str = "(not mutated)"
    edit: Edit | None = None
    time_limit_seconds: float = _HANG_SECONDS


class Result(Struct, frozen=True, kw_only=True):
    run: Run
    colour: str
    seconds: float

    @property
    def is_expected(self) -> bool:
        return self.colour == _PASSED if self.run.edit is None else self.colour in (_FAILED, _HANGS)

    def row(self) -> str:
        verdict = "ok  " if self.is_expected else "FAIL"
        test = self.run.test.rpartition("::")[2]
        return f"{self.seconds:5.1f} s  {verdict} {self.run.rule:<4} {self.colour:<11} {self.run.effect:<72} {test}"


def mutated_runs(chosen: list[Mutation]) -> list[Run]:
    """Return a run for each test of each mutation, and for each backend if there are two.

    Raises PatternError if a mutation cannot be made, ValueError if a test does not exist.
    """
    return [
        Run(test=path_of_test(test), rule=mutation.rule, effect=_effect(mutation, backend), edit=mutation.edit(backend))
        for mutation in chosen
        for backend in mutation.backends
        for test in mutation.tests
    ]


def _effect(mutation: Mutation, backend: str) -> str:
    return f"{backend}: {mutation.effect}" if backend else mutation.effect


class Copy:
    """The sources and tests in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("src", "tests"):
            copytree(ROOT / name, folder / name, ignore=ignore_patterns("__pycache__", "node_modules"))
        copy(ROOT / "pyproject.toml", folder)
        self._environment = os.environ | {"PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        self._compile()
        self._check_import()

    def result_of(self, run: Run) -> Result:
        """Mutate the copy, run the test and restore the copy."""
        started = time.monotonic()
        with self._edited(run.edit):
            colour = self._colour_of(run.test, time_limit_seconds=run.time_limit_seconds)
        return Result(run=run, colour=colour, seconds=time.monotonic() - started)

    def _compile(self) -> None:
        """Compile the sources once. Python compares the hash of a source with that of its bytecode then, not the time
        of the last change, which is the same for two mutations within a second."""
        command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "src"]
        subprocess.run(command, cwd=self._folder, check=True)

    def _check_import(self) -> None:
        """Check that tests import the copy and not the installed package, where a mutation would have no effect."""
        command = [sys.executable, "-c", "import batchline; print(batchline.__file__)"]
        imported = subprocess.run(
            command, cwd=self._folder, env=self._environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
        if not Path(imported).is_relative_to(self._folder):
            raise RuntimeError(f"the tests of the copy in {self._folder} import {imported}")

    @contextmanager
    def _edited(self, edit: Edit | None) -> Iterator[None]:
        if edit is None:
            yield
            return
        path = self._folder / edit.path.relative_to(ROOT)
        source = path.read_text()
        path.write_text(edit.text)
        try:
            yield
        finally:
            path.write_text(source)

    def _colour_of(self, test: str, *, time_limit_seconds: float) -> str:
        process = subprocess.Popen(
            [sys.executable, *_PYTEST, f"--basetemp={self._folder / 'tmp'}", test],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            written, _ = process.communicate(timeout=time_limit_seconds)
        except subprocess.TimeoutExpired:
            return _HANGS
        finally:
            _kill_group(process)
        return _colour(process.returncode, written)


def _kill_group(process: subprocess.Popen[str]) -> None:
    """End the test and every process that it started and did not end."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.communicate()


def _colour(code: int, written: str) -> str:
    """Return red only for a test that failed. A test that cannot be collected or set up says nothing about the rule."""
    summary = written.partition("short test summary info")[2]
    if code == 0:
        return _PASSED
    if code == 1 and re.search(r"^FAILED ", summary, re.MULTILINE):
        return _FAILED
    return f"exit code {code}: {' '.join(written.split())[-300:]}"


@contextmanager
def _copies() -> Iterator[Callable[[Run], Result]]:
    """Make the copies, and yield a function that runs a test in a copy that is not in use."""
    free: SimpleQueue[Copy] = SimpleQueue()

    def result_of(run: Run) -> Result:
        unused = free.get()
        try:
            return unused.result_of(run)
        finally:
            free.put(unused)

    with tempfile.TemporaryDirectory(prefix="contract-", ignore_cleanup_errors=True) as folder:
        for n in range(_RUNS_AT_ONCE):
            free.put(Copy(Path(folder).resolve() / str(n)))
        yield result_of


def run_all(mutated: list[Run]) -> bool:
    """Run the tests without and then with the mutations, print a line for each run, and return whether all results
    are as expected. A test has a multiple of the time that it takes without a mutation."""
    tests = list(dict.fromkeys(run.test for run in mutated))
    total, results = len(tests) + len(mutated), list[Result]()
    with _copies() as result_of, ThreadPoolExecutor(_RUNS_AT_ONCE) as pool:

        def carry_out(runs: list[Run]) -> None:
            for finished in as_completed([pool.submit(result_of, run) for run in runs]):
                results.append(finished.result())
                print(f"{len(results):>4}/{total} {results[-1].row()}", flush=True)

        carry_out([Run(test=test, time_limit_seconds=_LONGEST_TEST_SECONDS) for test in tests])
        limits = {result.run.test: max(_HANG_SECONDS, _HANG_FACTOR * result.seconds) for result in results}
        carry_out([replace(run, time_limit_seconds=limits[run.test]) for run in mutated])
    failed = sum(not result.is_expected for result in results)
    print(f"{total - failed} passed, {failed} failed")
    return total > 0 and failed == 0


def main(rules: list[str]) -> int:
    known = mutations()
    if unknown := set(rules) - {mutation.rule for mutation in known}:
        print(f"mutations.toml has no mutation of: {', '.join(sorted(unknown))}")
        return 2
    try:
        planned = mutated_runs([mutation for mutation in known if not rules or mutation.rule in rules])
    except (PatternError, ValueError) as error:
        print(error)
        return 2
    return 0 if run_all(planned) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
