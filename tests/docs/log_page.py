"""Writes docs/reference/log-events.md from the calls of the loggers in the code: `make log-page`."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).parents[2]
_SOURCE = _ROOT / "src" / "batchline"
PAGE = _ROOT / "docs" / "reference" / "log-events.md"
_LEVELS = ("error", "warning", "info", "debug")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LEVEL_OF = {level: level for level in _LEVELS} | {"exception": "error"}
_HEAD = """# Log events

`make log-page` writes this page from the code itself; `tests/docs/test_log_page.py` holds it. [Monitor the
service](../how-to/monitoring.md#logs) says how lines look and which setting chooses their level. A message says what
happened and what happens next. Search for its words: a message in which `…` stands begins with a part that differs.
Fields that mean nothing in a case are left out of its line: `model`, for example, when all of an upstream is paused.
"""


class Event(NamedTuple):
    """One message that a process may write."""

    level: str
    message: str
    fields: tuple[str, ...]
    module: str


@cache
def events() -> list[Event]:
    """Return every event of the code, sorted."""
    found = {event for path in _SOURCE.rglob("*.py") for event in _events_of(path)}
    return sorted(found, key=lambda event: (_LEVELS.index(event.level), event.message.lower(), event.module))


def _events_of(path: Path) -> Iterator[Event]:
    module = path.relative_to(_SOURCE).with_suffix("").as_posix().replace("/", ".")
    tree = ast.parse(path.read_text())
    for scope in [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]:
        for node in ast.walk(scope):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _logs(node.func):
                yield from _events_in(node, node.func.attr, _Fields(scope, tree), module)


def _events_in(call: ast.Call, method: str, fields: "_Fields", module: str) -> Iterator[Event]:
    levels, arguments = [method], call.args
    if method == "log":
        levels = [node.attr.lower() for node in ast.walk(arguments[0]) if isinstance(node, ast.Attribute)]
        arguments = arguments[1:]
    extra = [keyword.value for keyword in call.keywords if keyword.arg == "extra"]
    names = tuple(dict.fromkeys(name for value in extra for name in fields.of(value)))
    for level in levels:
        for message in _messages(arguments[0]):
            yield Event(_LEVEL_OF[level], message, names, module)


def _logs(called: ast.Attribute) -> bool:
    is_logger = isinstance(called.value, ast.Name) and called.value.id == "log"
    return is_logger and called.attr in {*_LEVEL_OF, "log"}


def _messages(node: ast.expr) -> list[str]:
    """Return the texts that a message may have."""
    if isinstance(node, ast.IfExp):
        return [*_messages(node.body), *_messages(node.orelse)]
    assert isinstance(node, ast.Constant)
    return [str(node.value).replace("%s", "…")]


class _Fields:
    """Finds the names of the fields that an expression adds to a line, in the function and the module around it."""

    def __init__(self, scope: ast.AST, tree: ast.Module) -> None:
        self._scope, self._tree = scope, tree

    def of(self, extra: ast.expr) -> Iterator[str]:
        for node in ast.walk(extra):
            if isinstance(node, ast.Dict):
                yield from _keys(node)
            elif isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                yield from self._returned_by(called)
            elif isinstance(node, ast.Name):
                yield from self._assigned_to(node.id, self._scope)
            elif isinstance(node, ast.Attribute):
                yield from self._assigned_to(node.attr, self._tree)
                yield from self._returned_by(node.attr)

    def _assigned_to(self, name: str, where: ast.AST) -> Iterator[str]:
        for node in ast.walk(where):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign):
                targets = [node.target]
            if any(name in (getattr(target, "id", None), getattr(target, "attr", None)) for target in targets):
                yield from _keys_below(node)

    def _returned_by(self, name: str) -> Iterator[str]:
        for node in ast.walk(self._tree):
            if isinstance(node, _FUNCTIONS) and node.name == name:
                for step in ast.walk(node):
                    if isinstance(step, ast.Return) and step.value is not None:
                        for part in _joined(step.value):
                            if isinstance(part, ast.Name):
                                yield from self._assigned_to(part.id, node)
                            else:
                                yield from _keys_below(part)


def _joined(node: ast.expr) -> Iterator[ast.expr]:
    """Return the expressions that ``|`` joins, and those of both cases of a conditional expression."""
    parts = [node.left, node.right] if isinstance(node, ast.BinOp) else []
    if isinstance(node, ast.IfExp):
        parts = [node.body, node.orelse]
    for part in parts:
        yield from _joined(part)
    if not parts:
        yield node


def _keys_below(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Dict):
            yield from _keys(each)


def _keys(node: ast.Dict) -> Iterator[str]:
    yield from (key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def page() -> str:
    """Return the whole page."""
    parts = [_HEAD]
    found = events()
    for level in _LEVELS:
        rows = [_row(event) for event in found if event.level == level]
        if rows:
            parts.append("\n".join([f"\n## {level}\n", "| Message | Fields | Module |", "|---|---|---|", *rows, ""]))
    return "".join(parts)


def _row(event: Event) -> str:
    fields = ", ".join(f"`{name}`" for name in event.fields)
    return f"| {event.message} | {fields} | `batchline.{event.module}` |"


if __name__ == "__main__":
    PAGE.write_text(page())
