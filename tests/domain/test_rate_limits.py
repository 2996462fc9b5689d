"""What the headers of an answer say about rate limits: D3, D9."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchline.domain.rate_limits import (
    RATE_LIMIT_HEADERS,
    RETRY_AFTER_HEADERS,
    Quota,
    RateLimits,
    read_clock_offset,
    read_rate_limits,
    read_retry_after,
)

NOW = 1_700_000_000.0  # 2023-11-14T22:13:20Z


def limits(**headers: str) -> RateLimits | None:
    return read_rate_limits({name.replace("_", "-").encode(): text.encode() for name, text in headers.items()}, NOW)


def reset(text: str) -> float | None:
    found = limits(x_ratelimit_remaining_requests="1", x_ratelimit_reset_requests=text)
    assert found is not None
    assert found.requests is not None
    assert found.requests.remaining == 1
    return found.requests.reset_seconds


@pytest.mark.rule("D9", "What the upstream says about its rate limits is read in the usual spellings.")
@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        pytest.param(
            {
                "x_ratelimit_limit_requests": "5000",
                "x_ratelimit_limit_tokens": "160000",
                "x_ratelimit_remaining_requests": "4999",
                "x_ratelimit_remaining_tokens": "159976",
                "x_ratelimit_reset_requests": "12ms",
                "x_ratelimit_reset_tokens": "6m0s",
            },
            RateLimits(
                requests=Quota(limit=5000, remaining=4999, reset_seconds=0.012),
                tokens=Quota(limit=160_000, remaining=159_976, reset_seconds=360),
            ),
            id="openai",
        ),
        pytest.param(
            {
                "x_ratelimit_limit_requests": "14400",
                "x_ratelimit_limit_tokens": "18000",
                "x_ratelimit_remaining_requests": "14370",
                "x_ratelimit_remaining_tokens": "17997",
                "x_ratelimit_reset_requests": "2m59.56s",
                "x_ratelimit_reset_tokens": "7.66s",
            },
            RateLimits(
                requests=Quota(limit=14_400, remaining=14_370, reset_seconds=179.56),
                tokens=Quota(limit=18_000, remaining=17_997, reset_seconds=7.66),
            ),
            id="groq",
        ),
        pytest.param(
            {"x_ratelimit_remaining_requests": "9", "x_ratelimit_remaining_tokens": "9000"},
            RateLimits(requests=Quota(remaining=9), tokens=Quota(remaining=9000)),
            id="azure",
        ),
        pytest.param(
            {"x_ratelimit_limit": "20", "x_ratelimit_remaining": "0", "x_ratelimit_reset": "1700000042000"},
            RateLimits(requests=Quota(limit=20, remaining=0, reset_seconds=42)),
            id="openrouter",
        ),
        pytest.param(
            {"x_ratelimit_limit": "10", "x_ratelimit_remaining": "9", "x_ratelimit_reset": "1"},
            RateLimits(requests=Quota(limit=10, remaining=9, reset_seconds=1)),
            id="together",
        ),
        pytest.param(
            {"ratelimit_limit": "100, 100;w=60", "ratelimit_remaining": "50", "ratelimit_reset": "30"},
            RateLimits(requests=Quota(limit=100, remaining=50, reset_seconds=30)),
            id="ietf draft",
        ),
        pytest.param(
            {
                "anthropic_ratelimit_requests_limit": "50",
                "anthropic_ratelimit_requests_remaining": "49",
                "anthropic_ratelimit_requests_reset": "2023-11-14T22:13:22Z",
                "anthropic_ratelimit_tokens_remaining": "39000",
            },
            RateLimits(requests=Quota(limit=50, remaining=49, reset_seconds=2), tokens=Quota(remaining=39_000)),
            id="anthropic",
        ),
        pytest.param({"x_ratelimit_reset_tokens": "3s"}, RateLimits(tokens=Quota(reset_seconds=3)), id="a reset alone"),
    ],
)
def test_the_spellings_of_many_upstreams_are_read(headers: dict[str, str], expected: RateLimits) -> None:
    """D9."""
    assert limits(**headers) == expected


def test_the_fields_of_a_quota_come_from_one_spelling() -> None:
    """D9: a gateway and the server behind it may both describe a limit, and the limits differ."""
    found = limits(x_ratelimit_remaining_requests="7", x_ratelimit_remaining="900", x_ratelimit_reset="60")
    assert found == RateLimits(requests=Quota(remaining=7))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("0s", 0),
        ("1s", 1),
        ("12", 12),
        ("0.5", 0.5),
        ("17.3s", 17.3),
        ("120ms", 0.12),
        ("59us", 59e-6),
        ("59\xb5s", 59e-6),
        ("500ns", 5e-7),
        ("6m0s", 360),
        ("1h2m3.5s", 3723.5),
        ("1d2h", 93_600),
        ("1m26.4s", 86.4),
        ("1H2M", 3720),
        (" 8.64s ", 8.64),
        ("100000", 100_000),
        ("1700000030", 30),
        ("1700000030.25", 30.25),
        ("1700000030250", 30.25),
        ("1700000030250000", 30.25),
        ("1699999990", 0),
        ("2023-11-14T22:13:50Z", 30),
        ("2023-11-14T22:13:50.123456789Z", 30.123456),
        ("2023-11-15T00:13:50+02:00", 30),
        ("2023-11-14T22:13:50", 30),
        ("2023-11-14T22:00:00Z", 0),
        ("Tue, 14 Nov 2023 22:13:50 GMT", 30),
        ("Tuesday, 14-Nov-23 22:13:50 GMT", 30),
        ("Tue Nov 14 22:13:50 2023", 30),
    ],
)
def test_a_reset_is_seconds_from_now(text: str, seconds: float) -> None:
    """D9: durations, Unix times and dates; one that is over is 0."""
    assert reset(text) == pytest.approx(seconds, abs=1e-5 if seconds > 1e-3 else 1e-9)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "soon",
        "-1",
        "-5s",
        "nan",
        "inf",
        "1e3",
        "1_000",
        "5 apples",
        "s",
        "1x",
        "1s!",
        "--",
        "2023-99-99T00:00Z",
        "9" * 400,
        "Sun, 99 Nov 1994 08:49:37 GMT",
        "x" * 5000,
    ],
)
def test_a_reset_that_is_no_time_is_ignored(text: str) -> None:
    """D9: what else the headers say still counts."""
    assert reset(text) is None


@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "many", "1e3", "1,000", "0x10", "9" * 400])
def test_an_amount_that_is_no_count_is_ignored(text: str) -> None:
    """D9: such as the -1 of a limit that does not exist."""
    assert limits(x_ratelimit_limit_requests=text, x_ratelimit_remaining_tokens=text) is None
    found = limits(x_ratelimit_limit_requests=text, x_ratelimit_remaining_requests="3")
    assert found == RateLimits(requests=Quota(remaining=3))


def test_other_headers_say_nothing_about_rate_limits() -> None:
    """D9."""
    assert limits(content_type="application/json", x_request_id="1", retry_after="5") is None


@pytest.mark.rule("D3", "Retry-After is seconds or a date, and retry-after-ms is read too.")
@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({b"retry-after": b"7"}, 7),
        ({b"retry-after": b"0.25"}, 0.25),
        ({b"retry-after": b"20s"}, 20),
        ({b"retry-after": b"1700000030"}, 30),
        ({b"retry-after": b"Tue, 14 Nov 2023 22:13:50 GMT"}, 30),
        ({b"retry-after-ms": b"1500"}, 1.5),
        ({b"retry-after-ms": b"0.5", b"retry-after": b"9"}, 0.0005),
        ({b"retry-after-ms": b"-3", b"retry-after": b"9"}, 9),
        ({b"retry-after": b"-9"}, None),
        ({}, None),
    ],
)
def test_retry_after_is_read_in_every_spelling(headers: dict[bytes, bytes], seconds: float | None) -> None:
    """D3."""
    assert read_retry_after(headers, NOW) == seconds


@given(
    st.dictionaries(
        st.sampled_from(sorted(RATE_LIMIT_HEADERS | RETRY_AFTER_HEADERS)),
        st.binary(max_size=80)
        | st.from_regex(rb"-?\d{1,30}(\.\d*)?[a-z]{0,2}", fullmatch=True)
        | st.from_regex(rb"\d{1,5}-\d\d?-\d\d?[T ]\d\d?:\d\d?(:\d\d?)?(Z|[+-]\d\d:\d\d)?", fullmatch=True),
    )
)
def test_no_header_raises_or_gives_a_number_that_is_negative_or_infinite(headers: dict[bytes, bytes]) -> None:
    """D3, D9: a header may hold any bytes."""
    found = read_rate_limits(headers, NOW) or RateLimits()
    numbers = [read_retry_after(headers, NOW)]
    for quota in (found.requests, found.tokens):
        if quota is not None:
            numbers += [quota.limit, quota.remaining, quota.reset_seconds]
    assert all(number is None or (number >= 0 and math.isfinite(number)) for number in numbers)


@pytest.mark.parametrize(
    ("date", "seconds"),
    [
        (b"Tue, 14 Nov 2023 22:13:50 GMT", 30.5),
        (b"Tue, 14 Nov 2023 22:12:50 GMT", -29.5),
        (b"Tue, 14 Nov 2023 22:13:19 GMT", 0),
        (b"Tue, 14 Nov 2023 22:13:21 GMT", 0),
        (b"yesterday", 0),
        (b"9" * 1000, 0),
        (b"", 0),
        (None, 0),
    ],
)
def test_the_clock_of_a_server_is_read_from_its_date(date: bytes | None, seconds: float) -> None:
    """D9: a difference of about a second may be the resolution of the Date."""
    assert read_clock_offset(date, NOW) == seconds
