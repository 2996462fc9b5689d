"""Wraps the handlers of the console: who is signed in, the token of each form, and a page for each error."""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import parse_qsl, quote

from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp

from batchline.api.methods import Handler
from batchline.api.request_context import read_body
from batchline.console.pages import Pages
from batchline.console.sessions import (
    CSRF_FIELD,
    AdminVisit,
    ProjectNeeded,
    Sessions,
    SignedIn,
    SignInNeeded,
    Visit,
)
from batchline.domain.errors import (
    ApiError,
    ForgedRequest,
    InvalidCredentials,
    InvalidRequest,
    MissingScope,
    ObjectsDown,
    StoreDown,
    TooLarge,
    Unavailable,
)
from batchline.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

VisitHandler = Callable[[Request, Visit], Awaitable[ASGIApp]]
AnyHandler = Callable[[Request, SignedIn], Awaitable[ASGIApp]]
AdminHandler = Callable[[Request, AdminVisit], Awaitable[ASGIApp]]
V = TypeVar("V", bound=SignedIn)
ADMIN_HOME = "/console/admin"
_MAX_FIELDS = 200
_MAX_FORM_BYTES = 64 * 1024
"""A form may have as many bytes as the head of a request. Anyone may send the form that signs in, on every connection,
as slowly as the service allows, and each is held in memory until it is complete."""
_READING = frozenset({"GET", "HEAD"})


class Guard:
    """Makes handlers of pages, actions and downloads."""

    def __init__(self, *, sessions: Sessions, pages: Pages, metrics: Metrics) -> None:
        self._sessions, self._pages, self._metrics = sessions, pages, metrics

    def page(self, handler: VisitHandler) -> Handler:
        """Return a handler for a person who is signed in."""
        return self._handler(self._sessions.visit, handler)

    def admin_page(self, handler: AdminHandler) -> Handler:
        """Return a handler for the administrator. For everyone else who is signed in, the page does not exist."""
        return self._handler(self._sessions.admin_visit, handler)

    def _handler(
        self, find: Callable[[Request], Awaitable[V]], handler: Callable[[Request, V], Awaitable[ASGIApp]]
    ) -> Handler:
        async def handle(request: Request) -> ASGIApp:
            visit: V | None = None
            try:
                visit = await find(request)
                return await handler(request, visit)
            except SignInNeeded:
                return sign_in_redirect(request)
            except ProjectNeeded:
                return see_other(ADMIN_HOME)
            except ApiError as error:
                self.count_refusal(error)
                return self._pages.error(error, _values(visit))
            except (StoreDown, ObjectsDown) as error:
                log.warning("storage unavailable, showing an error page", extra={"reason": str(error)})
                return self._pages.error(Unavailable(), _values(visit))

        return handle

    def action(self, handler: VisitHandler) -> Handler:
        """Return a handler for a form, whose token is checked before anything is done."""
        return self.page(_checked(handler))

    def action_of_anyone(self, handler: AnyHandler) -> Handler:
        """Return a handler for a form that everyone who is signed in may send, whatever their key may do."""
        return self._handler(self._sessions.signed_in, _checked(handler))

    def admin_action(self, handler: AdminHandler) -> Handler:
        """Return a handler for a form of the administrator."""
        return self.admin_page(_checked(handler))

    def count_refusal(self, error: ApiError) -> None:
        """Count a request that was refused, as the API counts those that it refuses."""
        self._metrics.console_refusals.labels(refusal_reason(error)).inc()
        if error.bound is not None:
            self._metrics.refusals.labels(error.bound).inc()

    def route(self, handler: Handler) -> Handler:
        """Return a handler for a route of the API that the console has too. It authenticates with ``SessionAuth``."""

        async def handle(request: Request, _visit: Visit) -> ASGIApp:
            return await handler(request)

        return self.page(handle)


def _checked(handler: Callable[[Request, V], Awaitable[ASGIApp]]) -> Callable[[Request, V], Awaitable[ASGIApp]]:
    """Return a handler that reads the form first and checks its token."""

    async def check_and_handle(request: Request, visit: V) -> ASGIApp:
        visit.form = await read_form(request)
        visit.check_csrf(visit.form.get(CSRF_FIELD))
        return await handler(request, visit)

    return check_and_handle


def sign_in_redirect(request: Request) -> RedirectResponse:
    """Return a redirect to the sign-in page, which leads back to the requested page afterwards."""
    path = request.url.path
    back = "" if request.method not in _READING or path in ("/", "/console") else f"?next={quote(path)}"
    return RedirectResponse(f"/console/sign-in{back}", 303, headers={"cache-control": "no-store"})


def see_other(path: str) -> RedirectResponse:
    """Return a redirect to the page that shows what an action did."""
    return RedirectResponse(path, 303, headers={"cache-control": "no-store"})


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form. Of fields with the same name, the values are joined by line ends."""
    body = await read_body(
        request,
        max_bytes=_MAX_FORM_BYTES,
        too_large=TooLarge(f"The form exceeds {_MAX_FORM_BYTES} bytes"),
        cut_off=InvalidRequest("The form was cut off"),
    )
    try:
        pairs = parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise InvalidRequest(f"The form has more than {_MAX_FIELDS} fields") from None
    fields: dict[str, str] = {}
    for name, value in pairs:
        fields[name] = f"{fields[name]}\n{value}" if name in fields else value
    return fields


def refusal_reason(error: ApiError) -> str:
    """Return the reason for which the console refused a request, as its metric names it."""
    if isinstance(error, ForgedRequest):
        return "forged_form"
    if isinstance(error, InvalidCredentials):
        return "wrong_key"
    if isinstance(error, MissingScope):
        return "missing_scope"
    if error.status == 404:
        return "not_found"
    return "bound" if error.bound is not None else "other"


def _values(visit: SignedIn | None) -> dict[str, object]:
    return {"session": None} if visit is None else visit.values
