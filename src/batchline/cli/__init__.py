"""The command ``batchline``. The module of a subcommand is imported only when it is needed."""

from importlib import import_module

import click

from batchline import __version__

_MODULES = {
    "adopt": "adopt",
    "api": "roles",
    "backup": "backup",
    "batches": "batches",
    "clock": "clock",
    "fsck": "fsck",
    "keys": "keys",
    "migrate": "migrate",
    "mock": "mock",
    "orgs": "orgs",
    "projects": "projects",
    "restore": "restore",
    "run": "run",
    "serve": "roles",
    "usage": "usage",
    "webhooks": "webhooks",
    "worker": "roles",
}
"""The module of each command. The command is the object in it that has the command's name."""


class _LazyGroup(click.Group):
    """A group that imports its commands when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        command: click.Command = getattr(import_module(f"{__name__}.{_MODULES[cmd_name]}"), cmd_name)
        return command


@click.group(name="batchline", cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="batchline")
def main() -> None:
    """OpenAI's Files and Batch API on your own machines.

    Every setting can be given as a flag of `serve`, as a BATCHLINE_* environment variable, or in the TOML file that
    --config names. A flag overrides the environment, and the environment overrides the file. Upstreams and models are
    tables of that file.
    """
