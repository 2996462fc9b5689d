"""The names of the cookies, which two instances on one host must not share."""

import pytest
from starlette.requests import Request
from starlette.responses import Response

from batchline.console.cookies import SESSION_COOKIE, cookie_of, set_cookie


def _request(host: str, **headers: str) -> Request:
    sent = {"host": host} | {name.replace("_", "-"): value for name, value in headers.items()}
    return Request(
        {
            "type": "http",
            "scheme": "http",
            "path": "/console",
            "query_string": b"",
            "server": ("127.0.0.1", 8000),
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        }
    )


def _name_at(request: Request) -> str:
    response = Response()
    set_cookie(response, request, SESSION_COOKIE, "secret", seconds=60)
    return response.headers["set-cookie"].partition("=")[0]


def test_instances_on_two_ports_of_a_host_do_not_sign_each_other_out() -> None:
    """A browser sends the cookies of a host to all of its ports."""
    first, second = (_request(f"127.0.0.1:{port}") for port in (8000, 8001))
    assert _name_at(first) != _name_at(second)
    held = f"{_name_at(first)}=one; {_name_at(second)}=two"
    values = [cookie_of(_request(f"127.0.0.1:{port}", cookie=held), SESSION_COOKIE) for port in (8000, 8001)]
    assert values == ["one", "two"]


@pytest.mark.parametrize("host", ["batch.example", "[::1]", "node-1:8000", "node-2:8001", "batch.example:x"])
def test_behind_a_proxy_the_name_is_always_the_same(host: str) -> None:
    """Its Host header may name any node of a fleet, and a session holds on all of them."""
    assert _name_at(_request(host, x_forwarded_for="192.0.2.1")) == "batchline_session"


@pytest.mark.parametrize("host", ["batch.example", "[::1]", "batch.example:x", "batch.example:123456"])
def test_an_address_without_a_port_has_the_short_name(host: str) -> None:
    assert _name_at(_request(host)) == "batchline_session"
