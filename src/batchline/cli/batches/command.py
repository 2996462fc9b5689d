"""The subcommands of ``batchline batches``."""

from typing import TYPE_CHECKING, Any

import click

from batchline.cli.batches.fail import fail
from batchline.cli.help import Group
from batchline.cli.output import client_options, exit_codes, show_object, show_objects
from batchline.cli.paging import limit_option, read_pages
from batchline.domain.states import BatchStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from msgspec import Raw

    from batchline.cli.connection.session import ClientSession

_EPILOG = exit_codes("0", "1", "2", "4")


@click.group(cls=Group)
def batches() -> None:
    """List, show, watch, cancel and release batches."""


batches.add_command(fail)


@batches.command("list", epilog=_EPILOG)
@limit_option
@click.option(
    "--status",
    # The values: click takes the members of an enum by their names, which are in upper case.
    type=click.Choice([status.value for status in BatchStatus], case_sensitive=False),
    metavar="STATUS",
    help="Only batches in this state.",
)
@client_options
def list_batches(*, limit: int, status: str | None, base_url: str | None, as_json: bool, **flags: Any) -> None:
    """List batches, the newest first, with their progress."""
    from batchline.cli.connection.session import connect  # noqa: PLC0415 (imports httpx: not for --help)

    with connect(base_url, flags) as session:

        def read(*, after: str | None = None, limit: int) -> Any:
            return session.client.batches(after=after, limit=limit, status=status)

        found = read_pages(read, limit=limit, retrier=session.retrier)
        if as_json:
            show_objects(found)
            return
        if not found:
            click.echo("There is no batch.", err=True)
            return
        from batchline.cli.batches.views import batch_table, states_of  # noqa: PLC0415 (rich: only to show)
        from batchline.cli.views import console  # noqa: PLC0415
        from batchline.cli.views import show as show_view  # noqa: PLC0415

        show_view(batch_table(states_of(session.client, found), width=console().width))


@batches.command(epilog=_EPILOG)
@click.argument("batch_id", metavar="BATCH")
@client_options
def show(*, batch_id: str, base_url: str | None, as_json: bool, **flags: Any) -> None:
    """Show a batch: its progress, what it waits for, its errors and its files."""
    from batchline.cli.connection.session import connect  # noqa: PLC0415 (imports httpx: not for --help)

    with connect(base_url, flags) as session:
        batch = session.retrier.few_times(lambda: session.client.batch_object(batch_id))
        progress = session.retrier.few_times(lambda: session.client.progress(batch_id))
    if as_json:
        show_object(b'{"batch":%b,"progress":%b}' % (bytes(batch), bytes(progress)))
        return
    from batchline.cli.batches.views import BatchState, detail_view  # noqa: PLC0415 (rich: only to show)
    from batchline.cli.views import show as show_view  # noqa: PLC0415

    show_view(detail_view(BatchState.from_objects(batch, progress)))


@batches.command(
    epilog=exit_codes(
        "0 all lines succeeded", "3 some lines failed", "1 the batch failed, expired or was cancelled", "2", "4", "130"
    )
)
@click.argument("batch_id", metavar="[BATCH]", required=False)
@client_options
def watch(*, batch_id: str | None, base_url: str | None, as_json: bool, **flags: Any) -> None:
    """Watch BATCH until it ends, or all batches that run until Ctrl-C.

    On a terminal the view is redrawn; elsewhere a line is printed for each change. With --json, each change is an
    object on a line of its own.
    """
    from batchline.cli.batches.watch import watch_all, watch_one  # noqa: PLC0415 (imports rich and httpx)
    from batchline.cli.connection.session import connect  # noqa: PLC0415

    with connect(base_url, flags) as session:
        if batch_id is None:
            watch_all(session, as_json=as_json)
        else:
            raise SystemExit(watch_one(session, batch_id, as_json=as_json))


@batches.command(epilog=_EPILOG)
@click.argument("batch_ids", metavar="BATCH...", nargs=-1, required=True)
@client_options
def cancel(*, batch_ids: tuple[str, ...], base_url: str | None, as_json: bool, **flags: Any) -> None:
    """Cancel batches. Lines in flight finish and count; no further line starts.

    If one cannot be cancelled, the others are. With --json, several batches are printed as one array.
    """
    _change(batch_ids, base_url, flags, as_json=as_json, change=lambda session: session.client.cancel)


@batches.command(epilog=_EPILOG)
@click.argument("batch_ids", metavar="BATCH...", nargs=-1, required=True)
@client_options
def release(*, batch_ids: tuple[str, ...], base_url: str | None, as_json: bool, **flags: Any) -> None:
    """Let batches go on that were held because nearly all their lines failed. They are not held again.

    If one cannot be released, the others are. With --json, several batches are printed as one array.
    """
    _change(batch_ids, base_url, flags, as_json=as_json, change=lambda session: session.client.release)


def _change(
    batch_ids: tuple[str, ...],
    base_url: str | None,
    flags: dict[str, Any],
    *,
    as_json: bool,
    change: "Callable[[ClientSession], Callable[[str], Raw]]",
) -> None:
    """Change each batch and show its new state."""
    from batchline.cli.connection.changes import change_each  # noqa: PLC0415 (imports httpx: not for --help)
    from batchline.cli.connection.session import connect  # noqa: PLC0415
    from batchline.client.models import batch_decoder  # noqa: PLC0415

    with connect(base_url, flags) as session:
        change_each(
            session,
            batch_ids,
            change(session),
            as_json=as_json,
            describe=lambda raw: batch_decoder.decode(raw).status,
        )
