"""Reads and sets the cookies of the console."""

from starlette.requests import Request
from starlette.responses import Response

from batchline.api.failure_limit import is_relayed

SESSION_COOKIE, FORM_COOKIE, WEBHOOK_COOKIE = "batchline_session", "batchline_form", "batchline_webhook"
_MAX_PORT_DIGITS = 5


def cookie_of(request: Request, name: str) -> str:
    """Return the value of a cookie of this service; empty if there is none."""
    return request.cookies.get(_cookie_name(request, name), "")


def set_cookie(response: Response, request: Request, name: str, value: str, *, seconds: int) -> None:
    """Set a cookie that scripts cannot read and that other sites cannot send."""
    response.set_cookie(
        _cookie_name(request, name),
        value,
        max_age=seconds,
        path="/",
        httponly=True,
        samesite="strict",
        secure=_is_encrypted(request),
    )


def clear_cookie(response: Response, request: Request, name: str) -> None:
    """Remove a cookie."""
    set_cookie(response, request, name, "", seconds=0)


def _cookie_name(request: Request, name: str) -> str:
    """Return the full name of a cookie: with the port that the browser asked, if it asked no proxy.

    A browser sends the cookies of a host to all of its ports, and another instance may listen on another one. Behind a
    proxy the Host header may name any of the instances, between which a session must be the same.
    """
    _, _, port = request.headers.get("host", "").rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) <= _MAX_PORT_DIGITS
    return f"{name}_{port}" if is_port and not is_relayed(request) else name


def _is_encrypted(request: Request) -> bool:
    """Return whether the browser uses TLS, to this service or to a proxy in front of it."""
    forwarded = request.headers.get("forwarded", "").lower()
    return (
        request.url.scheme == "https"
        or request.headers.get("x-forwarded-proto", "").split(",")[0].strip().lower() == "https"
        or "proto=https" in forwarded
    )
