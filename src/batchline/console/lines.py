"""The pages of a batch's lines: a table of them, and one line with its request and its answer side by side."""

import json
from typing import Any
from urllib.parse import urlencode

from msgspec import Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from batchline.api.services import ApiServices
from batchline.api.throttle import Throttle
from batchline.console.pages import Pages
from batchline.console.sessions import Visit
from batchline.console.text import cut
from batchline.domain.errors import BatchNotFound, NotFound
from batchline.domain.line_errors import without_legacy
from batchline.pipeline.line_search import MAX_SEARCHED_BATCHES, MAX_SEARCHED_BYTES
from batchline.pipeline.line_table import LineFilter, LineState, ShownLine

_PAGE_LINES = 25
_PREVIEW_CHARACTERS = 160
_SHOWN_CHARACTERS = 200_000
"""A text that is longer is shown cut: a page with all of it would be too large for a browser."""
_MAX_DIGITS = 9
_MAX_SEARCHED_CHARACTERS = 1000


class ShownMessage(Struct, frozen=True, kw_only=True):
    """A message of a chat."""

    role: str
    text: str


class LinePreview(Struct, frozen=True, kw_only=True):
    """The beginning of a line's request and answer, as the table of lines shows it."""

    line: ShownLine
    request: str
    answer: str
    """The text of the answer, the result as it is if it has none, or why the line failed."""


class LineView(Struct, frozen=True, kw_only=True):
    """A line as a page shows it."""

    line: ShownLine
    messages: list[ShownMessage]
    answer: str
    message: str
    """The reason why it failed."""
    request_json: str
    result_json: str
    request_raw: str
    result_raw: str
    tokens: dict[str, int]


class LinePages:
    """Shows the lines of batches."""

    def __init__(self, services: ApiServices, *, pages: Pages) -> None:
        self._services, self._pages = services, pages
        limit = services.settings.max_project_requests
        self._searches = Throttle(limit, of="reads of results", bound="project_result_reads")

    async def list(self, request: Request, visit: Visit) -> ASGIApp:
        """Show a page of the lines that match a filter."""
        batch_id, query = request.path_params["batch_id"], request.query_params
        state = query.get("status", "")
        wanted = LineFilter(
            state=LineState(state) if state in tuple(LineState) else None,
            code=query.get("code") or None,
            text=query.get("search", "").strip(),
        )
        given = {name: query[name] for name in ("status", "code", "search") if query.get(name)}
        found = await self._services.line_table.page(
            visit.project_id, batch_id, wanted, page=self._page_number(request, given), size=_PAGE_LINES
        )
        values = visit.values | {
            "batch": found.batch,
            "found": found,
            "lines": [preview_of(line) for line in found.lines],
            "filters": {"status": state, "code": query.get("code", ""), "search": query.get("search", "")},
            "states": list(LineState),
            "codes": found.codes,
            "link": lambda number: f"?{urlencode({**given, 'page': number})}",
        }
        return self._pages.render("lines.html", values)

    async def search(self, request: Request, visit: Visit) -> ASGIApp:
        """Show the lines of recent batches that have a custom_id."""
        query = request.query_params
        custom_id, found = query.get("custom_id", "").strip()[:_MAX_SEARCHED_CHARACTERS], None
        if custom_id:
            with self._searches.slot(visit.project_id):
                after = query.get("after") or None
                found = await self._services.line_search.find(visit.project_id, custom_id, after=after)
            if found is None:
                raise BatchNotFound(query["after"])
        values = visit.values | {
            "custom_id": custom_id,
            "found": found,
            "older": f"?{urlencode({'custom_id': custom_id, 'after': found.next})}" if found and found.next else None,
            "max_bytes": MAX_SEARCHED_BYTES,
            "max_batches": MAX_SEARCHED_BATCHES,
            "now": self._services.clock.now(),
        }
        return self._pages.render("search.html", values)

    async def show(self, request: Request, visit: Visit) -> ASGIApp:
        """Show one line."""
        batch_id, number = request.path_params["batch_id"], request.path_params["number"]
        if not number.isdecimal() or not number.isascii() or len(number) > _MAX_DIGITS:
            raise NotFound("There is no such line")
        batch, line = await self._services.line_table.line(visit.project_id, batch_id, int(number))
        return self._pages.render("line.html", visit.values | {"batch": batch, "view": view_of(line)})

    @staticmethod
    def _page_number(request: Request, given: dict[str, str]) -> int:
        """Return the page to show: ``page``, or the page that has ``line`` if that is given without a filter."""
        query = request.query_params
        line = query.get("line", "").strip()
        if _is_number(line) and not given:
            return (int(line) - 1) // _PAGE_LINES + 1
        number = query.get("page", "1")
        return int(number) if _is_number(number) else 1


def preview_of(line: ShownLine) -> LinePreview:
    """Return what the table shows of a line. It makes none of the texts that only the page of a line shows."""
    request, result = _parse(line.request), _parse(line.result)
    body = _field(request, "body")
    messages = _list(_field(body, "messages"))
    asked = _text(_field(messages[-1], "content")) if messages else _text(_field(body, "input"))
    answer = _failure(result) or _answer_text(_field(_field(result, "response"), "body")) or _raw(line.result)
    return LinePreview(line=line, request=cut(asked, _PREVIEW_CHARACTERS), answer=cut(answer, _PREVIEW_CHARACTERS))


def view_of(line: ShownLine) -> LineView:
    """Return what a page shows of a line. What cannot be parsed is shown as it is."""
    request, result = _parse(line.request), _parse(line.result)
    body = _field(request, "body")
    messages = [_message(each) for each in _list(_field(body, "messages"))]
    answer = _field(_field(result, "response"), "body")
    return LineView(
        line=line,
        messages=messages,
        answer=_answer_text(answer),
        message=_failure(result),
        request_json=_pretty(request),
        result_json=_pretty(result),
        request_raw=_raw(line.request),
        result_raw=_raw(line.result),
        tokens=_tokens(answer),
    )


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) <= _MAX_DIGITS and int(text) > 0


def _parse(line: bytes | None) -> Any:
    try:
        return None if line is None else json.loads(line)
    except (ValueError, RecursionError):
        return None


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    """Return a text, or the texts of the parts of a message."""
    if isinstance(value, str):
        return value[:_SHOWN_CHARACTERS]
    parts = []
    for part in _list(value):
        text = _field(part, "text")
        parts.append(text if isinstance(text, str) else f"[{_field(part, 'type') or 'part'}]")
    return "\n".join(parts)[:_SHOWN_CHARACTERS]


def _message(value: Any) -> ShownMessage:
    return ShownMessage(role=cut(_text(_field(value, "role")), 20) or "message", text=_text(_field(value, "content")))


def _answer_text(answer: Any) -> str:
    """Return the text of a chat completion or of a response; empty for other answers."""
    choices = _list(_field(answer, "choices"))
    if choices:
        return _text(_field(_field(choices[0], "message"), "content"))
    return "\n".join(_text(_field(item, "content")) for item in _list(_field(answer, "output")))


def _failure(result: Any) -> str:
    return without_legacy(_text(_field(_field(result, "error"), "message")))


def _tokens(answer: Any) -> dict[str, int]:
    usage = _field(answer, "usage")
    named = {"input": ("prompt_tokens", "input_tokens"), "output": ("completion_tokens", "output_tokens")}
    counted = {kind: _first_count(usage, names) for kind, names in named.items()}
    return {kind: number for kind, number in counted.items() if number is not None}


def _first_count(usage: Any, names: tuple[str, ...]) -> int | None:
    found = (_field(usage, name) for name in names)
    return next((value for value in found if type(value) is int), None)


def _pretty(value: Any) -> str:
    if value is None:
        return ""
    return json.dumps(value, indent=2, ensure_ascii=False)[:_SHOWN_CHARACTERS]


def _raw(line: bytes | None) -> str:
    return "" if line is None else line.decode("utf-8", "replace").rstrip("\n")[:_SHOWN_CHARACTERS]
