"""``batchline serve``: everything in one process."""

from typing import Any

import click

from batchline.cli.options import settings_options
from batchline.cli.roles import be


@click.command()
@settings_options()
def serve(**flags: Any) -> None:
    """Run the service: API, worker, database and files in one process."""
    be("serve", flags)
