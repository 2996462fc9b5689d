"""Lists: what a page may ask for, and its envelope."""

import re
from collections.abc import Iterable, Sequence

from starlette.datastructures import QueryParams
from starlette.responses import Response

from batchline.api.responses import json_response
from batchline.domain.errors import InvalidRequest
from batchline.domain.records import Batch, File

_INTEGER = re.compile(r"-?[0-9]+")
_MAX_DIGITS = 18


def integer(query: QueryParams, name: str, *, code: str | None = None) -> int | None:
    """Raises InvalidRequest for anything but an integer."""
    text = query.get(name)
    if text is None:
        return None
    if not _INTEGER.fullmatch(text):
        raise InvalidRequest(f"{name} must be an integer", code=code, param=name)
    # Longer numbers mean no more than a very large one, and would cost more to read.
    return int(text[:_MAX_DIGITS])


def choice(query: QueryParams, name: str, allowed: Iterable[str]) -> str | None:
    value = query.get(name)
    if value is not None and value not in allowed:
        raise InvalidRequest(f"{name} must be one of: {', '.join(allowed)}", param=name)
    return value


def page(rows: Sequence[File] | Sequence[Batch] | None, *, limit: int) -> Response:
    """Of up to ``limit`` + 1 rows; None for a cursor that names nothing."""
    if rows is None:
        raise InvalidRequest("after names nothing in this project", param="after")
    shown = rows[:limit]
    return json_response(
        {
            "object": "list",
            "data": [row.wire() for row in shown],
            "first_id": shown[0].id if shown else None,
            "last_id": shown[-1].id if shown else None,
            "has_more": len(rows) > limit,
        }
    )
