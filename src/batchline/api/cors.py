"""Answers CORS requests: every route is open to the configured origins.

The API uses no cookies. The console does, but no answer has ``access-control-allow-credentials``, so a browser shows
no other origin what the console answers to a cookie.

Starlette's CORSMiddleware is not used: it answers preflights of every path alike, and this API names the methods of the
route.
"""

import re
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import Response

_HEADERS = ("authorization", "content-type", "idempotency-key", "range", "x-api-key", "x-project-id")
_EXPOSED = (
    "content-disposition, content-range, retry-after, x-batch-id, x-batchline-replayed, x-request-id, x-should-retry"
)
_TOKEN = re.compile(r"[a-z0-9-]{1,64}")
_MAX_REQUESTED_HEADERS = 64


class Cors:
    """The CORS headers for a set of allowed origins; ``*`` allows every origin."""

    def __init__(self, *, origins: Collection[str]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origins)

    def headers(self, origin: str | None) -> dict[str, str]:
        """Return the CORS headers of an answer to a request from this origin."""
        vary = {} if self._any else {"vary": "origin"}
        if origin is None or not (self._any or origin in self._origins):
            return vary
        allowed = "*" if self._any else origin
        return vary | {"access-control-allow-origin": allowed, "access-control-expose-headers": _EXPOSED}


def options_response(request: Headers, *, allow: str) -> Response:
    """Return the answer to OPTIONS on a route with the methods ``allow``, whether it is a preflight or not."""
    allowed = {
        "access-control-allow-methods": allow,
        "access-control-allow-headers": _allowed_headers(request.get("access-control-request-headers", "")),
        "access-control-max-age": "600",
    }
    return Response(status_code=204, headers={"allow": allow} | allowed)


def _allowed_headers(requested: str) -> str:
    """Return our headers and the requested ones: the SDKs send a dozen more, and no header grants access by itself."""
    names = (name.strip().lower() for name in requested.split(",", _MAX_REQUESTED_HEADERS)[:_MAX_REQUESTED_HEADERS])
    return ", ".join(dict.fromkeys((*_HEADERS, *(name for name in names if _TOKEN.fullmatch(name)))))
