"""``batchline serve``: everything in one process."""

from typing import Any

import click

from batchline.cli.loading import load_settings
from batchline.cli.options import settings_options


@click.command()
@settings_options()
def serve(**flags: Any) -> None:
    """Run the service: API, worker, database and files in one process."""
    settings = load_settings(**flags)
    from batchline.app import StartupError, run  # noqa: PLC0415 (all of the service: not for --help)

    try:
        code = run(settings)
    except StartupError as refused:
        raise click.ClickException(str(refused)) from None
    raise SystemExit(code)
