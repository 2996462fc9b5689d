"""``batchline results``: prints the recorded lines of a batch, also while it runs."""

import sys
from typing import TYPE_CHECKING, Any

import click

from batchline.cli.help import Command
from batchline.cli.output import client_options, exit_codes, say
from batchline.cli.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchline.cli.connection.session import ClientSession

_PAGE_LINES = 1000


@click.command(
    short_help="Print the recorded lines of a batch.",
    cls=Command,
    epilog=exit_codes("0", "1", "2", "4", "130 interrupted"),
)
@click.argument("batch_id", metavar="BATCH")
@click.option("--follow", is_flag=True, help="Wait for the lines that are not recorded yet, until the batch ends.")
@click.option("--failed", is_flag=True, help="Print only failed lines.")
@click.option("--succeeded", is_flag=True, help="Print only lines that succeeded.")
@click.option("--merged", is_flag=True, help="Print the newest result of each line over the batch and its reruns.")
@client_options
def results(
    *,
    batch_id: str,
    follow: bool,
    failed: bool,
    succeeded: bool,
    merged: bool,
    base_url: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Print the recorded lines of BATCH to stdout, in the order of recording.

    Each line is a JSON object as it will stand in the output file or the error file, with or without --json.
    """
    if failed and succeeded:
        raise click.UsageError("--failed and --succeeded exclude each other; without both, all lines are printed")
    if merged and (follow or failed or succeeded):
        raise click.UsageError("--merged prints every line once and takes neither --follow, --failed nor --succeeded")
    status = "failed" if failed else "succeeded" if succeeded else None
    from batchline.cli.connection.session import connect  # noqa: PLC0415 (imports httpx: not for --help)

    with connect(base_url, flags, needs_worker=follow) as session:
        if merged:
            _print_merged(session, batch_id)
        elif follow:
            Follower(session, batch_id, status=status).run()
        else:
            _print_recorded(session, batch_id, status)


def _print_recorded(session: "ClientSession", batch_id: str, status: str | None) -> None:
    client, cursor = session.client, None
    while True:
        page = session.retrier.few_times(
            lambda after=cursor: client.results(batch_id, after=after, limit=_PAGE_LINES, status=status)  # type: ignore[misc]
        )
        _write(bytes(line) for line in page.data)
        # A page of large lines is shorter than the limit, and has_more is true as long as the batch runs.
        if not page.data or not page.has_more:
            break
        cursor = page.last_id
    batch = session.retrier.few_times(lambda: client.batch(batch_id))
    if not batch.is_terminal:
        counts = batch.request_counts
        say(
            f"{batch_id} is {batch.status}, {counts.done} of {counted(counts.total, 'line')} recorded; --follow waits "
            "for the others",
            err=True,
        )


def _print_merged(session: "ClientSession", batch_id: str) -> None:
    out = sys.stdout.buffer
    for chunk in session.client.merged(batch_id):
        out.write(chunk)
    out.flush()


class Follower:
    """Prints each line of a batch once, also if the connection breaks or the service is restarted."""

    def __init__(self, session: "ClientSession", batch_id: str, *, status: str | None) -> None:
        self._session, self._batch_id, self._status = session, batch_id, status
        self._cursor: str | None = None

    def run(self) -> None:
        """Print lines until the batch has ended."""
        self._session.retrier.forever(self._read_stream)

    def _read_stream(self) -> None:
        for events in self._session.client.follow_results(self._batch_id, after=self._cursor, status=self._status):
            lines = [event for event in events if event.kind == "line"]
            _write(event.data for event in lines)
            if lines:
                self._cursor = lines[-1].id or self._cursor


def _write(lines: "Iterable[bytes]") -> None:
    out = sys.stdout.buffer
    out.writelines(line.rstrip(b"\n") + b"\n" for line in lines)
    out.flush()
