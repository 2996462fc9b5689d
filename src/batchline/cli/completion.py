"""``batchline completion``: prints the script that completes commands and options in a shell."""

import click
from click.shell_completion import get_completion_class

from batchline.cli.help import Command
from batchline.cli.output import exit_codes

_VARIABLE = "_BATCHLINE_COMPLETE"
_HELP = """Print the script that completes `batchline` in a shell.

\b
bash  echo 'eval "$(batchline completion bash)"' >> ~/.bashrc
zsh   echo 'eval "$(batchline completion zsh)"' >> ~/.zshrc
fish  batchline completion fish > ~/.config/fish/completions/batchline.fish
"""
"""Click does not join the lines of a paragraph that begins with a backspace character."""


@click.command(cls=Command, help=_HELP, epilog=exit_codes("0", "2"))
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")), metavar="[bash|zsh|fish]")
def completion(*, shell: str) -> None:
    """Print the script that completes `batchline` in a shell."""
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"there is no completion for {shell}")
    root = click.get_current_context().find_root().command
    # The text is made from the class's template alone: ``source`` would start the shell to ask for its version.
    made = kind(root, {}, "batchline", _VARIABLE)
    click.echo(made.source_template % made.source_vars())
