"""The command line of ``batchline top``."""

from typing import Any

import click

from batchline.cli.help import Command
from batchline.cli.output import exit_codes, json_flag
from batchline.cli.store import store_options


@click.command(
    short_help="Show what runs now, over all projects.",
    cls=Command,
    epilog=exit_codes("0", "1", "2", "130 ended with Ctrl-C"),
)
@click.option("--once", is_flag=True, help="Show it once and end; without a terminal this is the default.")
@click.option(
    "--url",
    metavar="URL",
    help="Process whose /metrics are read; BATCHLINE_ADMIN_TOKEN opens those of other machines. [that of the folder]",
)
@json_flag
@store_options
def top(*, once: bool, url: str | None, as_json: bool, **flags: Any) -> None:
    """Show what runs over all projects: upstreams with limit and rate, batches, and what waits and why.

    The batches are read from the database, and the upstreams from the metrics of the service that runs on the data
    folder, or of --url. On a terminal the screen is drawn again every two seconds. The key q ends it.
    """
    from batchline.cli.top.screen import run_top  # noqa: PLC0415 (imports rich and httpx: not for --help)

    run_top(flags, url=url, once=once, as_json=as_json)
