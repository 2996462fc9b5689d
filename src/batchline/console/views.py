"""Computes the values that pages show of a batch from its record."""

from collections.abc import Sequence

from msgspec import DecodeError, Struct
from msgspec.json import decode as decode_json

from batchline.console.charts import CHART_HEIGHT, CHART_WIDTH, ChartBar, LoadChart, load_chart
from batchline.console.text import metadata_of, moment, name_of, sentence
from batchline.domain.line_errors import remedy_for, without_legacy
from batchline.domain.progress import BUCKET_SECONDS, KEPT_SECONDS, Eta, LineErrors, Progress, ProgressSample, bucket_of
from batchline.domain.records import Batch, Bill
from batchline.domain.states import TERMINAL, BatchStatus
from batchline.domain.wait_text import any_wait, describe_wait
from batchline.domain.waiting import HeldWait, Wait, stops_all_lines
from batchline.pipeline.load_history import BatchSample

BAR_WIDTH = 1000
"""The width of a bar in units of its own drawing."""


class Bar(Struct, frozen=True, kw_only=True):
    """The shares of a bar: lines that succeeded, and those that failed."""

    done: float
    failed: float


class Step(Struct, frozen=True, kw_only=True):
    """A state that a batch entered, and how long after the state before."""

    name: str
    at: int
    after: int | None


class ErrorGroup(Struct, frozen=True, kw_only=True):
    """The lines that failed with one code."""

    code: str
    count: int
    custom_id: str
    message: str
    remedy: str


class BatchView(Struct, frozen=True, kw_only=True):
    """A batch as a page shows it."""

    batch: Batch
    name: str
    metadata: dict[str, str]
    bar: Bar
    active: bool
    recorded: int
    percent: int
    cost: int | None
    """The nano-units that it was charged so far; None without metering, or where its bill was not read."""
    reused: int
    """The lines that took an earlier answer."""
    saved: int | None
    """The nano-units that these lines would have cost; None without metering."""
    rate: float = 0.0
    eta: Eta | None = None
    in_flight: int = 0
    concurrency: int = 0
    wait: str = ""
    chart: list[ChartBar] = []
    peak: float = 0.0
    load: LoadChart | None = None

    @property
    def can_cancel(self) -> bool:
        return self.batch.status in {BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING}

    @property
    def can_rerun(self) -> bool:
        return self.batch.status in TERMINAL and self.batch.error_file_id is not None


class BatchViews:
    """Makes views of batches."""

    def __init__(self, *, metered: bool) -> None:
        self._metered = metered

    def of_batch(self, batch: Batch, bill: Bill | None = None) -> BatchView:
        """Return what a list shows of a batch."""
        metadata, recorded = metadata_of(batch.metadata), batch.completed + batch.failed
        return BatchView(
            batch=batch,
            name=name_of(metadata),
            metadata=metadata,
            bar=_bar(batch),
            active=batch.status not in TERMINAL,
            recorded=recorded,
            percent=100 * recorded // batch.total if batch.total else 0,
            cost=bill.cost if bill and self._metered else None,
            reused=bill.reused if bill else 0,
            saved=bill.saved if bill and self._metered else None,
        )

    def of_progress(self, progress: Progress, *, now: float, loads: Sequence[BatchSample] = ()) -> BatchView:
        """Return what a page shows of a batch that may run. ``loads`` are its lines in flight over time."""
        view, activity = self.of_batch(progress.batch, progress.bill), progress.activity
        chart, peak = _chart(progress.samples, now=now) if view.active else ([], 0.0)
        return BatchView(
            **{name: getattr(view, name) for name in _OF_BATCH},
            rate=0.0 if stops_all_lines(activity.waiting_for) else progress.rate,
            eta=progress.eta,
            in_flight=activity.in_flight,
            concurrency=activity.concurrency,
            wait=wait_sentence(activity.waiting_for) if view.active else "",
            chart=chart,
            peak=peak,
            load=load_chart(loads, since=_chart_start(now), until=now) if view.active else None,
        )


_OF_BATCH = ("batch", "name", "metadata", "bar", "active", "recorded", "percent", "cost", "reused", "saved")


def _bar(batch: Batch) -> Bar:
    if not batch.total:
        return Bar(done=0, failed=0)
    unit = BAR_WIDTH / batch.total
    return Bar(done=round(unit * batch.completed, 1), failed=round(unit * batch.failed, 1))


def wait_sentence(wait: Wait | None) -> str:
    """Return why lines wait, as a sentence; empty if none do."""
    if wait is None:
        return ""
    text = sentence(describe_wait(any_wait(wait), moment=moment))
    return f"{text} Release it or cancel it." if isinstance(wait, HeldWait) else text


def timeline(batch: Batch) -> list[Step]:
    """Return the states that a batch entered, in order."""
    named = [
        ("created", batch.created_at),
        ("in progress", batch.in_progress_at),
        ("held", batch.held_at),
        ("finalizing", batch.finalizing_at),
        ("cancelling", batch.cancelling_at),
        ("completed", batch.completed_at),
        ("failed", batch.failed_at),
        ("expired", batch.expired_at),
        ("cancelled", batch.cancelled_at),
    ]
    known = sorted(((at, name) for name, at in named if at is not None), key=lambda step: step[0])
    times = [at for at, _ in known]
    return [Step(name=name, at=at, after=None if n == 0 else at - times[n - 1]) for n, (at, name) in enumerate(known)]


def error_groups(errors: Sequence[LineErrors]) -> list[ErrorGroup]:
    """Return the failed lines by code, each with a sample and a remedy."""
    groups = []
    for each in errors:
        sample = _sample(each.sample)
        groups.append(
            ErrorGroup(
                code=each.code,
                count=each.count,
                custom_id=sample.get("custom_id", ""),
                message=without_legacy(sample.get("message", "")),
                remedy=remedy_for(each.code),
            )
        )
    return groups


def _sample(raw: bytes) -> dict[str, str]:
    try:
        found = decode_json(raw)
    except (DecodeError, UnicodeDecodeError):
        return {}
    return {name: str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _chart_start(now: float) -> int:
    """Return the time at which a chart of the last five minutes begins."""
    return bucket_of(now) - KEPT_SECONDS + BUCKET_SECONDS


def _chart(samples: Sequence[ProgressSample], *, now: float) -> tuple[list[ChartBar], float]:
    """Return the lines per second of the last five minutes as bars, and the highest of them."""
    first = _chart_start(now)
    lines = {sample.at: sample.lines for sample in samples if sample.at >= first}
    peak = max(lines.values(), default=0)
    if not peak:
        return [], 0.0
    width = CHART_WIDTH * BUCKET_SECONDS / KEPT_SECONDS
    bars = []
    for at, number in sorted(lines.items()):
        height = max(1.0, CHART_HEIGHT * number / peak)
        bars.append(
            ChartBar(
                x=round((at - first) / BUCKET_SECONDS * width, 1),
                y=round(CHART_HEIGHT - height, 1),
                width=round(width - 1, 1),
                height=round(height, 1),
                label=f"{number / BUCKET_SECONDS:.1f} lines per second",
            )
        )
    return bars, peak / BUCKET_SECONDS
