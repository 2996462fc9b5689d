"""Reads the query parameters of lists and cuts their rows into pages."""

import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

from starlette.datastructures import QueryParams

from batchline.domain.errors import InvalidRequest

_INTEGER = re.compile(r"-?[0-9]+")
_MAX_DIGITS = 18

T = TypeVar("T")


def integer(query: QueryParams, name: str, *, code: str | None = None) -> int | None:
    """Return a parameter as an integer, or None if it is absent. Raise InvalidRequest for anything else."""
    text = query.get(name)
    if text is None:
        return None
    if not _INTEGER.fullmatch(text):
        raise InvalidRequest(f"{name} must be an integer", code=code, param=name)
    # Longer numbers mean no more than a very large one, and would cost more to read.
    return int(text[:_MAX_DIGITS])


def choice(query: QueryParams, name: str, allowed: Iterable[str]) -> str | None:
    """Return a parameter that is one of the allowed values, or None if it is absent. Raise InvalidRequest if not."""
    value = query.get(name)
    if value is not None and value not in allowed:
        raise InvalidRequest(f"{name} must be one of: {', '.join(allowed)}", param=name)
    return value


def page(rows: Sequence[T] | None, *, limit: int) -> tuple[Sequence[T], bool]:
    """Return the first ``limit`` of up to ``limit`` + 1 rows, and whether more follow.

    Raise InvalidRequest if ``rows`` is None: the cursor names nothing in this project.
    """
    if rows is None:
        raise InvalidRequest("after names nothing in this project", param="after")
    return rows[:limit], len(rows) > limit
