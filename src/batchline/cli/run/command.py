"""The command: from what was typed to a job at its place, and from how that ended to an exit code."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from batchline.cli.options import FLAGS, settings_options
from batchline.cli.output import json_flag
from batchline.cli.run.display import Display, stderr_display
from batchline.cli.run.journal import Journal, JournalUnusable
from batchline.cli.run.report import Results, show_json, show_results
from batchline.cli.run.runner import BatchRun, RunRequest
from batchline.cli.run.target import BASE_URL, Place, place_for
from batchline.system import SystemClock, SystemRandom

_SETTINGS = tuple(name for name in FLAGS if name not in {"host", "port"})
"""Of the service that a run starts for itself; where that listens is the run's own business."""

_SOME_FAILED = 3


class _Stopped(BaseException):
    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        """As shells have it. The job has not failed: it waits to be picked up, which 1 would not tell."""


@click.command()
@click.argument("input", type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path))
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Answers. [INPUT.output.jsonl]")
@click.option(
    "-e", "--errors", type=click.Path(dir_okay=False, path_type=Path), help="Failed lines. [INPUT.errors.jsonl]"
)
@click.option("--base-url", metavar="URL", envvar=BASE_URL, help=f"Server to run on. [{BASE_URL}]")
@click.option("--restart", is_flag=True, help="Give up the job that was begun for this output, and begin anew.")
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
    """Send every line of INPUT through a batch and bring the answers home.

    With a server named, it is done there, as BATCHLINE_API_KEY and BATCHLINE_PROJECT_ID. Else a service is started on
    the data folder for as long as the job takes, with the settings below; or one that runs on it already is used.

    A job that was interrupted goes on when the same command is run again.

    Exit codes: 0 all lines succeeded, 3 some failed, 1 failure, 2 usage, 4 credentials, 130 interrupted.
    """
    order = _order(input, output, errors, restart=restart)
    with _stoppable():
        results = _do(order, base_url, flags, as_json=as_json)
    raise SystemExit(_SOME_FAILED if results.batch.request_counts.failed else 0)


def _do(order: RunRequest, base_url: str | None, flags: dict[str, Any], *, as_json: bool) -> Results:
    clock, random = SystemClock(), SystemRandom()
    display = stderr_display(steady=clock.steady)
    with asyncio.Runner() as runner, closing(_journal(order.output)) as journal:

        def pause(seconds: float) -> None:
            runner.run(clock.sleep(seconds))

        place = place_for(base_url, flags, pause=pause, tell=display.stage)
        work = BatchRun(order, place=place, journal=journal, display=display, clock=clock, random=random, pause=pause)
        with _left_in_order(place), closing(place), _words_before_leaving(place, display):
            results = work.do()
            display.clear()
            _show(results, as_json=as_json)
        return results


def _show(results: Results, *, as_json: bool) -> None:
    show_results(results)
    if as_json:
        show_json(results)


def _journal(output: Path) -> Journal:
    try:
        return Journal(output.with_name(f"{output.name}.batchline"))
    except JournalUnusable as refused:
        raise click.ClickException(str(refused)) from None


def _order(source: Path, output: Path | None, errors: Path | None, *, restart: bool) -> RunRequest:
    name = source.name.removesuffix(".jsonl")
    output = output or source.with_name(f"{name}.output.jsonl")
    errors = errors or source.with_name(f"{name}.errors.jsonl")
    if len({path.resolve() for path in (source, output, errors)}) < 3:
        raise click.UsageError("INPUT, --output and --errors must be three different files")
    for path in (output, errors):
        if not path.parent.is_dir():
            raise click.UsageError(f"there is no folder {path.parent}")
    return RunRequest(source=source, output=output, errors=errors, restart=restart)


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGINT and SIGTERM both leave in order."""

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
def _words_before_leaving(place: Place, display: Display) -> Iterator[None]:
    try:
        yield
    except _Stopped:
        display.clear()
        if (words := place.completer()) is not None:
            click.echo(words, err=True)
        raise
    except click.ClickException:
        display.clear()
        raise


@contextmanager
def _left_in_order(place: Place) -> Iterator[None]:
    try:
        yield
    except _Stopped:
        click.echo(place.if_left, err=True)
        raise
