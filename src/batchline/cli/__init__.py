"""The command ``batchline``. The module of a subcommand is imported only when it is needed."""

from importlib import import_module

import click

from batchline import __version__
from batchline.cli.text import wrapped

_COMMANDS = {
    "Jobs": ("run", "check", "batches", "results", "errors", "rerun", "files", "models"),
    "Service": ("serve", "api", "worker", "top", "keys", "orgs", "projects", "usage", "webhooks"),
    "Operation": ("config", "doctor", "migrate", "backup", "restore", "fsck", "adopt", "clock"),
    "Tools": ("mock", "completion"),
}
"""The commands, as ``--help`` groups them."""
_ERROR = "Error: "
"""The text that click prints before the message of an error."""
_INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells use it. It is not 1, because nothing has failed."""
_MODULES = {"api": "roles", "serve": "roles", "worker": "roles"}
"""The modules of commands that do not have a module of their own name."""


class _LazyGroup(click.Group):
    """A group that imports its commands when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in _COMMANDS.values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = import_module(f"{__name__}.{_MODULES.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run a command. Wrap the message of its error between words."""
        try:
            return self._invoke(ctx)
        except click.ClickException as error:
            first, *others = error.message.split("\n")
            lines = [
                wrapped(first, indent=2, begun=len(_ERROR), err=True),
                *(wrapped(line, indent=2, err=True) for line in others),
            ]
            vars(error)["message"] = "\n".join(lines)
            raise

    def _invoke(self, ctx: click.Context) -> object:
        """Run a command. End in order at Ctrl-C, and raise ClickException if a file or a folder cannot be used."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _interrupted() from None
        except click.Abort as abort:
            # A question of click ends in this way at Ctrl-C, and at the end of stdin.
            if isinstance(abort.__context__, KeyboardInterrupt):
                raise _interrupted() from None
            raise
        except BrokenPipeError:
            raise  # the reader of stdout has gone, which click knows how to end with
        except OSError as error:
            place = "" if error.filename is None else f"{error.filename}: "
            raise click.ClickException(f"{place}{error.strerror or repr(error)}") from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            raise click.NoSuchCommand(args[0], possibilities=self.list_commands(ctx), ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.list_commands(ctx)))
        for title, names in _COMMANDS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (name.ljust(width), command.get_short_help_str(formatter.width - width - 6))
                        for name, command in commands
                        if command is not None
                    ]
                )


def _interrupted() -> click.exceptions.Exit:
    """Return the end of a command at Ctrl-C, after the line on which the terminal shows ^C was ended."""
    click.echo(err=True)
    return click.exceptions.Exit(_INTERRUPTED)


@click.group(name="batchline", cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="batchline")
def main() -> None:
    """OpenAI's Files and Batch API on your own machines.

    Client commands use the server in BATCHLINE_BASE_URL with the key in BATCHLINE_API_KEY, or OPENAI_BASE_URL and
    OPENAI_API_KEY if these are not set. Without a server they use the data folder on this machine.

    Every setting can be given as a flag of `serve`, as a BATCHLINE_* environment variable, or in the TOML file that
    --config names. A flag overrides the environment, and the environment overrides the file. Upstreams and models are
    tables of that file.
    """
