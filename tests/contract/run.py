"""Prove the table of the contract: each mutation of mutations.toml must turn the test beside it red.

    python tests/contract/run.py             all of it
    python tests/contract/run.py A11 C12     some rules
    python tests/contract/run.py --write     write docs/contract.md, without running anything

Mutations are made in private copies of the sources, never in the checkout.
"""

import ast
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from shutil import copy, copytree, ignore_patterns

from msgspec import Struct, convert

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "contract.md"
PACKAGE = Path("src", "batchline")

_AT_ONCE = 2
_SECONDS = 90
_PYTEST = (
    *("-m", "pytest", "-m", "", "-x", "--tb=no", "-rfE"),
    *("-p", "no:randomly", "-p", "no:cacheprovider", "--hypothesis-seed=0"),
)
_GREEN, _RED, _HANGS = "green", "red", "red (hangs)"

_INTRODUCTION = """\
# The contract, and what holds it

Every rule of the contract has a test that holds it, and a one-line mutation of the code that turned that test red.
`make mutations` makes each of them again in a private copy and expects red, and green without it.
This page is written by `tests/contract/run.py --write` from `tests/contract/mutations.toml`.

| Rule | What it says | Test that holds it | Mutation that turned it red |
|---|---|---|---|
"""


class Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule, a test and a mutation; or ``held_by``, for a rule that nothing in the code can break yet."""

    rule: str
    says: str
    test: str = ""
    file: str = ""
    find: str = ""
    replace: str = ""
    mutation: str = ""
    held_by: str = ""


class Run(Struct, frozen=True):
    test: str
    entry: Entry | None
    """None: as the code stands."""


class Result(Struct, frozen=True):
    run: Run
    colour: str

    @property
    def good(self) -> bool:
        return self.colour == _GREEN if self.run.entry is None else self.colour in (_RED, _HANGS)

    def row(self) -> str:
        rule, broken = (self.run.entry.rule, self.run.entry.mutation) if self.run.entry else ("", "as it stands")
        mark = "ok  " if self.good else "FAIL"
        return f"{mark} {rule:<4} {self.colour:<11} {broken:<72} {self.run.test}"


def entries() -> list[Entry]:
    with Path(__file__).with_name("mutations.toml").open("rb") as file:
        return convert(tomllib.load(file)["entry"], list[Entry])


def document() -> str:
    return _INTRODUCTION + "".join(map(_document_row, entries()))


def _document_row(entry: Entry) -> str:
    path, _, name = entry.test.partition("::")
    held = f"`{name}` in `{path}`" if entry.test else entry.held_by
    broken = f"{entry.mutation} (`{PACKAGE / entry.file}`)" if entry.test else "none"
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (entry.rule, entry.says, held, broken)) + " |\n"


def mutated(source: str, entry: Entry) -> str:
    """The text with the mutation in it. Raises ValueError without one place for it, SyntaxError without sense in it."""
    if (found := source.count(entry.find)) != 1:
        raise ValueError(f"{entry.rule}: {entry.find!r} is found {found} times in {entry.file}")
    text = source.replace(entry.find, entry.replace)
    if entry.file.endswith(".py"):
        ast.parse(text)
    return text


class Copy:
    """The sources and tests in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        unwanted = ignore_patterns("__pycache__", "node_modules")
        for name in ("src", "tests"):
            copytree(ROOT / name, folder / name, ignore=unwanted)
        copy(ROOT / "pyproject.toml", folder)
        # Sources that change twice within a second would pass for their former bytecode.
        self._environment = os.environ | {"PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        self._check_import()

    def result_of(self, run: Run) -> Result:
        if run.entry is None:
            return Result(run, self._colour_of(run.test))
        try:
            with self._mutation(run.entry):
                return Result(run, self._colour_of(run.test))
        except (ValueError, SyntaxError) as error:
            return Result(run, str(error))

    def _check_import(self) -> None:
        """The package is installed from the checkout too, and a mutation of what is not imported proves nothing."""
        command = [sys.executable, "-c", "import batchline; print(batchline.__file__)"]
        told = subprocess.run(
            command, cwd=self._folder, env=self._environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        if not Path(told.strip()).is_relative_to(self._folder):
            raise RuntimeError(f"the copy in {self._folder} is not what is imported, but {told}")

    @contextmanager
    def _mutation(self, entry: Entry) -> Iterator[None]:
        path = self._folder / PACKAGE / entry.file
        source = path.read_text()
        path.write_text(mutated(source, entry))
        try:
            yield
        finally:
            path.write_text(source)

    def _colour_of(self, test: str) -> str:
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
            written, _ = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            return _HANGS
        finally:
            _end_group(process)
        return _colour(process.returncode, written)


def _end_group(process: subprocess.Popen[str]) -> None:
    """The test and every process it started and did not end."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.communicate()


def _colour(code: int, written: str) -> str:
    """Red is a test that failed; one that could not be collected or set up says nothing about the rule."""
    summary = written.partition("short test summary info")[2]
    if code == 0:
        return _GREEN
    if code == 1 and re.search(r"^FAILED ", summary, re.MULTILINE):
        return _RED
    return f"exit {code}: {' '.join(written.split())[-300:]}"


def runs(rules: list[str]) -> list[Run]:
    chosen = [entry for entry in entries() if entry.test and (not rules or entry.rule in rules)]
    untouched = [Run(test, None) for test in dict.fromkeys(entry.test for entry in chosen)]
    return untouched + [Run(entry.test, entry) for entry in chosen]


@contextmanager
def _copies() -> Iterator[Callable[[Run], Result]]:
    """What finds the result of a run, in whichever copy is free."""
    free: SimpleQueue[Copy] = SimpleQueue()

    def result_of(run: Run) -> Result:
        one = free.get()
        try:
            return one.result_of(run)
        finally:
            free.put(one)

    with tempfile.TemporaryDirectory(prefix="contract-", ignore_cleanup_errors=True) as folder:
        for n in range(_AT_ONCE):
            free.put(Copy(Path(folder).resolve() / str(n)))
        yield result_of


def prove(rules: list[str]) -> bool:
    passed = failed = 0
    with _copies() as result_of, ThreadPoolExecutor(_AT_ONCE) as pool:
        for result in pool.map(result_of, runs(rules)):
            print(result.row(), flush=True)
            passed, failed = passed + result.good, failed + (not result.good)
    print(f"{passed} passed, {failed} failed")
    return passed > 0 and failed == 0


def main(arguments: list[str]) -> int:
    if arguments == ["--write"]:
        DOCUMENT.write_text(document())
        return 0
    if unknown := set(arguments) - {entry.rule for entry in entries()}:
        print(f"no entry: {', '.join(sorted(unknown))}")
        return 2
    return 0 if prove(arguments) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
