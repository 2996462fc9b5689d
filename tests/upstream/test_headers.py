"""Which headers the HTTP client reads and sends, and which settings it refuses."""

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from batchline.domain.rate_limits import Quota, RateLimits
from batchline.domain.replies import Answer, Fault, Reply
from batchline.upstream.http import HttpUpstream
from tests.support.raw_server import BODY, ManualClock, Peer, answer, client, serving

NOW = 784_111_777  # Sun, 06 Nov 1994 08:49:37 GMT


def ask(*headers: str, status: str = "429 Too Many Requests") -> Answer:
    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer(b"{}", *headers, status=status))

    async def main() -> Answer:
        async with serving(behave) as wire, client(wire.port, clock=ManualClock(NOW)) as upstream:
            reply = await upstream.post("/v1/chat/completions", BODY)
            assert isinstance(reply, Answer), reply
            return reply

    return uvloop.run(main())


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ([], None),
        (["Retry-After: 0"], 0),
        (["Retry-After: 7"], 7),
        (["retry-after: 0.25"], 0.25),
        (["Retry-After: 100000"], 100_000),
        (["Retry-After: Sun, 06 Nov 1994 08:50:07 GMT"], 30),
        (["Retry-After: Sunday, 06-Nov-94 08:50:07 GMT"], 30),
        (["Retry-After: Sun Nov  6 08:50:07 1994"], 30),
        (["Retry-After: Sun, 06 Nov 1994 08:00:00 GMT"], 0),
        (["Retry-After-Ms: 1500"], 1.5),
        (["Retry-After: 9", "Retry-After-Ms: 1500"], 1.5),
        (["Retry-After: 9", "Retry-After-Ms: soon"], 9),
        (["Retry-After: -5"], None),
        (["Retry-After: nan"], None),
        (["Retry-After: inf"], None),
        (["Retry-After: 1e3"], None),
        (["Retry-After: 1_000"], None),
        (["Retry-After: soon"], None),
        (["Retry-After: Sun, 99 Nov 1994 08:49:37 GMT"], None),
        (["Retry-After:"], None),
        (["Retry-After: " + "9" * 400], None),
    ],
)
def test_retry_after_is_seconds_from_now_or_nothing(headers: list[str], seconds: float | None) -> None:
    """D3: seconds, decimals, milliseconds and dates are read; an invalid value is ignored, and none is negative."""
    assert ask(*headers).retry_after == seconds


@pytest.mark.rule("D9", "A time in the headers of an upstream is one of its own clock, which may be wrong.")
@pytest.mark.parametrize(
    ("date", "seconds"),
    [("Sun, 06 Nov 1994 08:50:07 GMT", 29.5), ("Sun, 06 Nov 1994 08:49:37 GMT", 60), ("long ago", 60)],
)
def test_a_time_is_compared_with_the_date_of_the_answer(date: str, seconds: float) -> None:
    """The first server's clock is 30 s ahead. Its Date has whole seconds, so it is half a second more on average."""
    at = "Sun, 06 Nov 1994 08:50:37 GMT"
    reply = ask(f"Date: {date}", f"Retry-After: {at}", "X-RateLimit-Remaining: 0", f"X-RateLimit-Reset: {at}")
    assert reply.retry_after == seconds
    assert reply.rate_limits == RateLimits(requests=Quota(remaining=0, reset_seconds=seconds))


@settings(deadline=None)
@given(st.binary(max_size=60) | st.from_regex(r"\w{3}, \d{1,3} \w{3} \d{1,6} \d+:\d+:\d+ [+-]?\w{1,9}").map(str.encode))
def test_no_retry_after_raises_or_is_negative(value: bytes) -> None:
    """D3: a header may have any bytes; those that are no HTTP are a fault."""
    fields = b"Retry-After: %b\r\nRetry-After-Ms: %b\r\n" % (value, value)

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 429 Too Many Requests\r\n%bContent-Length: 2\r\n\r\n{}" % fields)

    async def main() -> Reply:
        async with serving(behave) as wire, client(wire.port, clock=ManualClock(NOW)) as upstream:
            return await upstream.post("/v1/chat/completions", BODY)

    reply = uvloop.run(main())
    assert isinstance(reply, Fault) or reply.retry_after is None or reply.retry_after >= 0


@pytest.mark.rule("D9", "The rate-limit headers of an upstream's answer are read, whatever its status.")
@pytest.mark.parametrize("status", ["200 OK", "429 Too Many Requests"])
@pytest.mark.parametrize(
    ("headers", "limits"),
    [
        ([], None),
        (["Retry-After: 3", "X-Request-Id: req_1"], None),
        (["X-RateLimit-Remaining-Requests: many"], None),
        (
            ["x-ratelimit-remaining-requests: 9", "X-Ratelimit-Reset-Requests: 1m2s", "X-RATELIMIT-LIMIT-TOKENS: 900"],
            RateLimits(requests=Quota(remaining=9, reset_seconds=62), tokens=Quota(limit=900)),
        ),
        (
            ["X-RateLimit-Remaining: 0", "X-RateLimit-Reset: Sun, 06 Nov 1994 08:50:07 GMT"],
            RateLimits(requests=Quota(remaining=0, reset_seconds=30)),
        ),
        (["RateLimit-Reset: 1994-11-06T08:49:47Z"], RateLimits(requests=Quota(reset_seconds=10))),
    ],
)
def test_rate_limit_headers_are_read(status: str, headers: list[str], limits: RateLimits | None) -> None:
    """D9: in any spelling of upper and lower case, measured by the client's clock."""
    assert ask(*headers, status=status).rate_limits == limits


@pytest.mark.anyio
async def test_the_rate_limits_of_one_answer_are_not_those_of_the_next() -> None:
    """D9: a connection is used again, and the headers of each answer are its own."""

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer(b"{}", "X-RateLimit-Remaining: 3"))
        await peer.request()
        await peer.send(answer(b"{}"))

    async with serving(behave) as wire, client(wire.port) as upstream:
        replies = [await upstream.post("/v1/chat/completions", BODY) for _ in range(2)]
        assert wire.accepted == 1
    assert [reply.rate_limits for reply in replies if isinstance(reply, Answer)] == [
        RateLimits(requests=Quota(remaining=3)),
        None,
    ]


@pytest.mark.parametrize(
    ("value", "request_id"),
    [
        ("req_1", "req_1"),
        ("  padded id  ", "padded id"),
        ("x" * 200, "x" * 200),
        ("x" * 201, None),
        ("", None),
        ("tab\tinside", None),
        ("\xe9", None),
    ],
)
def test_request_ids_are_short_and_printable(value: str, request_id: str | None) -> None:
    """D1: an id is written to a result file only if it is short and printable."""
    assert ask(f"X-Request-Id: {value}").request_id == request_id


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("ftp://host/v1", "secret"),
        ("host/v1", "secret"),
        ("http:///v1", "secret"),
        ("http://host:99999/v1", "secret"),
        ("http://host:port/v1", "secret"),
        ("http://a..b/v1", "secret"),
        ("http://host/v1", "secret\r\nX-Evil: 1"),
        ("http://host/v1", "secret\u20ac"),
    ],
)
def test_invalid_settings_are_refused_at_once(url: str, key: str) -> None:
    """F2: an invalid setting is an error at the start, and the message does not contain the key."""
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        HttpUpstream(url, api_key=key, connect_timeout=1, request_timeout=1, max_answer_bytes=1, clock=ManualClock())
    assert "secret" not in str(refused.value)


def _built(**headers: str) -> HttpUpstream:
    return HttpUpstream(
        "http://127.0.0.1:1/v1",
        api_key=None,
        headers={name.replace("_", "-"): value for name, value in headers.items()},
        connect_timeout=1,
        request_timeout=1,
        max_answer_bytes=1,
        clock=ManualClock(NOW),
    )


@pytest.mark.anyio
async def test_every_request_has_the_headers_of_the_settings() -> None:
    """F2: posts, streams and GET requests alike."""
    requests: list[bytes] = []

    async def behave(peer: Peer) -> None:
        while True:
            requests.append(await peer.request())
            await peer.send(answer())

    headers = {"X-Tenant": "blue", "api-key": "other"}
    async with serving(behave) as wire, client(wire.port, headers=headers) as upstream:
        await upstream.post("/v1/chat/completions", BODY)
        await upstream.get("/v1/models")
        async with upstream.stream("/v1/chat/completions", BODY):
            pass
    assert len(requests) == 3
    for request in requests:
        assert b"\r\nX-Tenant: blue\r\n" in request
        assert b"\r\napi-key: other\r\n" in request


@pytest.mark.parametrize("name", ["host", "Content-Length", "Transfer-Encoding", "a b", "a:b", "", "é"])
def test_a_header_that_would_break_the_request_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a header cannot be called"):
        _built(**{name: "hush"})


@pytest.mark.parametrize("value", ["hush\r\nX-Evil: 1", "hush\x00", "hüsh"])
def test_a_value_that_would_break_the_request_is_refused_and_not_repeated(value: str) -> None:
    with pytest.raises(ValueError, match="X-Token") as refused:
        _built(X_Token=value)
    assert "sh" not in str(refused.value).replace("shall", "")
