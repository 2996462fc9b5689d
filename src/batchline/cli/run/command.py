"""The command line of ``batchline run``: its arguments, its signals and its exit codes."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from batchline.cli.loading import RUN_VARIABLES
from batchline.cli.options import FLAGS, settings_options
from batchline.cli.output import json_flag
from batchline.cli.run.display import Display, stderr_display
from batchline.cli.run.journal import Journal, JournalUnusable
from batchline.cli.run.report import Results, show_json, show_results
from batchline.system import SystemClock, SystemRandom

if TYPE_CHECKING:
    from batchline.cli.run.runner import RunRequest
    from batchline.cli.run.target import Target

_BASE_URL = RUN_VARIABLES[0]
_SETTINGS = tuple(name for name in FLAGS if name not in {"host", "port"})
"""Settings of the service that a run starts. The run itself chooses where that service listens."""

_EXIT_SOME_FAILED = 3


class _Stopped(BaseException):
    """A signal asked the run to stop."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        """The code that shells use. It is not 1, because the job has not failed and can be resumed."""


@click.command()
@click.argument("input", type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path))
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Answers. [INPUT.output.jsonl]")
@click.option(
    "-e", "--errors", type=click.Path(dir_okay=False, path_type=Path), help="Failed lines. [INPUT.errors.jsonl]"
)
@click.option("--base-url", metavar="URL", envvar=_BASE_URL, help=f"Server to run on. [{_BASE_URL}]")
@click.option("--restart", is_flag=True, help="Cancel the job that was begun for this output, and begin a new one.")
@json_flag
@settings_options(*_SETTINGS)
def run(
    *,
    input: Path,
    output: Path | None,
    errors: Path | None,
    base_url: str | None,
    restart: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Send every line of INPUT through a batch and save the answers.

    If a server is named, the batch runs there, with the credentials in BATCHLINE_API_KEY and BATCHLINE_PROJECT_ID.
    Otherwise the run uses the service that already runs on the data folder, or starts one with the settings below and
    stops it at the end.

    To resume an interrupted run, run the same command again.

    Exit codes: 0 all lines succeeded, 3 some lines failed, 1 failure, 2 wrong usage, 4 wrong credentials, 130
    interrupted.
    """
    # The client imports httpx: not for --help.
    from batchline.cli.run.runner import RunRequest  # noqa: PLC0415

    name = input.name.removesuffix(".jsonl")
    request = RunRequest(
        source=input,
        output=output or input.with_name(f"{name}.output.jsonl"),
        errors=errors or input.with_name(f"{name}.errors.jsonl"),
        restart=restart,
    )
    _check_paths(request)
    with _stop_on_signals():
        results = _run(request, base_url, flags, as_json=as_json)
    raise SystemExit(_EXIT_SOME_FAILED if results.batch.request_counts.failed else 0)


def _run(request: "RunRequest", base_url: str | None, flags: dict[str, Any], *, as_json: bool) -> Results:
    from batchline.cli.run.runner import BatchRun  # noqa: PLC0415 (imports httpx: not for --help)
    from batchline.cli.run.target import target_for  # noqa: PLC0415

    clock, random = SystemClock(), SystemRandom()
    display = stderr_display(steady=clock.steady)
    with asyncio.Runner() as runner, closing(_open_journal(request.output)) as journal:

        def pause(seconds: float) -> None:
            runner.run(clock.sleep(seconds))

        target = target_for(base_url, flags, pause=pause, on_wait=display.stage)
        batch_run = BatchRun(
            request, target=target, journal=journal, display=display, clock=clock, random=random, pause=pause
        )
        with _advise_when_stopped(target), closing(target), _clear_before_errors(target, display):
            results = batch_run.run()
            display.clear()
            show_results(results)
            if as_json:
                show_json(results)
        return results


def _open_journal(output: Path) -> Journal:
    try:
        return Journal(output.with_name(f"{output.name}.batchline"))
    except JournalUnusable as error:
        raise click.ClickException(str(error)) from None


def _check_paths(request: "RunRequest") -> None:
    if len({path.resolve() for path in (request.source, request.output, request.errors)}) < 3:
        raise click.UsageError("INPUT, --output and --errors must be three different files")
    for path in (request.output, request.errors):
        if not path.parent.is_dir():
            raise click.UsageError(f"there is no folder {path.parent}; create it first")


@contextmanager
def _stop_on_signals() -> Iterator[None]:
    """Raise _Stopped at SIGINT and SIGTERM, and exit with its code after everything was closed."""

    def stop(number: int, _: FrameType | None) -> None:
        raise _Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except _Stopped as stopped:
        raise SystemExit(stopped.exit_code) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _clear_before_errors(target: "Target", display: Display) -> Iterator[None]:
    """Remove the progress line before an error is printed. If stopping takes a while, say so."""
    try:
        yield
    except (_Stopped, click.ClickException) as error:
        display.clear()
        if isinstance(error, _Stopped) and (notice := target.closing_notice()) is not None:
            click.echo(notice, err=True)
        raise


@contextmanager
def _advise_when_stopped(target: "Target") -> Iterator[None]:
    """Print how to resume, after the target was closed."""
    try:
        yield
    except _Stopped:
        click.echo(target.if_interrupted, err=True)
        raise
