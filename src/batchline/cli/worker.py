"""``batchline worker``: a worker, on PostgreSQL and a bucket."""

from typing import Any

import click

from batchline.cli.options import settings_options
from batchline.cli.roles import be


@click.command()
@settings_options()
def worker(**flags: Any) -> None:
    """Run a worker, beside any number of others: needs PostgreSQL and a bucket.

    It answers on /healthz, /readyz and /metrics, and on nothing else.
    """
    be("worker", flags)
