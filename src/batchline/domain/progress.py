"""Computes the progress of a batch: the rate of recorded lines, the estimated time left, and the errors so far."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil, floor, sqrt
from statistics import fmean, stdev
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.json import Decoder
from msgspec.json import encode as encode_json

from batchline.domain.records import Batch, Bill
from batchline.domain.waiting import Wait

BUCKET_SECONDS = 5
KEPT_SECONDS = 60 * BUCKET_SECONDS
_RATE_SECONDS = 60
_MAX_SAMPLE_CHARACTERS = 300


class ProgressSample(Struct, frozen=True, kw_only=True):
    """Lines recorded in the five seconds from ``at``; a bucket without lines has no sample."""

    at: int
    lines: int


class Eta(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds until every line is recorded, with a lower and an upper bound."""

    seconds: Annotated[int, Meta(ge=0, description="At the current rate.")]
    low: Annotated[int, Meta(ge=0, description="At best.")]
    high: Annotated[int, Meta(ge=0, description="At worst.")]


class LineErrors(Struct, frozen=True, kw_only=True):
    """The lines that failed with one code."""

    code: str
    count: int
    sample: bytes
    """``custom_id`` and message of the first of them, as a JSON object."""


class Pause(Struct, frozen=True, kw_only=True):
    """An upstream that is unavailable, or one model of it: why, and since when."""

    upstream: str
    model: str | None = None
    detail: str
    since: int


class Activity(Struct, frozen=True, kw_only=True):
    """The work that is done for a batch at this moment."""

    in_flight: int
    concurrency: int
    """The number of lines that the upstreams of its models take in parallel, as measured so far."""
    waiting_for: Wait | None
    """The reason why some of its lines wait; None if none do."""
    upstreams: frozenset[str] = frozenset()
    """The upstreams that serve the models of the lines that are left."""


class Progress(Struct, frozen=True, kw_only=True):
    """The progress of a batch, and its rate."""

    batch: Batch
    rate: float
    """Lines per second."""
    eta: Eta | None
    activity: Activity
    errors: list[LineErrors]
    child_batch_ids: list[str] = []
    bill: Bill = Bill()
    samples: list[ProgressSample] = []
    """Oldest first, none older than five minutes."""


class _Error(Struct):
    code: str
    message: str


class _ErrorLine(Struct):
    custom_id: str | None
    """None if the line was damaged in storage, and its id with it."""
    error: _Error


class _SampleMessage(Struct):
    message: str


_error_line = Decoder(_ErrorLine)
_sample_message = Decoder(_SampleMessage)


def count_errors(lines: Iterable[bytes]) -> list[LineErrors]:
    """Count the lines of an error file by code."""
    counts: Counter[str] = Counter()
    samples: dict[str, bytes] = {}
    for line in map(_error_line.decode, lines):
        counts[line.error.code] += 1
        if line.error.code not in samples:
            samples[line.error.code] = _sample(line)
    return [LineErrors(code=code, count=count, sample=samples[code]) for code, count in counts.items()]


def _sample(line: _ErrorLine) -> bytes:
    return encode_json(
        {
            "custom_id": (line.custom_id or "")[:_MAX_SAMPLE_CHARACTERS],
            "message": line.error.message[:_MAX_SAMPLE_CHARACTERS],
        }
    )


def message_of(errors: LineErrors) -> str:
    """Return the message of the first line that failed with a code."""
    return _sample_message.decode(errors.sample).message


def bucket_of(at: float) -> int:
    """Return the start of the bucket that a time falls into."""
    return int(at // BUCKET_SECONDS) * BUCKET_SECONDS


def rate_of(samples: Iterable[ProgressSample], *, began: float, now: float) -> float:
    """Return the lines per second over the last minute, or since the batch began if that is shorter."""
    start = bucket_of(now) + BUCKET_SECONDS - _RATE_SECONDS
    lines = sum(sample.lines for sample in samples if sample.at >= start)
    return lines / max(1.0, now - max(start, began))


def eta_of(samples: Sequence[ProgressSample], *, remaining: int, began: float, now: float) -> Eta | None:
    """Estimate when the remaining lines are recorded, at the current rate; None if there is no rate or no line is left.

    ``seconds = remaining / rate``, and not less than the time for which nothing was recorded: the last lines of a batch
    are often slow ones, and the rate of the quick ones before them says nothing about them.

    The n buckets that are kept and complete have the mean m and the standard deviation s, and the remaining lines fill
    k = seconds / 5 more buckets. The relative error of the rate is about ``e = s / m * sqrt(1 / n + 1 / k)``: the first
    term is the error of a mean of n buckets, the second the deviation of k buckets from it.
    ``low = seconds / (1 + 2e)`` and ``high = seconds * (1 + 2e)``. Fewer than two buckets say nothing: they count as
    one, with s = m.
    """
    rate = rate_of(samples, began=began, now=now)
    if not rate or remaining <= 0:
        return None
    seconds = max(remaining / rate, now - (samples[-1].at + BUCKET_SECONDS))
    variation, buckets = _variation(samples, began=began, now=now)
    spread = 1 + 2 * variation * sqrt(1 / buckets + BUCKET_SECONDS / seconds)
    return Eta(seconds=ceil(seconds), low=floor(seconds / spread), high=ceil(seconds * spread))


def _variation(samples: Iterable[ProgressSample], *, began: float, now: float) -> tuple[float, int]:
    """Return the standard deviation of the complete buckets divided by their mean, and their number."""
    lines = {sample.at: sample.lines for sample in samples}
    first = max(-bucket_of(-began), bucket_of(now) - KEPT_SECONDS + BUCKET_SECONDS)
    whole = [lines.get(at, 0) for at in range(first, bucket_of(now), BUCKET_SECONDS)]
    if len(whole) < 2 or not any(whole):
        return 1.0, 1
    return stdev(whole) / fmean(whole), len(whole)
