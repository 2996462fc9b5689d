"""``batchline batches watch``: follows one batch, or all that run."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import click
from msgspec.json import encode as encode_json
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from batchline.cli.batches.views import BatchState, batch_table, detail_view, states_of
from batchline.cli.connection.session import ClientSession
from batchline.cli.run.waiting import describe_wait
from batchline.cli.text import format_count, format_rate, printable
from batchline.cli.views import console

_POLL_SECONDS = 1.0
_LISTED = 50
_EXIT_SOME_FAILED = 3


def watch_one(session: ClientSession, batch_id: str, *, as_json: bool) -> int:
    """Show a batch until it ends, and return the exit code for its end."""
    with _screen() as live:
        show = _shower(live, detail_view, as_json=as_json)
        while True:
            state = session.retrier.forever(lambda: _read(session, batch_id))
            show([state])
            if state.batch.is_terminal:
                return _exit_code(state)
            session.pause(_POLL_SECONDS)


def watch_all(session: ClientSession, *, as_json: bool) -> None:
    """Show the batches that have not ended, until the command is interrupted."""
    seen: set[str] = set()

    def read() -> list[BatchState]:
        page = session.client.batches(limit=_LISTED)
        states = states_of(session.client, page.data)
        # A batch that ends while it is watched stays, so that its end is seen.
        shown = [state for state in states if not state.batch.is_terminal or state.batch.id in seen]
        seen.update(state.batch.id for state in shown)
        return shown

    with _screen() as live:
        show = _shower(live, None, as_json=as_json)
        while True:
            show(session.retrier.forever(read))
            session.pause(_POLL_SECONDS)


def _read(session: ClientSession, batch_id: str) -> BatchState:
    return BatchState.from_objects(session.client.batch_object(batch_id), session.client.progress(batch_id))


def _exit_code(state: BatchState) -> int:
    if state.batch.status != "completed":
        return 1
    return _EXIT_SOME_FAILED if state.batch.request_counts.failed else 0


def _screen() -> AbstractContextManager[Live | None]:
    """Return a live view if stdout is a terminal that can redraw."""
    shown = console()
    if not shown.is_terminal or shown.is_dumb_terminal:
        return nullcontext()
    return Live(console=shown, auto_refresh=False, transient=False)


def _shower(
    live: Live | None, detail: Callable[[BatchState], RenderableType] | None, *, as_json: bool
) -> Callable[[list[BatchState]], None]:
    """Return the function that shows states: redrawn, as lines, or as JSON."""
    if as_json or live is None:
        return _Changes(_json_line if as_json else _text_line).show

    def redraw(states: list[BatchState]) -> None:
        if detail is not None:
            live.update(detail(states[0]), refresh=True)
        elif states:
            live.update(batch_table(states, width=live.console.width), refresh=True)
        else:
            live.update(Text("No batch runs. Press Ctrl-C to end."), refresh=True)

    return redraw


class _Changes:
    """Prints a line for each batch that has changed since the last look."""

    def __init__(self, line_of: Callable[[BatchState], str]) -> None:
        self._line_of = line_of
        self._last: dict[str, tuple[object, ...]] = {}

    def show(self, states: list[BatchState]) -> None:
        """Print the batches that have changed."""
        for state in states:
            waits = state.waits_for
            now = (state.batch.status, state.batch.request_counts, None if waits is None else waits.reason)
            if self._last.get(state.batch.id) != now:
                self._last[state.batch.id] = now
                click.echo(self._line_of(state))
                sys.stdout.flush()


def _text_line(state: BatchState) -> str:
    batch, counts, waits = state.batch, state.batch.request_counts, state.waits_for
    parts = [batch.id, batch.status, f"{format_count(counts.done)}/{format_count(counts.total)}"]
    if counts.failed:
        parts.append(f"{format_count(counts.failed)} failed")
    if state.rate:
        parts.append(format_rate(state.rate))
    if waits is not None:
        parts.append(describe_wait(waits))
    return printable("  ".join(parts))


def _json_line(state: BatchState) -> str:
    batch = state.batch
    return encode_json(
        {
            "batch_id": batch.id,
            "status": batch.status,
            "request_counts": batch.request_counts,
            "rate": state.progress.rate,
            "eta": state.progress.eta,
            "waiting_for": state.waits_for,
            "errors": state.progress.errors,
        }
    ).decode()
