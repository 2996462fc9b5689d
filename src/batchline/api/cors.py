"""What browsers on other origins may do: all of the API, as it takes no cookies; from which origins is a setting."""

import re
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import Response

_METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
_HEADERS = ("authorization", "content-type", "idempotency-key", "range", "x-api-key", "x-project-id")
_EXPOSED = (
    "content-disposition, content-range, retry-after, x-batch-id, x-batchline-replayed, x-request-id, x-should-retry"
)
_TOKEN = re.compile(r"[a-z0-9-]{1,64}")
_MAX_HEADERS = 64


class Cors:
    def __init__(self, *, origins: Collection[str]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origins)

    def headers(self, origin: str | None) -> dict[str, str]:
        """For every answer; who may read it depends on the request's origin."""
        vary = {} if self._any else {"vary": "origin"}
        if origin is None or not (self._any or origin in self._origins):
            return vary
        allowed = "*" if self._any else origin
        return vary | {"access-control-allow-origin": allowed, "access-control-expose-headers": _EXPOSED}

    def preflight(self, request: Headers) -> Response:
        allowed = {
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": _allowed_headers(request.get("access-control-request-headers", "")),
            "access-control-max-age": "600",
        }
        return Response(status_code=204, headers={"allow": _METHODS} | allowed)


def _allowed_headers(requested: str) -> str:
    """Ours, and what is asked for: the SDKs send a dozen more, and no header opens anything by itself."""
    names = (name.strip().lower() for name in requested.split(",", _MAX_HEADERS)[:_MAX_HEADERS])
    return ", ".join(dict.fromkeys((*_HEADERS, *(name for name in names if _TOKEN.fullmatch(name)))))
