"""What came of a run, for people and for programs."""

from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from msgspec import Struct
from msgspec.json import Decoder
from msgspec.json import encode as encode_json

from batchline.cli.run.display import amount, duration, shortened
from batchline.client.models import Counts, LineFault, RemoteBatch
from batchline.domain.limits import MAX_FAULTS

_MOST_CODES = 20


class Results(Struct, frozen=True, kw_only=True):
    batch: RemoteBatch
    output: Path | None
    """None where no line succeeded."""

    errors: Path | None
    seconds: float


def show_results(results: Results) -> None:
    """On stderr; stdout is for programs."""
    _say(_sentence(results))
    for name, path in (("output", results.output), ("errors", results.errors)):
        if path is not None:
            _say(f"  {name}  {path}")
    if results.errors is not None:
        for line in _table(_by_code(results.errors)):
            _say(f"  {line}")


def show_json(results: Results) -> None:
    batch, counts = results.batch, results.batch.request_counts
    summary = {
        "batch_id": batch.id,
        "status": batch.status,
        "total": counts.total,
        "completed": counts.completed,
        "failed": counts.failed,
        "output": None if results.output is None else str(results.output),
        "errors": None if results.errors is None else str(results.errors),
        "seconds": round(results.seconds, 3),
        "usage": batch.usage,
    }
    click.echo(msgspec.json.format(encode_json(summary), indent=2))


def fault_lines(faults: list[LineFault]) -> list[str]:
    """Of an input file, a line each: the number first, as compilers tell it."""
    told = [shortened(fault.message) for fault in faults]
    lines = [
        text if fault.line is None else f"line {fault.line}: {text.removeprefix(f'Line {fault.line} ')}"
        for fault, text in zip(faults, told, strict=True)
    ]
    return [*lines, f"(the first {MAX_FAULTS} are listed)"] if len(lines) == MAX_FAULTS else lines


def _say(text: str) -> None:
    click.echo(text, err=True)


def _sentence(results: Results) -> str:
    counts, tokens = results.batch.request_counts, results.batch.tokens
    parts = [f"{results.batch.status.capitalize()}: {_outcome(counts)} in {duration(results.seconds)}"]
    if tokens.total_tokens:
        parts.append(f"{amount(tokens.input_tokens)} tokens in, {amount(tokens.output_tokens)} out")
    return "; ".join(parts)


def _outcome(counts: Counts) -> str:
    if counts.failed == 0:
        return f"all {amount(counts.total)} lines succeeded"
    return f"{amount(counts.completed)} of {amount(counts.total)} lines succeeded, {amount(counts.failed)} failed,"


class _Error(Struct):
    code: str | None = None
    message: str = ""


class _Line(Struct):
    error: _Error


class _Kind(Struct):
    lines: int
    first: str


_line = Decoder(_Line)


def _by_code(errors: Path) -> dict[str, _Kind]:
    kinds: dict[str, _Kind] = {}
    with errors.open("rb") as file:
        for raw in file:
            error = _line.decode(raw).error
            kind = kinds.setdefault(error.code or "-", _Kind(0, error.message))
            kind.lines += 1
    return kinds


def _table(kinds: dict[str, _Kind]) -> Iterator[str]:
    most = sorted(kinds.items(), key=lambda item: -item[1].lines)
    rows = [("code", "lines", "first message")]
    rows += [(shortened(code), amount(kind.lines), _plain(kind.first)) for code, kind in most[:_MOST_CODES]]
    wide, number = (max(len(row[column]) for row in rows) for column in (0, 1))
    for code, lines, message in rows:
        yield f"{code:<{wide}}  {lines:>{number}}  {message}"


def _plain(message: str) -> str:
    """Without the old code in front, which only programs look for."""
    return shortened(message.partition("] ")[2] if message.startswith("[legacy:") else message)
