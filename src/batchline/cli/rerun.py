"""``batchline rerun``: makes a new batch of the failed lines of another one."""

from typing import Any

import click

from batchline.cli.help import Command
from batchline.cli.output import client_options, exit_codes, say, show_object
from batchline.cli.patch import metadata_option, patch_of, set_option
from batchline.cli.text import counted
from batchline.system import SystemRandom


@click.command(short_help="Run the failed lines of a batch again.", cls=Command, epilog=exit_codes("0", "1", "2", "4"))
@click.argument("batch_id", metavar="BATCH")
@click.option("--code", "codes", metavar="CODE", multiple=True, help="Only lines with this code. Can be repeated.")
@set_option
@metadata_option
@client_options
def rerun(
    *,
    batch_id: str,
    codes: tuple[str, ...],
    assignments: tuple[tuple[str, str], ...],
    metadata: tuple[tuple[str, str], ...],
    base_url: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Run the failed lines of BATCH again, as a new batch, and print its id.

    `batchline errors BATCH` lists the codes. `batchline results BATCH --merged` prints the newest result of each line
    once the new batch has ended.
    """
    body = {
        name: value
        for name, value in (("codes", list(codes)), ("patch", patch_of(assignments)), ("metadata", dict(metadata)))
        if value
    }
    from batchline.cli.connection.session import connect  # noqa: PLC0415 (imports httpx: not for --help)
    from batchline.client.models import batch_decoder  # noqa: PLC0415

    # One key for all attempts: an answer that was lost makes no second batch.
    key = "rerun-" + SystemRandom().bytes(16).hex()
    with connect(base_url, flags) as session:
        raw = session.retrier.few_times(lambda: session.client.rerun(batch_id, body, idempotency_key=key))
        has_worker = session.target.has_worker()
    if as_json:
        show_object(raw)
        return
    batch = batch_decoder.decode(raw)
    click.echo(batch.id)
    say(f"{counted(batch.request_counts.total, 'line')} of {batch_id} run again as {batch.id}.", indent=2, err=True)
    if not has_worker:
        say("No service runs on the data folder. The batch starts with the next: batchline serve", err=True)
