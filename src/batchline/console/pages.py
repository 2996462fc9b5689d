"""Renders the pages of the console, with headers that allow them to load and to call nothing but this service."""

from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import Response

from batchline import __version__
from batchline.console import text
from batchline.domain.errors import ApiError

ASSETS = {"console.css": "text/css", "console.js": "text/javascript", "icon.svg": "image/svg+xml"}
_SECURITY = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_PAGE_HEADERS = _SECURITY | {"cache-control": "no-store"}
# A page and a script of different versions may not work together.
_ASSET_HEADERS = _SECURITY | {"cache-control": "no-cache"}
_FILTERS: dict[str, Callable[..., Any]] = {
    "age": text.age,
    "count": text.count,
    "cut": text.cut,
    "day": text.day,
    "moment": text.moment,
    "money": text.money,
    "name": text.name_in,
    "plural": text.plural,
    "rate": text.rate,
    "shell": text.shell,
    "size": text.size,
    "span": text.span,
    "span_of": text.span_of,
    "stamp": text.stamp,
}


class Pages:
    """Renders templates. Every value is escaped, and every text made inert."""

    def __init__(self) -> None:
        self._templates = Environment(
            loader=PackageLoader("batchline.console"),
            autoescape=True,
            finalize=text.inert,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._templates.filters |= _FILTERS
        self._templates.globals |= {"version": __version__, "is_admin": False}
        folder = files("batchline.console") / "assets"
        self._assets = {name: (folder / name).read_bytes() for name in ASSETS}

    def render(self, name: str, values: Mapping[str, Any], *, status: int = 200) -> Response:
        """Return a page."""
        return Response(self.fragment(name, values), status, headers=_PAGE_HEADERS, media_type="text/html")

    def fragment(self, name: str, values: Mapping[str, Any]) -> str:
        """Return a page, or a part of one, as text."""
        return self._templates.get_template(name).render(values)

    def error(
        self, error: ApiError, values: Mapping[str, Any], *, back: str = "", typed: Mapping[str, str] | None = None
    ) -> Response:
        """Return the page of an error, with a link to the page of the form that was sent and what was typed there."""
        values = {**values, "error": error, "back": back, "typed": typed or {}}
        response = self.render("error.html", values, status=error.status)
        for name, value in error.headers.items():
            response.headers[name] = value
        return response

    def asset(self, name: str) -> Response | None:
        """Return a stylesheet, a script or an image; None if there is none of that name."""
        if name not in ASSETS:
            return None
        return Response(self._assets[name], headers=_ASSET_HEADERS, media_type=ASSETS[name])
