"""How a server listens, and its end: A14, F5."""

import math
from collections.abc import Callable

import pytest

from batchline.api.server import backlog_for
from tests.support.api_server import FORM, LINE, Api, field, file_part, form, read_reply, read_to_end, wait_until

BODY = form(field("purpose", "batch"), file_part(LINE * 100))


def upload_head(api: Api) -> bytes:
    return api.head("POST /v1/files", f"content-type: {FORM['content-type']}", f"content-length: {len(BODY)}")


def test_a_request_in_flight_ends_well_after_the_stop(serve: Callable[..., Api]) -> None:
    """F5"""
    api = serve()
    with api.connect() as sock, api.connect() as idle:
        sock.sendall(upload_head(api) + BODY[:5000])
        wait_until(lambda: api.uploading() == 1)
        api.stop()
        assert read_to_end(idle) == b""
        sock.sendall(BODY[5000:])
        reply = read_reply(sock)
        assert reply.status == 200
        assert reply.headers["connection"] == "close"
        assert read_to_end(sock) == b""
    api.join()
    assert api.uploading() == 0


def test_a_request_that_outlasts_the_grace_is_told_and_cleans_up(serve: Callable[..., Api]) -> None:
    """F5, A6, B2: before ``serve`` returns, so that the store is still there to do it."""
    api = serve(shutdown_grace_seconds=0)
    with api.connect() as sock:
        sock.sendall(upload_head(api) + BODY[:5000])
        wait_until(lambda: api.uploading() == 1)
        api.stop()
        reply = read_reply(sock)
        assert reply.status == 503
        assert reply.error["type"] == "internal_error"
        assert reply.headers["x-request-id"]
    api.join()
    assert api.uploading() == 0
    assert api.stored() == []


@pytest.mark.parametrize(("limit", "backlog"), [(math.inf, 1024), (4096, 1024), (128, 64), (3, 16)])
def test_connections_that_wait_cannot_take_the_last_descriptors(limit: float, backlog: int) -> None:
    """A14: all of them are accepted before one is closed again."""
    assert backlog_for(limit) == backlog
