"""The pages that sign people in and out."""

import re
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from batchline.console.cookies import FORM_COOKIE, SESSION_COOKIE, clear_cookie, cookie_of, set_cookie
from batchline.console.guard import read_form, see_other
from batchline.console.pages import Pages
from batchline.console.sessions import (
    CSRF_FIELD,
    SESSION_SECONDS,
    Sessions,
    SignedIn,
    SignInNeeded,
    check_site,
    csrf_token,
)
from batchline.domain.errors import ApiError, ForgedRequest, InvalidCredentials, StoreDown, Unavailable

HOME = "/console/batches"
_FORM_SECONDS = 3600
_MAX_KEY_CHARACTERS = 512
_OWN_PATH = re.compile(r"/console/[A-Za-z0-9_/-]{0,200}")
"""The paths to which a person may be sent after signing in. A path with other characters could be on another site."""


class SignInPages:
    """Signs in and out."""

    def __init__(self, *, sessions: Sessions, pages: Pages, on_refusal: Callable[[ApiError], None]) -> None:
        self._sessions, self._pages, self._on_refusal = sessions, pages, on_refusal

    async def home(self, request: Request) -> ASGIApp:
        """Send a person to the console, which sends them on to sign in if they have not."""
        return see_other(HOME)

    async def show(self, request: Request) -> ASGIApp:
        """Show the form, or sign in by a one-time link."""
        try:
            if once := request.query_params.get("once"):
                return await self._use_link(request, once)
            await self._sessions.signed_in(request)
            return see_other(HOME)
        except SignInNeeded:
            return self._form(request, to=request.query_params.get("next", ""))
        except StoreDown:
            return self._pages.error(Unavailable(), {"session": None})

    async def sign_in(self, request: Request) -> ASGIApp:
        """Open a session for a key."""
        form: dict[str, str] = {}
        try:
            check_site(request)
            form = await read_form(request)
            # Without this cookie anyone could compute the token, and sign a person in to another project from outside.
            cookie = cookie_of(request, FORM_COOKIE)
            if not cookie or form.get(CSRF_FIELD) != csrf_token(cookie):
                raise ForgedRequest
            secret = await self._sessions.sign_in(request, form.get("key", "").strip()[:_MAX_KEY_CHARACTERS])
        except ApiError as error:
            self._on_refusal(error)
            is_wrong_key = isinstance(error, InvalidCredentials)
            message = "This is no valid key." if is_wrong_key else error.message
            return self._form(request, to=form.get("next", ""), message=message, status=error.status)
        except StoreDown:
            return self._pages.error(Unavailable(), {"session": None})
        return self._signed_in(request, secret, to=form.get("next", ""))

    async def sign_out(self, request: Request, visit: SignedIn) -> ASGIApp:
        """End the session."""
        await self._sessions.sign_out(request)
        response = see_other("/console/sign-in")
        clear_cookie(response, request, SESSION_COOKIE)
        return response

    async def _use_link(self, request: Request, once: str) -> Response:
        secret = await self._sessions.sign_in_by_link(once)
        if secret is None:
            message = "This link was used already, or is too old. Sign in with a key."
            return self._form(request, to="", message=message)
        return self._signed_in(request, secret, to="")

    def _signed_in(self, request: Request, secret: str, *, to: str) -> Response:
        response = see_other(own_path(to) or HOME)
        set_cookie(response, request, SESSION_COOKIE, secret, seconds=SESSION_SECONDS)
        clear_cookie(response, request, FORM_COOKIE)
        return response

    def _form(self, request: Request, *, to: str, message: str = "", status: int = 200) -> Response:
        """Return the form. ``to`` is the page that was asked for; it is checked when the form is sent."""
        secret = self._sessions.new_form_secret()
        values = {
            "session": None,
            "message": message,
            "csrf": csrf_token(secret),
            "next": to,
        }
        response = self._pages.render("sign_in.html", values, status=status)
        set_cookie(response, request, FORM_COOKIE, secret, seconds=_FORM_SECONDS)
        return response


def own_path(path: str) -> str | None:
    """Return a path of the console, or None if the path could be on another site."""
    return path if _OWN_PATH.fullmatch(path) else None
