"""Reports the results of a run, for people and for programs."""

from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from msgspec import Struct, field
from msgspec.json import encode as encode_json

from batchline.cli.destination import Destination
from batchline.cli.output import say
from batchline.cli.run.result_lines import error_of
from batchline.cli.text import counted, format_count, format_duration, format_units, printable, shortened
from batchline.client.models import Counts, LineFault, RemoteBatch, RemoteProgress
from batchline.domain.limits import MAX_FAULTS
from batchline.domain.line_errors import without_legacy

_MAX_CODES = 20


class SavedResults(Struct, frozen=True, kw_only=True):
    """The ended batch and the files that were saved."""

    batch: RemoteBatch
    output: Destination | None
    """None if no line succeeded."""

    errors: Destination | None
    """None if no line failed."""

    seconds: float
    to_stdout: bool = False
    """Whether the output is copied to stdout and then deleted."""

    progress: RemoteProgress = RemoteProgress()
    """The progress of the batch at its end, with its cost."""


def show_results(results: SavedResults, *, place: str = "") -> None:
    """Print the outcome, the files and a table of errors to stderr; stdout is for programs.

    ``place`` contains the flags that chose the server or the data folder, for the command that is printed.
    """
    _print(_summary(results))
    for name, shown in (("output", _name(results.output)), ("errors", _name(results.errors))):
        if shown is not None:
            _print(f"  {name}  {printable(shown)}")
    if results.errors is not None:
        for line in _table(_count_by_code(results.errors.path)):
            _print(f"  {line}")
        _print(f"  To run the failed lines again: batchline rerun {results.batch.id}{place}")


def show_summary(results: SavedResults) -> None:
    """Print a summary as JSON to stdout."""
    batch, counts = results.batch, results.batch.request_counts
    summary = {
        "batch_id": batch.id,
        "status": batch.status,
        "total": counts.total,
        "completed": counts.completed,
        "failed": counts.failed,
        "output": _name(results.output),
        "errors": _name(results.errors),
        "seconds": round(results.seconds, 3),
        "usage": batch.usage,
        "cost": results.progress.cost,
        "reused": results.progress.reused,
        "saved": results.progress.saved,
    }
    click.echo(msgspec.json.format(encode_json(summary), indent=2))


def _name(saved: Destination | None) -> str | None:
    return None if saved is None else saved.name


def fault_lines(faults: list[LineFault], *, first_row: int | None = None) -> list[str]:
    """Return one line of text per fault of the input, with the line number first, as compilers print it.

    If the lines were made from a table, its rows are named. The first line was made from ``first_row``.
    """
    lines = [_fault_line(fault, first_row) for fault in faults]
    return [*lines, f"(the first {MAX_FAULTS} are listed)"] if len(lines) == MAX_FAULTS else lines


def _fault_line(fault: LineFault, first_row: int | None) -> str:
    text = shortened(fault.message)
    if fault.line is None:
        return text
    place = f"line {fault.line}" if first_row is None else f"row {first_row + fault.line - 1}"
    return f"{place}: {text.removeprefix(f'Line {fault.line} ')}"


def _print(text: str) -> None:
    say(text, indent=2, err=True)


def _summary(results: SavedResults) -> str:
    counts = results.batch.request_counts
    parts = [f"{results.batch.status.capitalize()}: {_outcome(counts)} in {format_duration(results.seconds)}"]
    bill = JobBill()
    bill.add(results)
    return "; ".join([*parts, *bill.describe()])


class JobBill(Struct, kw_only=True):
    """The batches of a job, their tokens and their cost, and what they reused."""

    batch_ids: list[str] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    reused: int = 0
    saved: float = 0.0

    def add(self, results: SavedResults) -> None:
        """Add a batch."""
        tokens, progress = results.batch.tokens, results.progress
        self.batch_ids.append(results.batch.id)
        self.input_tokens += tokens.input_tokens
        self.output_tokens += tokens.output_tokens
        self.cost, self.saved = self.cost + progress.cost, self.saved + progress.saved
        self.reused += progress.reused

    def describe(self) -> list[str]:
        """Return the bill in words; nothing for what is zero."""
        tokens = f"{format_count(self.input_tokens)} tokens in, {format_count(self.output_tokens)} out"
        progress = RemoteProgress(cost=self.cost, reused=self.reused, saved=self.saved)
        used = self.input_tokens or self.output_tokens
        return [part for part in (tokens if used else "", describe_bill(progress)) if part]


def describe_bill(progress: RemoteProgress) -> str:
    """Return what a batch cost and what it reused, in words; empty if it was free and reused nothing."""
    parts = [f"cost {format_units(progress.cost)}"] if progress.cost else []
    if progress.reused:
        saved = f", which saved {format_units(progress.saved)}" if progress.saved else ""
        parts.append(f"{counted(progress.reused, 'line')} reused{saved}")
    return "; ".join(parts)


def _outcome(counts: Counts) -> str:
    if counts.failed == 0:
        return "the line succeeded" if counts.total == 1 else f"all {format_count(counts.total)} lines succeeded"
    completed, failed = map(format_count, (counts.completed, counts.failed))
    return f"{completed} of {counted(counts.total, 'line')} succeeded, {failed} failed,"


class _ErrorCount(Struct):
    lines: int
    first_message: str


def _count_by_code(errors: Path) -> dict[str, _ErrorCount]:
    counts: dict[str, _ErrorCount] = {}
    with errors.open("rb") as file:
        for raw in file:
            error = error_of(raw)
            counts.setdefault(error.code or "-", _ErrorCount(0, error.message)).lines += 1
    return counts


def _table(counts: dict[str, _ErrorCount]) -> Iterator[str]:
    most = sorted(counts.items(), key=lambda item: -item[1].lines)
    rows = [("code", "lines", "first message")]
    rows += [
        (shortened(code), format_count(count.lines), shortened(without_legacy(count.first_message)))
        for code, count in most[:_MAX_CODES]
    ]
    wide, number = (max(len(row[column]) for row in rows) for column in (0, 1))
    for code, lines, message in rows:
        yield f"{code:<{wide}}  {lines:>{number}}  {message}"
