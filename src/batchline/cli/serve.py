"""``batchline serve``: everything on one machine."""

from typing import Any

import click

from batchline.cli.options import settings_options
from batchline.cli.roles import be


@click.command()
@settings_options()
def serve(**flags: Any) -> None:
    """Run the service: API, worker, database and files on one machine, in one process while that keeps up."""
    be("serve", flags)
