"""``batchline api``: an API node, on PostgreSQL and a bucket."""

from typing import Any

import click

from batchline.cli.options import settings_options
from batchline.cli.roles import be


@click.command()
@settings_options()
def api(**flags: Any) -> None:
    """Run an API node, beside any number of others: needs PostgreSQL and a bucket."""
    be("api", flags)
