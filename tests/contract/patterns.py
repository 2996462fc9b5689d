"""Find a piece of Python by its syntax tree and replace it, so that layout, comments and most renames do not matter.

A pattern is Python code in which two things have a meaning of their own:

* ``_a`` to ``_z`` are wildcards. As a name, a wildcard matches any expression; behind a dot or before the ``=`` of an
  argument it matches any name; as a statement of its own it matches any one statement. A wildcard that is written
  twice must match the same code twice. The replacement may use it, and then means the code that it matched.
* ``...`` matches any number of arguments, elements or statements. It cannot be used in the replacement.

If the pattern and the replacement are both one expression, any expression of the place can match. Otherwise whole
statements match, several of them if they follow each other. An empty replacement deletes the statements.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import cast

Bound = Mapping[str, object]
"""The code that each wildcard matched: a syntax tree, or a string for the name of an attribute or argument."""

_WILDCARD = re.compile(r"_[a-z]")
_NOT_COMPARED = frozenset({"ctx", "kind", "type_comment", "type_ignores"})


class PatternError(Exception):
    """A pattern does not match exactly once, or its replacement cannot be made."""


def replace(place: ast.AST, find: str, replacement: str) -> None:
    """Replace the one match of a pattern in a syntax tree. Raises PatternError if there is not exactly one match."""
    wanted, new = _parse(find), _parse(replacement)
    if not wanted:
        raise PatternError("the pattern is empty")
    expression = _only_expression(wanted), _only_expression(new)
    if expression[0] is not None and expression[1] is not None:
        _replace_expression(place, expression[0], expression[1])
    else:
        _replace_statements(place, wanted, new or [ast.Pass()])


def is_wildcard(name: str) -> bool:
    """Return whether a name in a pattern stands for anything."""
    return _WILDCARD.fullmatch(name) is not None


def _parse(code: str) -> list[ast.stmt]:
    try:
        return ast.parse(code).body
    except SyntaxError as error:
        raise PatternError(f"{code!r} is not Python: {error}") from None


def _only_expression(statements: Sequence[ast.stmt]) -> ast.expr | None:
    match statements:
        case [ast.Expr(value=value)]:
            return value
        case _:
            return None


def _replace_expression(place: ast.AST, wanted: ast.expr, new: ast.expr) -> None:
    found = [
        (holder, field, position, bound)
        for holder, field, position, node in _expressions(place)
        if (bound := _match(wanted, node, {})) is not None
    ]
    if len(found) != 1:
        raise PatternError(f"{ast.unparse(wanted)!r} is found {len(found)} times")
    holder, field, position, bound = found[0]
    made = _fill(new, bound)
    if position is None:
        setattr(holder, field, made)
    else:
        getattr(holder, field)[position] = made


def _replace_statements(place: ast.AST, wanted: list[ast.stmt], new: list[ast.stmt]) -> None:
    found = [
        (block, start, bound)
        for block in _blocks(place)
        for start in range(len(block) - len(wanted) + 1)
        if (bound := _match(wanted, block[start : start + len(wanted)], {})) is not None
    ]
    if len(found) != 1:
        code = "; ".join(ast.unparse(statement) for statement in wanted)
        raise PatternError(f"the statements {code!r} are found {len(found)} times")
    block, start, bound = found[0]
    block[start : start + len(wanted)] = [cast(ast.stmt, _fill(statement, bound)) for statement in new]


def _expressions(place: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.expr]]:
    """Yield every expression below a node with where it is kept: the holder, its field and the position in a list."""
    for holder in ast.walk(place):
        for field, value in ast.iter_fields(holder):
            if isinstance(value, ast.expr):
                yield holder, field, None, value
            elif isinstance(value, list):
                for position, item in enumerate(value):
                    if isinstance(item, ast.expr):
                        yield holder, field, position, item


def _blocks(place: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield every list of statements below a node."""
    for holder in ast.walk(place):
        for _, value in ast.iter_fields(holder):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def _match(pattern: object, found: object, bound: Bound) -> Bound | None:
    """Return what the wildcards match, added to what they matched before, or None if the pattern does not match."""
    wildcard = _wildcard_of(pattern)
    if wildcard is not None and isinstance(found, ast.stmt if isinstance(pattern, ast.stmt) else ast.expr):
        return _bind(wildcard, found, bound)
    match pattern, found:
        case ast.Call(), ast.Call():
            return _match_call(pattern, found, bound)
        case ast.AST(), ast.AST() if type(pattern) is type(found) and not isinstance(pattern, ast.Constant):
            return _match_fields(pattern, found, bound)
        case list(), list():
            return _match_list(pattern, found, bound)
        case str(), str() if is_wildcard(pattern):
            return _bind(pattern, found, bound)
        case _:
            return bound if _same(pattern, found) else None


def _match_fields(pattern: ast.AST, found: ast.AST, bound: Bound) -> Bound | None:
    after: Bound | None = bound
    for field, value in ast.iter_fields(pattern):
        if after is not None and field not in _NOT_COMPARED:
            after = _match(value, getattr(found, field), after)
    return after


def _match_list(patterns: Sequence[object], found: Sequence[object], bound: Bound) -> Bound | None:
    if not patterns:
        return None if found else bound
    if _is_ellipsis(patterns[0]):
        rests = (_match_list(patterns[1:], found[skipped:], bound) for skipped in range(len(found) + 1))
        return next((rest for rest in rests if rest is not None), None)
    if not found:
        return None
    after = _match(patterns[0], found[0], bound)
    return None if after is None else _match_list(patterns[1:], found[1:], after)


def _match_call(pattern: ast.Call, found: ast.Call, bound: Bound) -> Bound | None:
    """Keyword arguments may stand in any order. Beside ``...`` there may be more of them than the pattern names."""
    after = _match(pattern.func, found.func, bound)
    after = None if after is None else _match_list(pattern.args, found.args, after)
    left = list(found.keywords)
    for keyword in pattern.keywords:
        if after is None:
            return None
        matches = ((given, _match_fields(keyword, given, after)) for given in left)
        given, after = next(((given, match) for given, match in matches if match is not None), (keyword, None))
        left = [other for other in left if other is not given]
    return None if left and not any(map(_is_ellipsis, pattern.args)) else after


def _bind(wildcard: str, found: object, bound: Bound) -> Bound | None:
    if wildcard in bound:
        return bound if _same(bound[wildcard], found) else None
    return {**bound, wildcard: found}


def _same(one: object, other: object) -> bool:
    def text(code: object) -> str:
        return ast.unparse(code) if isinstance(code, ast.AST) else repr(code)

    return type(one) is type(other) and text(one) == text(other)


def _wildcard_of(pattern: object) -> str | None:
    match pattern:
        case ast.Name(id=name) | ast.Expr(value=ast.Name(id=name)) if is_wildcard(name):
            return name
        case _:
            return None


def _is_ellipsis(pattern: object) -> bool:
    match pattern:
        case ast.Constant(value=value) | ast.Expr(value=ast.Constant(value=value)):
            return value is ...
        case _:
            return False


def _fill(new: ast.AST, bound: Bound) -> ast.AST:
    """Return a copy of a part of the replacement, with the code that the wildcards matched."""
    filled = _Filler(bound).visit(deepcopy(new))
    return ast.fix_missing_locations(cast(ast.AST, filled))


class _Filler(ast.NodeTransformer):
    def __init__(self, bound: Bound) -> None:
        self._bound = bound

    def generic_visit(self, node: ast.AST) -> ast.AST:
        wildcard = _wildcard_of(node)
        if wildcard is not None:
            found = self._matched(wildcard)
            if isinstance(node, ast.Name):
                return ast.Name(found, ast.Load()) if isinstance(found, str) else deepcopy(cast(ast.AST, found))
            if isinstance(found, ast.stmt):
                return deepcopy(found)
        for field, value in ast.iter_fields(node):
            if isinstance(value, str) and not isinstance(node, ast.Constant) and is_wildcard(value):
                setattr(node, field, self._matched_name(value))
        return super().generic_visit(node)

    def _matched(self, wildcard: str) -> object:
        if wildcard not in self._bound:
            raise PatternError(f"{wildcard} is in the replacement and not in the pattern")
        return self._bound[wildcard]

    def _matched_name(self, wildcard: str) -> str:
        found = self._matched(wildcard)
        if not isinstance(found, str):
            raise PatternError(f"{wildcard} stands for a name in the replacement and for other code in the pattern")
        return found
