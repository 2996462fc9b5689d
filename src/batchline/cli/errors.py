"""``batchline errors``: groups the failed lines of a batch by code and says what to do."""

from typing import TYPE_CHECKING, Any

import click

from batchline.cli.help import Command
from batchline.cli.output import client_options, exit_codes, place_flags, say, show_object
from batchline.cli.text import counted, format_count, shortened
from batchline.domain.line_errors import remedy_for, without_legacy

if TYPE_CHECKING:
    from batchline.client.models import ErrorCount, RemoteProgress

_PATCH = "`batchline rerun BATCH --set NAME=VALUE`"


@click.command(
    short_help="Show the failed lines of a batch by code.", cls=Command, epilog=exit_codes("0", "1", "2", "4")
)
@click.argument("batch_id", metavar="BATCH")
@client_options
def errors(*, batch_id: str, base_url: str | None, as_json: bool, **flags: Any) -> None:
    """Show the failed lines of BATCH by code, with a sample and what to do."""
    from batchline.cli.connection.session import connect  # noqa: PLC0415 (imports httpx: not for --help)
    from batchline.client.models import progress_decoder  # noqa: PLC0415

    with connect(base_url, flags) as session:
        raw = session.retrier.few_times(lambda: session.client.progress(batch_id))
    progress = progress_decoder.decode(raw)
    if as_json:
        from msgspec.json import encode  # noqa: PLC0415

        show_object(encode({"batch_id": progress.batch_id, "errors": progress.errors}))
        return
    _show(batch_id, progress, place=place_flags(base_url, flags))


def _show(batch_id: str, progress: "RemoteProgress", *, place: str) -> None:
    failed, total = progress.request_counts.failed, progress.request_counts.total
    if not progress.errors:
        say(f"No line of {batch_id} failed ({progress.status}, {counted(total, 'line')}).")
        return
    click.echo(f"{format_count(failed)} of {counted(total, 'line')} failed.")
    for error in progress.errors:
        click.echo("")
        for line in _lines(error):
            say(line, indent=15)
    click.echo("")
    click.echo(f"Show them:      batchline results {batch_id} --failed{place}")
    click.echo(f"Run them again: batchline rerun {batch_id}{place}")


def _lines(error: "ErrorCount") -> list[str]:
    return [
        f"{shortened(error.code)}: {counted(error.count, 'line')}",
        f"  for example  {shortened(error.sample.custom_id)}: {shortened(without_legacy(error.sample.message))}",
        f"  what to do   {remedy_for(error.code, patch=_PATCH)}",
    ]
