"""The pages of a batch's lines: a table of them, and one line with its request and its answer side by side."""

import json
from typing import Any
from urllib.parse import urlencode

from msgspec import Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from batchline.api.services import ApiServices
from batchline.api.throttle import Throttle
from batchline.console.conversation import Conversation, answer_text, answered, asked, field, last_asked
from batchline.console.pages import Pages
from batchline.console.sessions import Visit
from batchline.console.shown_json import ShownText, shown_json, shown_text
from batchline.console.text import cut, size
from batchline.domain.errors import BatchNotFound, NotFound
from batchline.domain.line_errors import without_legacy
from batchline.pipeline.line_search import MAX_SEARCHED_BATCHES, MAX_SEARCHED_BYTES
from batchline.pipeline.line_table import LineFilter, LineState, ShownLine

_PAGE_LINES = 25
_PREVIEW_CHARACTERS = 160
_MAX_DIGITS = 9
_MAX_SEARCHED_CHARACTERS = 1000


class LinePreview(Struct, frozen=True, kw_only=True):
    """The beginning of a line's request and answer, as the table of lines shows it."""

    line: ShownLine
    request: str
    answer: str
    """The text of the answer, the result as it is if it has none, or why the line failed."""


class ShownSide(Struct, frozen=True, kw_only=True):
    """A request or a result as a page shows it: its texts, the whole as JSON, and as it is."""

    conversation: Conversation = Conversation()
    json: ShownText = ShownText()
    raw: ShownText = ShownText()


class LineView(Struct, frozen=True, kw_only=True):
    """A line as a page shows it."""

    line: ShownLine
    request: ShownSide
    result: ShownSide
    failure: str
    """The reason why it failed."""
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
            "wanted": _wanted_line(query.get("line", "")),
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
        result_file_id = batch.output_file_id if line.state is LineState.SUCCEEDED else batch.error_file_id
        values = {"batch": batch, "view": view_of(line), "result_file_id": result_file_id}
        return self._pages.render("line.html", visit.values | values)

    @staticmethod
    def _page_number(request: Request, given: dict[str, str]) -> int:
        """Return the page to show: ``page``, or the page that has ``line`` if that is given without a filter."""
        query = request.query_params
        line = _wanted_line(query.get("line", ""))
        if line is not None and not given:
            return (line - 1) // _PAGE_LINES + 1
        number = query.get("page", "1")
        return int(number) if _is_number(number) else 1


def preview_of(line: ShownLine) -> LinePreview:
    """Return what the table shows of a line. It makes none of the texts that only the page of a line shows."""
    result = _parse(line.result)
    answer = _failure(result) or answer_text(_answer_of(result)) or _decoded(line.result)
    return LinePreview(line=line, request=_request_preview(line), answer=cut(answer, _PREVIEW_CHARACTERS))


def _request_preview(line: ShownLine) -> str:
    if line.is_request_cut:
        return f"a request of {size(line.request_bytes)}"
    return cut(last_asked(field(_parse(line.request), "body")), _PREVIEW_CHARACTERS)


def view_of(line: ShownLine) -> LineView:
    """Return what a page shows of a line. What cannot be parsed is shown as it is."""
    request, result = _parse(line.request), _parse(line.result)
    raw = shown_text(_decoded(line.request))
    if line.is_request_cut:
        shown = f"The first {size(len(line.request or b''))} of {size(line.request_bytes)} were read."
        raw = ShownText(text=raw.text, notices=[*raw.notices, shown])
    return LineView(
        line=line,
        request=ShownSide(conversation=asked(field(request, "body")), json=_json(request), raw=raw),
        result=ShownSide(
            conversation=answered(_answer_of(result)), json=_json(result), raw=shown_text(_decoded(line.result))
        ),
        failure=_failure(result),
        tokens=_tokens(_answer_of(result)),
    )


def _wanted_line(text: str) -> int | None:
    """Return the number of the line that a person jumps to, if it is one."""
    return int(text.strip()) if _is_number(text.strip()) else None


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) <= _MAX_DIGITS and int(text) > 0


def _parse(line: bytes | None) -> Any:
    try:
        return None if line is None else json.loads(line)
    except (ValueError, RecursionError):
        return None


def _decoded(line: bytes | None) -> str:
    return "" if line is None else line.decode("utf-8", "replace").rstrip("\n")


def _json(value: Any) -> ShownText:
    return ShownText() if value is None else shown_json(value)


def _answer_of(result: Any) -> Any:
    return field(field(result, "response"), "body")


def _failure(result: Any) -> str:
    message = field(field(result, "error"), "message")
    return without_legacy(message) if isinstance(message, str) else ""


def _tokens(answer: Any) -> dict[str, int]:
    usage = field(answer, "usage")
    named = {"input": ("prompt_tokens", "input_tokens"), "output": ("completion_tokens", "output_tokens")}
    counted = {kind: _first_count(usage, names) for kind, names in named.items()}
    return {kind: number for kind, number in counted.items() if number is not None}


def _first_count(usage: Any, names: tuple[str, ...]) -> int | None:
    found = (field(usage, name) for name in names)
    return next((value for value in found if type(value) is int), None)
