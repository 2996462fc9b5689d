"""The routes ``/openapi.json`` and ``/docs``: the description of the API, for programs and for people."""

from collections.abc import Sequence
from functools import cached_property
from importlib.resources import files

from msgspec.json import encode as encode_json
from starlette.requests import Request
from starlette.responses import Response

from batchline.api.openapi.document import describe
from batchline.api.responses import JSON
from batchline.domain.errors import NotFound

_PAGE = "docs.html"
_ASSETS = {"docs.css": "text/css"} | dict.fromkeys(("docs.js", "call.js", "element.js"), "text/javascript")
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    # A page and a script of different versions may not work together.
    "cache-control": "no-cache",
}


class DescriptionRoutes:
    """Serves the OpenAPI document and the page that shows it.

    Making the document takes half as long as starting the service, so it is made at the first request for it.
    """

    def __init__(self, *, bearer: bool, endpoints: Sequence[str], model: str) -> None:
        folder = files("batchline.api") / "docs"
        self._bearer, self._endpoints, self._model = bearer, endpoints, model
        self._files = {name: (folder / name).read_bytes() for name in (_PAGE, *_ASSETS)}

    @cached_property
    def _document(self) -> bytes:
        return encode_json(describe(bearer=self._bearer, endpoints=self._endpoints, model=self._model))

    async def openapi(self, request: Request) -> Response:
        return Response(self._document, headers=_HEADERS, media_type=JSON)

    async def docs(self, request: Request) -> Response:
        return Response(self._files[_PAGE], headers=_HEADERS, media_type="text/html")

    async def docs_asset(self, request: Request) -> Response:
        name: str = request.path_params["asset"]
        if name not in _ASSETS:
            raise NotFound(f"Unknown route: {request.method} {request.url.path}")
        return Response(self._files[name], headers=_HEADERS, media_type=_ASSETS[name])
