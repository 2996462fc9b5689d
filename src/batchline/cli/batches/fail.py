"""``batchline batches fail``: ends a batch that cannot end by itself. The service may run meanwhile."""

from typing import Any

import click

from batchline.cli.help import Command
from batchline.cli.output import Row, json_flag, say, show_fields, show_json
from batchline.cli.store import in_store, store_options
from batchline.domain.records import Batch
from batchline.domain.states import TERMINAL, BatchStatus
from batchline.ports import Store


@click.command(cls=Command)
@click.argument("batch_id", metavar="BATCH")
@json_flag
@store_options
def fail(batch_id: str, as_json: bool, **flags: Any) -> None:
    """End a batch by hand: every line that has no result fails.

    No line of it starts any more, and those in flight finish. Results that were recorded are kept, and the other lines
    go to the error file with the code internal_error. A running service writes the files within seconds; without one,
    the next that starts does. Use it for a batch that cannot go on; to stop a healthy one, cancel it.
    """

    async def change(store: Store) -> Batch:
        batch = await store.stop_failed(batch_id)
        if batch is None:
            raise click.ClickException(f"There is no batch {batch_id!r}")
        if batch.status is BatchStatus.VALIDATING:
            raise click.ClickException(f"{batch_id} is being validated; it ends by itself, or can be cancelled")
        if batch.status in TERMINAL:
            raise click.ClickException(f"{batch_id} is {batch.status} already")
        return batch

    batch = in_store(flags, change)
    if as_json:
        show_json(_row(batch))
        return
    show_fields({name: str(value) for name, value in _row(batch).items()})
    say("A running service ends the batch now; lines without a result fail with internal_error.", err=True)


def _row(batch: Batch) -> Row:
    return {
        "batch_id": batch.id,
        "status": batch.status,
        "total": batch.total,
        "completed": batch.completed,
        "failed": batch.failed,
        "without_result": batch.total - batch.completed - batch.failed,
    }
