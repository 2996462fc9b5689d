"""The command line of ``batchline run``: its arguments, its messages and its exit codes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from batchline.cli.connection.stopping import stop_on_signals
from batchline.cli.help import Command
from batchline.cli.options import FLAGS, settings_options
from batchline.cli.output import ask, base_url_option, exit_codes, json_flag, place_flags, show_json
from batchline.cli.patch import metadata_option, patch_of, set_option

_SETTINGS = tuple(name for name in FLAGS if name not in {"host", "port"})
"""Settings of the service that a run starts. The run itself chooses where that service listens."""

_EXIT_SOME_FAILED = 3
_LARGE_JOB_LINES = 10_000
"""A larger job takes hours at one answer per second, and costs so much at usual prices that the user is asked first."""


@click.command(
    short_help="Run a file of requests, or a table, and save the answers.",
    cls=Command,
    epilog=exit_codes(
        *("0 all lines succeeded", "3 some lines failed", "5 the batch is held", "1", "2", "4", "130 interrupted")
    ),
)
@click.argument("input", metavar="FILE")
@click.option("-o", "--output", metavar="FILE", help="Answers; - is stdout. [FILE.output.jsonl]")
@click.option(
    "-e",
    "--errors",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Failed lines. [beside the output: .errors.jsonl]",
)
@click.option("--follow", is_flag=True, help="Also print answers to stdout as they come.")
@click.option("--order", type=click.Choice(("input",)), metavar="input", help="Save results in the order of the input.")
@set_option
@click.option("--name", metavar="NAME", help="Name of the batch in lists.")
@metadata_option
@click.option(
    "--hold/--no-hold",
    default=True,
    show_default=True,
    help="Stop to ask when nearly all of the first lines fail in the same way.",
)
@click.option("--reuse", is_flag=True, help="Take answers that the same lines got before, and run equal lines once.")
@click.option(
    "--max-cost", type=click.FloatRange(min=0), metavar="AMOUNT", help="Start no line once the job costs so much."
)
@click.option(
    "--ask-over",
    type=click.IntRange(min=0),
    metavar="LINES",
    default=_LARGE_JOB_LINES,
    show_default=True,
    help="Before a job with more lines, show its tokens, cost and time, and ask on a terminal.",
)
@click.option(
    "--prompt",
    metavar="TEMPLATE",
    help="Run a table (.csv, .tsv, .jsonl, .parquet): one request per row, with {column} for its values. The answers "
    "are joined to the rows.",
)
@click.option("--system", metavar="TEMPLATE", help="System message for the rows of a table.")
@click.option("--model", metavar="NAME", help="Model for the rows of a table. [the only one of the server]")
@click.option(
    "--schema",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="JSON schema of the answers to rows; each of its properties becomes a column.",
)
@click.option("--restart", is_flag=True, help="Cancel the job that was begun for this output, and begin a new one.")
@click.option("--again", is_flag=True, help="Run a finished job again, and overwrite its results.")
@base_url_option
@json_flag
@settings_options(*_SETTINGS)
def run(
    *,
    input: str,
    output: str | None,
    errors: Path | None,
    follow: bool,
    order: str | None,
    assignments: tuple[tuple[str, str], ...],
    name: str | None,
    metadata: tuple[tuple[str, str], ...],
    hold: bool,
    reuse: bool,
    max_cost: float | None,
    ask_over: int,
    prompt: str | None,
    system: str | None,
    model: str | None,
    schema: Path | None,
    restart: bool,
    again: bool,
    base_url: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Send every line of FILE through a batch and save the answers; - is stdin.

    If a server is named, the batch runs there. Otherwise the run uses the service that already runs on the data
    folder, or starts one and stops it at the end.

    To resume an interrupted run, run the same command again.

    With --json, stdout gets a summary, so the answers are saved in a file.
    """
    if follow and (as_json or output == "-"):
        raise click.UsageError("--follow prints answers to stdout, so it takes neither --json nor --output -")
    if as_json and (output or input) == "-":
        raise click.UsageError("--json prints a summary to stdout; save the answers in a file, with --output FILE")
    labels = dict(metadata) | ({"name": name} if name is not None else {})
    # The client imports httpx: not for --help.
    from batchline.cli.run.estimate import Threshold  # noqa: PLC0415
    from batchline.cli.run.lines import LinesRequest  # noqa: PLC0415
    from batchline.cli.run.rows.command import RowsRequest  # noqa: PLC0415
    from batchline.cli.run.runner import RunOptions  # noqa: PLC0415

    options = RunOptions(
        restart=restart,
        create={"metadata": labels} if labels else {},
        holds=hold,
        reuses=reuse,
        max_cost=max_cost,
        in_input_order=order is not None,
        prints_answers=follow,
        confirms=confirm,
        threshold=Threshold(lines=ask_over, asks=confirm if _has_terminal() else None),
        place=place_flags(base_url, flags),
    )
    request: LinesRequest | RowsRequest
    if prompt is None:
        _refuse_table_options(input, system=system, model=model, schema=schema)
        request = LinesRequest(source=input, output=output, errors=errors, patch=patch_of(assignments), again=again)
    else:
        _refuse_line_options(input, errors=errors, follow=follow)
        request = RowsRequest(
            source=Path(input),
            output=output,
            prompt=prompt,
            system=system,
            model=model,
            schema=schema,
            patch=patch_of(assignments),
            again=again,
        )
    with _errors_as_json(as_json), stop_on_signals():
        failed = request.run(options, base_url, flags, as_json=as_json)
    raise SystemExit(_EXIT_SOME_FAILED if failed else 0)


def is_table(path: Path) -> bool:
    """Return whether the suffix of a file says that it is a table. JSONL may be one or may contain requests."""
    return path.suffix.lower() in {".csv", ".tsv", ".parquet"}


def confirm(question: str) -> bool:
    """Ask the user, and return False if there is no terminal to ask on."""
    return _has_terminal() and ask(question, err=True)


def _has_terminal() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def _refuse_table_options(source: str, **options: object) -> None:
    if is_table(Path(source)):
        raise click.UsageError(f"{source} is a table, and a table needs --prompt: say what to ask for each row")
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise click.UsageError(f"{', '.join(given)}: this is for a table; add --prompt")


def _refuse_line_options(source: str, *, errors: Path | None, follow: bool) -> None:
    if source == "-":
        raise click.UsageError("--prompt needs a table in a file; its suffix says how to read it")
    if errors is not None or follow:
        raise click.UsageError("--prompt writes one table with all rows, so it takes neither --errors nor --follow")


@contextmanager
def _errors_as_json(as_json: bool) -> Iterator[None]:
    """Print an error as JSON too, for a program that reads stdout."""
    try:
        yield
    except click.ClickException as error:
        if as_json:
            show_json({"error": {"message": error.format_message(), "exit_code": error.exit_code}})
        raise
