"""The help of commands: a command's own options first, and the settings of the service only with ``--help-all``."""

from collections.abc import Sequence
from typing import Any

import click

_META = "batchline.help_all"


class SettingOption(click.Option):
    """The flag of a setting that only ``--help-all`` lists."""


class Command(click.Command):
    """A command with ``--help`` for its own options and ``--help-all`` for all of them."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with ``--help-all`` if there are settings to list."""
        params = super().get_params(ctx)
        if any(isinstance(param, SettingOption) for param in params) and _HELP_ALL not in params:
            return [*params, _HELP_ALL]
        return params

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options, and the settings if they were asked for."""
        options = [param for param in self.get_params(ctx) if not isinstance(param, click.Argument)]
        settings = [option for option in options if isinstance(option, SettingOption)]
        with formatter.section("Options"):
            formatter.write_dl(_records(ctx, [option for option in options if option not in settings]))
        if settings and ctx.meta.get(_META):
            with formatter.section("Settings of the service"):
                formatter.write_dl(_records(ctx, settings))


class Group(click.Group):
    """A group of such commands."""

    command_class = Command


def _records(ctx: click.Context, options: Sequence[click.Parameter]) -> list[tuple[str, str]]:
    return [record for option in options if (record := option.get_help_record(ctx)) is not None]


def _show_all(ctx: click.Context, _: click.Parameter, value: Any) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_META] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all,
    help="Show this message with all settings of the service.",
)
