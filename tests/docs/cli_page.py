"""Writes docs/cli.md from the commands themselves: `make cli-page`."""

import inspect
from collections.abc import Iterator
from pathlib import Path

import click

from batchline.cli import _COMMANDS, main
from batchline.cli.help import SettingOption

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
_HEAD = """# The command line

`make cli-page` writes this page from the commands themselves; `tests/docs/test_cli_page.py` holds it.

There are two kinds of commands.

**Client commands** (`run`, `check`, `batches`, `results`, `errors`, `rerun`, `files`, `models`) do what a client of the
API does.

- *With a server.* They use the server that `--base-url` names, or else `BATCHLINE_BASE_URL`, or else `OPENAI_BASE_URL`.
  The key is in `BATCHLINE_API_KEY`, or else in `OPENAI_API_KEY`. `BATCHLINE_PROJECT_ID` is needed only if the server
  does not accept a key alone.
- *Without a server.* They use the data folder on this machine (`--data-dir`). If a service runs on it, they use that
  service. Otherwise they start one and stop it at their end. The one that `run` starts runs lines. The others start one
  that only answers them. On a data folder client commands see the project of `batchline run`, and no other.

**All other commands** are for the operator. They work on the data folder or the database that the settings name, also
while a service runs. A command that only reads creates no data folder.

Data is written to stdout, progress and messages to stderr. `--json` prints JSON. There is colour only on a terminal,
and none if `NO_COLOR` is set. Control characters in texts of clients and upstreams are escaped. Ctrl-C ends every
command in order, with the code 130. Only `serve`, `api`, `worker` and `mock`, which run until Ctrl-C or SIGTERM, then
end with 0. A second signal ends `serve`, `api` and `worker` at once, with 130 or 143.

| Exit code | Meaning |
|---|---|
| 0 | success |
| 1 | failure; stderr says why and what to do |
| 2 | wrong usage |
| 3 | the batch finished, and some of its lines failed |
| 4 | the credentials are missing or wrong |
| 5 | the batch is held, because nearly all of its lines fail |
| 75 | another process serves the data folder |
| 130, 143 | interrupted by Ctrl-C or SIGTERM; what was submitted goes on, or is resumed by the same command |

`--help` lists the options of a command. `--help-all` also lists the settings of the service, which every command that
starts or opens one accepts; they are in [settings.md](settings.md) and not repeated here.
"""


def page() -> str:
    """Return the whole page."""
    parts = [_HEAD]
    for title, names in _COMMANDS.items():
        parts.append(f"\n## {title}\n")
        for name in names:
            command = main.get_command(click.Context(main), name)
            assert command is not None
            parts += _sections(command, f"batchline {name}")
    return "".join(parts)


def _sections(command: click.Command, path: str) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from _sections(inner, f"{path} {name}")
    else:
        yield _section(command, path)


def _section(command: click.Command, path: str) -> str:
    context = click.Context(command, info_name=path)
    usage = " ".join(piece for piece in command.collect_usage_pieces(context))
    text = inspect.cleandoc(command.help or "").replace("\b\n", "```\n") + (
        "\n```" if "\b" in (command.help or "") else ""
    )
    rows = [row for param in command.get_params(context) if (row := _row(param, context)) is not None]
    table = "\n| Option | |\n|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
    codes = f"\n{command.epilog}\n" if command.epilog else ""
    return f"\n### `{path}{' ' + usage if usage else ''}`\n\n{text}\n{table}{codes}"


def _row(param: click.Parameter, context: click.Context) -> str | None:
    if isinstance(param, SettingOption) or not isinstance(param, click.Option):
        return None
    record = param.get_help_record(context)
    if record is None or {"--help", "--help-all"} & set(param.opts):
        return None
    return f"| `{record[0].replace('|', chr(92) + '|')}` | {record[1].replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    PAGE.write_text(page())
