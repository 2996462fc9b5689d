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
    is_late,
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
Find = Callable[[Request], Awaitable[V]]
HandlerOf = Callable[[Request, V], Awaitable[ASGIApp]]
ADMIN_HOME = "/console/admin"
_MAX_FIELDS = 200
_MAX_FORM_BYTES = 64 * 1024
"""A form may have as many bytes as the head of a request. Anyone may send the form that signs in, on every connection,
as slowly as the service allows, and each is held in memory until it is complete."""
_TYPED_FIELDS = ("url", "patch", "name", "expires", "model")
"""The fields of forms in which people type. The page of an error repeats them, so that they are not lost."""
_READING = frozenset({"GET", "HEAD"})
_FAILURE_STATUS = 500
"""The status from which on the service has failed, and has not refused anything."""


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

    def _handler(self, find: Find[V], handler: HandlerOf[V], *, page: str = "") -> Handler:
        """Return a handler that finds out who is signed in first. ``page`` is the path of the page with the form."""

        async def handle(request: Request) -> ASGIApp:
            visit: V | None = None
            back = page.format(**request.path_params)

            def error_page(error: ApiError) -> ASGIApp:
                if error.status < _FAILURE_STATUS:
                    self._metrics.console_refusals.labels(refusal_reason(error)).inc()
                return self._pages.error(error, _values(visit), back=back, typed=_typed(visit))

            # A failure outside of this handler, such as in an answer that is being made, becomes a page too.
            request.state.error_page = error_page
            try:
                visit = await find(request)
                return await handler(request, visit)
            except SignInNeeded:
                return sign_in_redirect(request)
            except ProjectNeeded:
                return see_other(ADMIN_HOME)
            except ApiError as error:
                self._count_bound(error)
                return error_page(error)
            except (StoreDown, ObjectsDown) as error:
                log.warning("storage unavailable, showing an error page", extra={"reason": str(error)})
                return error_page(Unavailable())

        return handle

    def action(self, handler: VisitHandler, *, page: str) -> Handler:
        """Return a handler for a form of a page, whose token is checked before anything is done."""
        return self._handler(self._sessions.visit, _checked(self._sessions.visit, handler), page=page)

    def action_of_anyone(self, handler: AnyHandler) -> Handler:
        """Return a handler for a form that everyone who is signed in may send, whatever their key may do."""
        return self._handler(self._sessions.signed_in, _checked(self._sessions.signed_in, handler))

    def admin_action(self, handler: AdminHandler) -> Handler:
        """Return a handler for a form of the administrator."""
        return self.admin_page(_checked(self._sessions.admin_visit, handler))

    def count_refusal(self, error: ApiError) -> None:
        """Count a request that was refused, as the API counts those that it refuses."""
        self._metrics.console_refusals.labels(refusal_reason(error)).inc()
        self._count_bound(error)

    def _count_bound(self, error: ApiError) -> None:
        if error.bound is not None:
            self._metrics.refusals.labels(error.bound).inc()

    def route(self, handler: Handler) -> Handler:
        """Return a handler for a route of the API that the console has too. It authenticates with ``SessionAuth``."""

        async def handle(request: Request, _visit: Visit) -> ASGIApp:
            return await handler(request)

        return self.page(handle)


def _checked(find: Find[V], handler: HandlerOf[V]) -> HandlerOf[V]:
    """Return a handler that reads the form first and checks its token."""

    async def check_and_handle(request: Request, visit: V) -> ASGIApp:
        form = await read_form(request)
        if is_late(request):
            visit = await find(request)
        visit.check_csrf(form.get(CSRF_FIELD))
        visit.form = form
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


def _typed(visit: SignedIn | None) -> dict[str, str]:
    """Return what a person typed into the form that was sent."""
    form = {} if visit is None else visit.form
    return {name: form[name] for name in _TYPED_FIELDS if form.get(name, "").strip()}
