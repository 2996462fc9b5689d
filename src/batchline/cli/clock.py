"""``batchline clock``: shows the time that a service on one machine trusts, and accepts the clock after a jump."""

from typing import Any

import click

from batchline.cli.help import Group
from batchline.cli.loading import load_settings
from batchline.cli.output import json_flag, moment, show_fields, show_json
from batchline.cli.store import now, store_options
from batchline.settings import Settings


@click.group(short_help="Show the time that the service trusts.", cls=Group)
def clock() -> None:
    """Show the time that the service trusts, or accept the machine's clock after a jump."""


@clock.command()
@json_flag
@store_options
def show(as_json: bool, **flags: Any) -> None:
    """Show the clock of this machine and the time that the service trusts."""
    settings = _of_one_machine(flags)
    from batchline.app import clock_file  # noqa: PLC0415 (all of the service: not for --help)

    saved = clock_file(settings).load()
    trusted, held = (None, False) if saved is None else (int(saved.time), saved.held)
    if as_json:
        show_json({"clock": now(), "last_trusted": trusted, "held": held})
        return
    show_fields(
        {
            "clock": moment(now()),
            "last_trusted": "never" if trusted is None else moment(trusted),
            "held": "yes: nothing expires and nothing is deleted" if held else "no",
        }
    )


@clock.command()
@store_options
def accept(**flags: Any) -> None:
    """Trust the clock of this machine. What is past its time by this clock expires within seconds."""
    settings = _of_one_machine(flags)
    from batchline.app import clock_file  # noqa: PLC0415 (all of the service: not for --help)

    clock_file(settings).accept()
    click.echo(f"The service trusts the clock within 5 s: {moment(now())}")


def _of_one_machine(flags: dict[str, Any]) -> Settings:
    settings = load_settings(**flags)
    if settings.database_url is not None:
        raise click.ClickException("The clock of the PostgreSQL server decides. Set that one, if it is wrong.")
    if not settings.data_dir.is_dir():
        raise click.ClickException(f"There is no data folder {settings.data_dir}.")
    return settings
