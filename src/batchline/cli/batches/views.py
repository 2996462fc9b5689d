"""Shows batches: a table with a row for each, and everything about one."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Self

from msgspec import Raw, Struct
from msgspec.json import decode as decode_json
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from batchline.cli.output import moment
from batchline.cli.run.report import describe_bill
from batchline.cli.run.waiting import describe_wait, is_held, is_pause
from batchline.cli.store import now
from batchline.cli.text import (
    counted,
    format_age,
    format_count,
    format_duration,
    format_rate,
    format_units,
    printable,
    shortened,
)
from batchline.cli.views import bar_text, status_text, table
from batchline.client.client import Client
from batchline.client.errors import ClientError
from batchline.client.models import RemoteBatch, RemoteProgress, batch_decoder, progress_decoder
from batchline.domain.line_errors import without_legacy
from batchline.domain.wait_text import AnyWait

_BAR_WIDTH, _WIDE_BAR_WIDTH = 8, 30
_WIDE_COLUMNS = 110
"""The width of a terminal from which on a table also has the columns lines, rate and name."""
_MAX_ERRORS = 8
_RUNNING = frozenset({"in_progress"})


class BatchState(Struct, frozen=True, kw_only=True):
    """A batch and its progress."""

    batch: RemoteBatch
    progress: RemoteProgress

    @classmethod
    def from_objects(cls, batch: Raw, progress: Raw) -> Self:
        """Return the state from the objects of the server."""
        return cls(batch=batch_decoder.decode(batch), progress=progress_decoder.decode(progress))

    @property
    def waits_for(self) -> AnyWait | None:
        """The reason why lines wait, if the batch may start lines."""
        return self.progress.waiting_for if self.batch.status in _RUNNING else None

    @property
    def is_paused(self) -> bool:
        """Whether no line can run until something outside the batch changes."""
        return self.waits_for is not None and is_pause(self.waits_for)

    @property
    def rate(self) -> float:
        """The lines per second over the last minute; 0 while paused, because the lines of that minute say nothing."""
        return 0.0 if self.is_paused or self.batch.is_terminal else self.progress.rate

    @property
    def seconds_left(self) -> int | None:
        """The estimated time left, or None if it cannot be estimated."""
        return None if self.is_paused or self.progress.eta is None else self.progress.eta.seconds


def states_of(client: Client, batches: Iterable[Raw]) -> list[BatchState]:
    """Return the state of each batch. Only those that run are asked for their progress."""
    return [_state_of(client, batch_decoder.decode(raw)) for raw in batches]


def _state_of(client: Client, batch: RemoteBatch) -> BatchState:
    progress = RemoteProgress()
    if batch.status in _RUNNING:
        # Without an answer the row is shown without a rate.
        with suppress(ClientError):
            progress = progress_decoder.decode(client.progress(batch.id))
    return BatchState(batch=batch, progress=progress)


def batch_table(states: Sequence[BatchState], *, width: int) -> Table:
    """Return a table of batches for a terminal of this width."""
    wide = width >= _WIDE_COLUMNS
    heads = ["batch", "age", "status", "progress", "failed", "left"]
    more = ["lines", "rate", "name"] if wide else []
    rows = [[*_cells(state), *(_wide_cells(state) if wide else [])] for state in states]
    return table([*heads, *more], rows, right=("age", "failed", "left", "lines", "rate"), gap=1)


def _cells(state: BatchState) -> list[Text | str]:
    batch, left = state.batch, state.seconds_left
    return [
        batch.id,
        format_age(now() - batch.created_at),
        status_text(_shown_status(state)),
        bar_text(batch.request_counts, width=_BAR_WIDTH),
        format_count(batch.request_counts.failed) if batch.request_counts.failed else "-",
        "-" if left is None else format_duration(left),
    ]


def _shown_status(state: BatchState) -> str:
    """Return the status, or why no line of the batch can run."""
    if state.waits_for is None or not state.is_paused:
        return state.batch.status
    return "held" if is_held(state.waits_for) else "paused"


def _wide_cells(state: BatchState) -> list[Text | str]:
    rate = format_rate(state.rate) if state.rate else "-"
    return [format_count(state.batch.request_counts.total), rate, name_of(state.batch)]


def name_of(batch: RemoteBatch) -> str:
    """Return the name in the metadata of a batch, or its model."""
    metadata = decode_json(batch.metadata)
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return shortened(name if isinstance(name, str) else batch.model or "-", length=40)


def detail_view(state: BatchState) -> RenderableType:
    """Return everything about one batch."""
    parts: list[RenderableType] = [_fields(state)]
    errors = list(_error_lines(state.progress))
    if errors:
        parts += [Text(), *errors]
    return Group(*parts)


def _fields(state: BatchState) -> Table:
    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True, style="bold")
    made.add_column(overflow="fold")
    for name, value in _facts(state):
        made.add_row(name, value if isinstance(value, Text) else Text(printable(value)))
    return made


def _facts(state: BatchState) -> Iterator[tuple[str, Text | str]]:
    batch, progress, counts = state.batch, state.progress, state.batch.request_counts
    yield "batch", batch.id
    yield "status", status_text(batch.status)
    yield "progress", bar_text(counts, width=_WIDE_BAR_WIDTH)
    yield "lines", f"{format_count(counts.total)}: {format_count(counts.completed)} succeeded, {counts.failed:,} failed"
    if not batch.is_terminal:
        yield "pace", _pace(state)
    if state.waits_for is not None:
        yield "waiting", describe_wait(state.waits_for).removeprefix("waiting").removeprefix(":").strip()
    yield "created", _since(batch.created_at)
    if batch.ended_at is not None:
        yield "ended", _since(batch.ended_at)
    elif batch.expires_at is not None:
        yield "expires", moment(batch.expires_at)
    yield "model", batch.model or "several"
    yield "tokens", f"{format_count(batch.tokens.input_tokens)} in, {format_count(batch.tokens.output_tokens)} out"
    bill = describe_bill(progress)
    if progress.max_cost is not None:
        bill = f"{bill or 'cost 0'}; may cost {format_units(progress.max_cost)}"
    if bill:
        yield "bill", bill
    metadata = shortened(bytes(batch.metadata).decode("utf-8", "replace"))
    yield "metadata", "-" if metadata == "{}" else metadata
    yield "input", batch.input_file_id
    yield "output", batch.output_file_id or "-"
    yield "errors", batch.error_file_id or "-"
    if progress.parent_batch_id is not None:
        yield "rerun of", progress.parent_batch_id
    if progress.child_batch_ids:
        yield "reruns", ", ".join(progress.child_batch_ids)


def _pace(state: BatchState) -> str:
    progress = state.progress
    in_flight = f"{counted(progress.in_flight, 'line')} in flight"
    parts = [in_flight if state.is_paused else f"{format_rate(state.rate)} over the last minute, {in_flight}"]
    if state.seconds_left is not None and progress.eta is not None:
        low, high = format_duration(progress.eta.low), format_duration(progress.eta.high)
        parts.append(f"about {format_duration(progress.eta.seconds)} left ({low} to {high})")
    return "; ".join(parts)


def _since(at: int) -> str:
    return f"{moment(at)} ({format_age(now() - at)} ago)"


def _error_lines(progress: RemoteProgress) -> Iterator[Text]:
    for error in progress.errors[:_MAX_ERRORS]:
        yield Text(f"{shortened(error.code)}: {counted(error.count, 'line')}", style="red")
        yield Text(
            f"  {shortened(error.sample.custom_id, length=60)}: {shortened(without_legacy(error.sample.message))}"
        )
