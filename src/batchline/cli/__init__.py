"""The command ``batchline``: one file or folder a verb, imported only when that verb is asked for."""

from importlib import import_module

import click

from batchline import __version__

_COMMANDS = (
    "api",
    "backup",
    "keys",
    "migrate",
    "mock",
    "orgs",
    "projects",
    "restore",
    "run",
    "serve",
    "usage",
    "worker",
)


class _LazyGroup(click.Group):
    """Each command is the object that has its module's name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"{__name__}.{cmd_name}"), cmd_name)
        return command


@click.group(name="batchline", cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="batchline")
def main() -> None:
    """OpenAI's Files and Batch API on your own machines.

    Every setting is a flag of `serve`, else BATCHLINE_* in the environment, else a line of the TOML file that
    --config names, else its default. Upstreams and models are tables of that file.
    """
