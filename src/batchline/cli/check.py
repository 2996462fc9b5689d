"""``batchline check``: says what a batch of a file would do, without running it. The uploaded file is deleted again."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchline.cli.help import Command
from batchline.cli.output import client_options, exit_codes, say, show_object
from batchline.cli.run.command import is_table
from batchline.cli.text import counted, format_count, format_duration, format_units, printable

if TYPE_CHECKING:
    from msgspec import Raw

    from batchline.cli.connection.session import ClientSession
    from batchline.client.models import CheckedModel, RemoteCheck

_EXIT_INVALID = 1


@click.command(
    short_help="Find every fault of a file without running it.",
    cls=Command,
    epilog=exit_codes("0 the file is valid", "1 it is not, or a failure", "2", "4"),
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@client_options
def check(*, file: Path, base_url: str | None, as_json: bool, **flags: Any) -> None:
    """Find every fault of FILE, and estimate its tokens, cost and time. No line runs.

    The file is uploaded for the check and deleted after it. Without a server and a data folder, the settings alone
    decide, and nothing is left behind.
    """
    if is_table(file):
        raise click.UsageError(
            f"{file} is a table, and check takes JSON lines. "
            "A table is checked by: batchline run FILE --prompt TEMPLATE"
        )
    from batchline.cli.connection.session import connect  # noqa: PLC0415 (imports httpx: not for --help)
    from batchline.client.models import check_decoder  # noqa: PLC0415

    with connect(base_url, flags, needs_data=False) as session:
        raw = _check(session, file)
    found = check_decoder.decode(raw)
    if as_json:
        show_object(raw)
    else:
        _show(str(file), found)
    raise SystemExit(0 if found.valid else _EXIT_INVALID)


def _check(session: "ClientSession", file: Path) -> "Raw":
    from batchline.cli.run.steps import endpoint_of  # noqa: PLC0415

    client, retrier = session.client, session.retrier
    session.stage(f"Uploading {file.name}")
    file_id = retrier.few_times(lambda: client.upload(file, on_progress=lambda _: None))
    try:
        session.stage("Checking the file")
        return retrier.few_times(lambda: client.check(file_id, endpoint=endpoint_of(file)))
    finally:
        retrier.few_times(lambda: client.delete_file(file_id))
        session.clear()


def _show(name: str, found: "RemoteCheck") -> None:
    from batchline.cli.run.report import fault_lines  # noqa: PLC0415
    from batchline.cli.views import show, table  # noqa: PLC0415

    faults = found.errors.data if found.errors else []
    verdict = "valid" if found.valid else f"not valid, {counted(len(faults), 'fault')}"
    say(f"{printable(name)}: {verdict}; {counted(found.lines, 'line')}{_time(found)}")
    for line in fault_lines(faults):
        click.echo(f"  {line}")
    if found.duplicates:
        verb = "repeats" if found.duplicates == 1 else "repeat"
        click.echo(f"  {counted(found.duplicates, 'line')} {verb} the request of another line")
    if found.models:
        heads = ("model", "lines", "enabled", "input tokens", "output at most", "cost at most")
        show(table(heads, [_row(model) for model in found.models], right=heads[1:]))
        if any(model.estimated for model in found.models) or found.estimated:
            click.echo(_describe_estimate(found))


def _describe_estimate(found: "RemoteCheck") -> str:
    lines = sum(model.counted_lines for model in found.models)
    if not lines:
        return "Tokens marked with ~ are estimated from the size of the requests."
    return f"Tokens marked with ~ are estimated from {counted(lines, 'line')} that the model's tokenizer counted."


def _time(found: "RemoteCheck") -> str:
    if found.seconds is None:
        return ""
    return f"; about {format_duration(found.seconds.low)} to {format_duration(found.seconds.high)}"


def _row(model: "CheckedModel") -> tuple[str, ...]:
    about = "~" if model.estimated else ""
    return (
        model.model or "-",
        format_count(model.lines),
        "yes" if model.enabled else "no",
        "-" if model.input_tokens is None else f"{about}{format_count(model.input_tokens)}",
        "-" if model.output_tokens_at_most is None else format_count(model.output_tokens_at_most),
        "-" if model.cost_at_most is None else format_units(float(model.cost_at_most)),
    )
