"""Where a mutation is made: a piece of Python that has a name, or a query that has a name.

Files are found by what they contain. A mutation survives when its code moves to another file below ``src/batchline``.
"""

import ast
import builtins
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.contract.patterns import PatternError, is_wildcard, replace

_QUERY_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


class Edit(NamedTuple):
    """The whole text of a source file after a mutation."""

    path: Path
    text: str


class _Definition(NamedTuple):
    name: str
    """The module and the names of the classes and functions around it, with dots between them."""
    own_name: str
    """The same without the module."""
    path: Path


def edit_python(package: Path, *, name: str, find: str, new: str) -> Edit:
    """Replace a pattern in the class, function or constant of this qualified name.

    The name is written without its module, as in ``Recorder._write_segment``. If two modules have the same name, write
    the module before it. Raises PatternError if there is not exactly one such place, or not one match in it.
    """
    found = [definition for definition in _definitions(package) if _is_named(definition, name)]
    if len(found) != 1:
        paths = ", ".join(str(definition.path.relative_to(package)) for definition in found)
        raise PatternError(f"the name {name} is defined {len(found)} times below {package.name}: {paths or 'nowhere'}")
    source = found[0].path.read_text()
    module = ast.parse(source)
    place = next(node for own_name, node in _named_nodes(module) if own_name == found[0].own_name)
    before, known = ast.unparse(place), _names_used(module)
    try:
        replace(place, find, new)
        _check_names(new, known)
    except PatternError as error:
        raise PatternError(f"{name}: {error}") from None
    if ast.unparse(place) == before:
        raise PatternError(f"{name}: the replacement is the same as what was found")
    return Edit(found[0].path, f"{ast.unparse(module)}\n")


def edit_query(package: Path, *, backend: str, name: str, find: str, new: str) -> Edit:
    """Replace a fragment of the query of this name in the folder of a backend. White space in it counts as one space.

    Raises PatternError if there is not exactly one such query, or not one such fragment in it.
    """
    queries = [
        (path, *_span_of_query(path, name))
        for path in sorted(package.rglob("*.sql"))
        if backend in path.relative_to(package).parts and name in _QUERY_NAME.findall(path.read_text())
    ]
    if len(queries) != 1:
        raise PatternError(f"the query {name} of {backend} is defined {len(queries)} times below {package.name}")
    path, start, end = queries[0]
    source = path.read_text()
    changed, count = _fragment(find).subn(lambda _: new, source[start:end])
    if count != 1:
        raise PatternError(f"{name} of {backend}: {find!r} is found {count} times")
    return Edit(path, source[:start] + changed + source[end:])


def _check_names(new: str, known: set[str]) -> None:
    """Raise PatternError if a replacement uses a name that its module does not have, as after an incomplete rename.

    The mutated code would raise an exception, and a test that fails for that reason proves nothing.
    """
    code = ast.parse(new)
    used = {name for name in _names_used(code) if not is_wildcard(name)}
    if unknown := sorted(used - known - _names_bound(code) - set(dir(builtins))):
        raise PatternError(f"the replacement uses names that the module does not have: {', '.join(unknown)}")


def _names_used(code: ast.AST) -> set[str]:
    """Return the names of variables, attributes, arguments, imports, functions and classes in a piece of code."""
    fields = ("id", "attr", "arg", "name", "asname")
    named = {getattr(node, field, None) for node in ast.walk(code) for field in fields}
    return {name for name in named if isinstance(name, str)}


def _names_bound(code: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(code) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


@cache
def _definitions(package: Path) -> list[_Definition]:
    return [
        _Definition(f"{_module_of(path, package)}.{own_name}", own_name, path)
        for path in sorted(package.rglob("*.py"))
        for own_name, _ in _named_nodes(ast.parse(path.read_text()))
    ]


def _module_of(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _named_nodes(module: ast.Module) -> list[tuple[str, ast.stmt]]:
    """Return the classes, functions and constants of a module with their qualified names."""
    return _named_in(module.body, prefix="")


def _named_in(body: list[ast.stmt], *, prefix: str) -> list[tuple[str, ast.stmt]]:
    named: list[tuple[str, ast.stmt]] = []
    for statement in body:
        match statement:
            case ast.ClassDef(name=name, body=inner):
                named += [(prefix + name, statement), *_named_in(inner, prefix=f"{prefix}{name}.")]
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                named.append((prefix + name, statement))
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                named.append((prefix + name, statement))
            case _:
                pass
    return named


def _is_named(definition: _Definition, name: str) -> bool:
    with_module = name.endswith(f".{definition.own_name}") and f".{definition.name}".endswith(f".{name}")
    return name == definition.own_name or with_module


def _span_of_query(path: Path, name: str) -> tuple[int, int]:
    """Return where the text of a query begins and ends in its file."""
    source = path.read_text()
    headers = list(_QUERY_NAME.finditer(source))
    at = [header[1] for header in headers].index(name)
    return headers[at].end(), headers[at + 1].start() if at + 1 < len(headers) else len(source)


def _fragment(find: str) -> re.Pattern[str]:
    """Compile a fragment of SQL. It begins and ends where words begin and end."""
    text = r"\s+".join(map(re.escape, find.split()))
    before = r"\b" if re.match(r"\s*\w", find) else ""
    after = r"\b" if re.search(r"\w\s*$", find) else ""
    return re.compile(f"{before}{text}{after}")
