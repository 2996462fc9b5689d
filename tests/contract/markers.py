"""The tests and the rules of the contract that they protect, read from the test files without importing them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_TESTS = ROOT / "tests"


class Marker(NamedTuple):
    """One ``@pytest.mark.rule(number, says)`` of a test."""

    rule: str
    says: str
    test: str
    path: str
    """The path of the test file below the root of the repository."""


def markers() -> list[Marker]:
    """Return the markers of all tests, by rule, then by file, then as they stand in the file.

    Raises ValueError if the arguments of a marker are not two strings.
    """
    found = [
        Marker(*_arguments(decorator, path), test.name, path)
        for path, test in _tests()
        for decorator in test.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.rule"
    ]
    return sorted(found, key=lambda marker: order_of(marker.rule))


def order_of(rule: str) -> tuple[str, int, str]:
    """Return what rules are sorted by: A2 stands before A10, and C9 before C9b."""
    digits = rule[1:].rstrip("abcdefghijklmnopqrstuvwxyz")
    return rule[:1], int(digits) if digits.isdecimal() else 0, rule


def path_of_test(name: str) -> str:
    """Return the path of a test, as pytest takes it, from the name of its function or from ``file.py::function``.

    Raises ValueError if there is not exactly one such test.
    """
    file, _, function = name.rpartition("::")
    paths = [path for path, test in _tests() if test.name == function and (not file or Path(path).name == file)]
    if len(paths) != 1:
        where = f"{', '.join(paths)}; write file.py::{function}" if paths else "nowhere"
        raise ValueError(f"the test {name} is defined {len(paths)} times: {where}")
    return f"{paths[0]}::{function}"


@cache
def _tests() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return [
        (path.relative_to(ROOT).as_posix(), test)
        for path in sorted(_TESTS.rglob("test_*.py"))
        if "node_modules" not in path.parts
        for test in _tests_of(ast.parse(path.read_text()))
    ]


def _tests_of(module: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for statement in module.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.name.startswith("test_"):
            yield statement


def _arguments(marker: ast.Call, path: str) -> tuple[str, str]:
    match marker:
        case ast.Call(args=[ast.Constant(value=str(rule)), ast.Constant(value=str(says))], keywords=[]):
            return rule, says
        case _:
            raise ValueError(f"{path}:{marker.lineno}: write @pytest.mark.rule(number, says) with two strings")
