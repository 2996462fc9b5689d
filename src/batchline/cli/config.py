"""``batchline config``: checks the settings without starting a service."""

from pathlib import Path
from typing import Any

import click

from batchline.cli.help import Group
from batchline.cli.loading import load_settings, source_of
from batchline.cli.options import settings_options
from batchline.cli.output import exit_codes, json_flag, say, show_json
from batchline.cli.text import counted, printable


@click.group(cls=Group)
def config() -> None:
    """Check the settings."""


@config.command(epilog=exit_codes("0 the settings are valid", "2 they are not"))
@click.argument("file", type=click.Path(path_type=Path), required=False)
@json_flag
@settings_options("config")
def check(*, file: Path | None, as_json: bool, **flags: Any) -> None:
    """Check FILE, or the file of --config, with the environment, as `serve` would. Nothing is started.

    Every fault is named with the flag, the variable or the line of the file to correct.
    """
    if file is not None and flags.get("config") is not None:
        raise click.UsageError("FILE and --config name the same thing; give one of them")
    given = {"config": str(file)} if file is not None else {key: value for key, value in flags.items() if value}
    settings = load_settings(**given)
    from batchline.service_description import describe  # noqa: PLC0415 (not for --help)

    answers = describe(settings).answers
    sources = {name: source_of(name, given) for name in sorted(settings.model_fields_set - {"config"})}
    if as_json:
        show_json({"valid": True, "answers": answers, "settings": sources})
        return
    named = "" if settings.config is None else f"{printable(str(settings.config))}: "
    click.echo(f"{named}valid; {counted(len(sources), 'setting')} given")
    for source in sources.values():
        click.echo(f"  {source}")
    for answer in answers:
        say(f"Answers come from: {printable(answer)}", indent=2)
