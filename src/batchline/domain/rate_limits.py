"""Reads what an upstream says in the headers of an answer about its rate limits, and how long to wait.

::

    requests   x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests
               x-ratelimit-limit, …                     ratelimit-limit, …   (a draft of the IETF)
               anthropic-ratelimit-requests-limit, …
    tokens     x-ratelimit-limit-tokens, …              anthropic-ratelimit-tokens-limit, …
    wait       retry-after-ms, retry-after

A reset is a number of seconds ("12", "0.5"), a duration ("6m0s", "120ms"), a Unix time in seconds or milliseconds, or a
date of RFC 3339 or HTTP. A value that is none of these, or is negative, is ignored. A time is one of the server's
clock, which its Date header shows.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache

from msgspec import Struct

_MAX_DIGITS = 20
_NUMBER = re.compile(rb"\d{1,20}(?:\.\d{0,20})?")
_AMOUNT = re.compile(rb"(\d{1,20}(?:\.\d{0,20})?)(?:\s*[,;].*\bw(?:indow)?=.*)?")
"""A number, and the windows that a draft of the IETF allowed behind it: ``100, 100;w=60``."""
_PART = rb"(\d{1,20}(?:\.\d{0,20})?)(ms|us|\xc2\xb5s|ns|d|h|m|s)"
_DURATION_PART = re.compile(_PART, re.IGNORECASE)
_DURATION = re.compile(rb"(?:%b)+" % _PART, re.IGNORECASE)
_UNIT_SECONDS = {
    b"d": 86400.0,
    b"h": 3600.0,
    b"m": 60.0,
    b"s": 1.0,
    b"ms": 1e-3,
    b"us": 1e-6,
    b"\xc2\xb5s": 1e-6,
    b"ns": 1e-9,
}
_LAST_OF_UNIT = b"smhdSMHD"
_MIN_UNIX_SECONDS = 1e9
"""A larger number is a Unix time: as a number of seconds to wait it would be over 30 years."""
_MAX_UNIX_SECONDS = 1e11
"""A larger number is a Unix time in milliseconds, or in a smaller unit."""
_CLOCK_TOLERANCE_SECONDS = 2.0
"""A server's clock that differs by at most this is taken as equal. Its Date has whole seconds, and is older than the
answer by the time of the transfer."""
_MAX_TIME_BYTES = 64
"""A longer value is no time, and is not worth parsing."""


class Quota(Struct, frozen=True, kw_only=True):
    """One rate limit: how much of it is left, and in how many seconds it is whole again. None was not said."""

    limit: float | None = None
    remaining: float | None = None
    reset_seconds: float | None = None


class RateLimits(Struct, frozen=True, kw_only=True):
    """The rate limits of an upstream, as an answer mentions them. None is a limit that it does not mention."""

    requests: Quota | None = None
    tokens: Quota | None = None


class _Names(Struct, frozen=True):
    """The names of the three headers that describe one quota in one spelling."""

    limit: bytes
    remaining: bytes
    reset: bytes


def _names(spelling: bytes) -> _Names:
    return _Names(*(spelling % field for field in (b"limit", b"remaining", b"reset")))


_REQUESTS = (
    _names(b"x-ratelimit-%b-requests"),
    _names(b"x-ratelimit-%b"),
    _names(b"ratelimit-%b"),
    _names(b"anthropic-ratelimit-requests-%b"),
)
_TOKENS = (_names(b"x-ratelimit-%b-tokens"), _names(b"anthropic-ratelimit-tokens-%b"))

RETRY_AFTER_HEADERS = frozenset({b"retry-after", b"retry-after-ms"})
RATE_LIMIT_HEADERS = frozenset(
    name for names in _REQUESTS + _TOKENS for name in (names.limit, names.remaining, names.reset)
)
"""The names of all headers that are read, in lower case."""


def read_rate_limits(headers: Mapping[bytes, bytes], now: float) -> RateLimits | None:
    """Return what the headers say about rate limits; None if they say nothing.

    The names of the headers are in lower case. ``now`` is the Unix time on the server's clock.
    """
    requests, tokens = _first_quota(headers, _REQUESTS, now), _first_quota(headers, _TOKENS, now)
    return None if requests is None and tokens is None else RateLimits(requests=requests, tokens=tokens)


def read_retry_after(headers: Mapping[bytes, bytes], now: float) -> float | None:
    """Return the seconds to wait, from Retry-After-Ms if it is valid, else from the seconds or date of Retry-After."""
    milliseconds = headers.get(b"retry-after-ms", b"").strip()
    if _NUMBER.fullmatch(milliseconds):
        return float(milliseconds) / 1000
    return _seconds_from(headers.get(b"retry-after"), now)


def read_clock_offset(date: bytes | None, now: float) -> float:
    """Return the seconds by which the server's clock is ahead, from the Date header of an answer that came ``now``.

    It is 0 if the clocks are about equal, or if there is no valid Date.
    """
    stamp = None if date is None or len(date) > _MAX_TIME_BYTES else _date(date)
    if stamp is None or abs(stamp + 0.5 - now) <= _CLOCK_TOLERANCE_SECONDS:
        return 0.0
    return stamp + 0.5 - now


def _first_quota(headers: Mapping[bytes, bytes], spellings: tuple[_Names, ...], now: float) -> Quota | None:
    """Return the quota in the first spelling that says anything; spellings may describe different limits."""
    for names in spellings:
        limit, remaining = _amount(headers.get(names.limit)), _amount(headers.get(names.remaining))
        reset_seconds = _seconds_from(headers.get(names.reset), now)
        if limit is not None or remaining is not None or reset_seconds is not None:
            return Quota(limit=limit, remaining=remaining, reset_seconds=reset_seconds)
    return None


def _amount(value: bytes | None) -> float | None:
    if value is None:
        return None
    if value.isdigit() and len(value) <= _MAX_DIGITS:
        return float(value)
    match = _AMOUNT.fullmatch(value.strip())
    return None if match is None else float(match[1])


def _seconds_from(value: bytes | None, now: float) -> float | None:
    """Return the seconds from ``now``, never negative, that a number, a duration or a date means; else None."""
    if value is None or len(value) > _MAX_TIME_BYTES:
        return None
    value = value.strip()
    if value[-1:] in _LAST_OF_UNIT:
        return _seconds_in_duration(value)
    if _NUMBER.fullmatch(value):
        return _seconds_in_number(float(value), now)
    stamp = _unix_time(value.decode("latin-1"))
    return None if stamp is None else max(0.0, stamp - now)


@lru_cache(maxsize=1024)
def _seconds_in_duration(value: bytes) -> float | None:
    # Cached because an upstream under load repeats the same few durations: 0.1 us instead of 3 us.
    if not _DURATION.fullmatch(value):
        return None
    return sum(float(number) * _UNIT_SECONDS[unit.lower()] for number, unit in _DURATION_PART.findall(value))


def _seconds_in_number(number: float, now: float) -> float:
    if number <= _MIN_UNIX_SECONDS:
        return number
    while number > _MAX_UNIX_SECONDS:
        number /= 1000
    return max(0.0, number - now)


@lru_cache(maxsize=16)
def _date(value: bytes) -> float | None:
    # Cached because all answers of a second have the same Date.
    return _unix_time(value.strip().decode("latin-1"))


def _unix_time(date: str) -> float | None:
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            at = parse(date)
            return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            continue
    return None
