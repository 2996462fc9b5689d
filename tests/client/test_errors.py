"""The error that the client raises for each answer (A1 to A4, A10)."""

import pytest

from batchline.client.errors import Denied, OutOfFunds, RequestRefused, ServerTrouble, Throttled, refusal


def _body(code: str) -> bytes:
    return b'{"error": {"message": "in words", "type": "t", "param": null, "code": "%s"}}' % code.encode()


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_request_error", RequestRefused),
        (401, "x", Denied),
        (403, "x", Denied),
        (404, "batch_not_found", RequestRefused),
        (408, "request_timeout", ServerTrouble),
        (429, "insufficient_quota", OutOfFunds),
        (429, "rate_limit_exceeded", Throttled),
        (500, "internal_error", ServerTrouble),
        (503, "service_unavailable", ServerTrouble),
    ],
)
def test_the_class_follows_from_status_and_code(status: int, code: str, kind: type[RequestRefused]) -> None:
    """Which errors are retried depends on it."""
    error = refusal(status, "Word", {}, _body(code))
    assert type(error) is kind
    assert (str(error), error.status, error.code) == ("in words", status, code)


def test_an_answer_without_an_error_body_is_described_by_its_status() -> None:
    latin, deep = b'{"error": {"message": "r\xe9seau"}}', b'{"error": {"x": ' + b"[" * 5000
    for body in (b"<html>", latin, deep):
        assert str(refusal(502, "Bad Gateway", {}, body)) == "the server answered 502 Bad Gateway"
    assert "redirects to https://other/v1" in str(refusal(301, "", {"location": "https://other/v1"}, b""))


@pytest.mark.parametrize(("text", "seconds"), [("7", 7.0), ("99999", 300.0), ("-1", None), ("soon", None), ("", None)])
def test_retry_after_is_a_bounded_number_of_seconds(text: str, seconds: float | None) -> None:
    """A4: a server cannot make a run wait for a day."""
    assert refusal(429, "", {"retry-after": text}, b"").retry_after == seconds


def test_a_long_message_is_cut() -> None:
    assert len(str(refusal(400, "", {}, b'{"error": {"message": "%s"}}' % (b"x" * 10_000)))) == 500
