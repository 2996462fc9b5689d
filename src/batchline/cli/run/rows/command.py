"""A run of a table: ``batchline run rows.csv --prompt TEXT``."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from msgspec import Struct
from msgspec.structs import asdict, replace

from batchline.cli.connection.explain import RESUME, explain_errors
from batchline.cli.destination import STANDARD, Destination, find_destination, stdout_destination
from batchline.cli.output import copy_to_stdout, say, show_json
from batchline.cli.run.context import RunContext, open_context
from batchline.cli.run.files import RunFiles, confirm_again
from batchline.cli.run.rows.job import RowsJob
from batchline.cli.run.rows.requests import RowRequests, load_schema
from batchline.cli.run.runner import RunOptions
from batchline.cli.text import counted, format_duration, printable
from batchline.client.models import Counts
from batchline.pipeline.rows.fault import RowsFault
from batchline.pipeline.rows.requests import Prompts
from batchline.pipeline.rows.table import open_table
from batchline.pipeline.rows.template import parse_template

_PARQUET = ".parquet"
_MAX_SHOWN_MODELS = 10


class RowsRequest(Struct, frozen=True, kw_only=True):
    """A table and what to ask for each of its rows, as the user gave them."""

    source: Path
    output: str | None
    prompt: str
    system: str | None
    model: str | None
    schema: Path | None
    patch: dict[str, Any]
    again: bool
    """Whether a finished job is run again without asking."""

    def run(self, options: RunOptions, base_url: str | None, flags: Mapping[str, Any], *, as_json: bool) -> int:
        """Run the table, show the outcome, and return the number of failed rows. Raise ClickException."""
        if not self.source.is_file():
            raise click.UsageError(f"There is no file {str(self.source)!r}")
        try:
            return self._run_table(options, base_url, flags, as_json=as_json)
        except RowsFault as fault:
            raise click.UsageError(str(fault)) from None

    def _run_table(self, options: RunOptions, base_url: str | None, flags: Mapping[str, Any], *, as_json: bool) -> int:
        rows = open_table(self.source)
        prompt = parse_template("--prompt", self.prompt)
        system = None if self.system is None else parse_template("--system", self.system)
        for template in (prompt, *([] if system is None else [system])):
            template.require_columns(rows.columns)
        schema = None if self.schema is None else load_schema(self.schema)
        with (
            self._output_file() as (output, folder),
            open_context(base_url, flags) as context,
            explain_errors(context.target, advice=RESUME),
        ):
            model = self.model or _only_model(context)
            prompts = Prompts(prompt=prompt, system=system, model=model, schema=schema)
            requests = RowRequests(prompts=prompts, patch=self.patch)
            job = RowsJob(self.source, rows, requests, output=output.path, folder=folder)
            with job.locked():
                if options.restart:
                    job.give_up(context.give_up_batch)
                elif not self.again and not job.is_begun and self.output != STANDARD:
                    confirm_again(self.source, output, ask=options.confirms)
                return self._run(context, job, options, output, as_json=as_json)

    def _run(
        self, context: RunContext, job: RowsJob, options: RunOptions, output: Destination, *, as_json: bool
    ) -> int:
        begun_at = context.clock.now()
        context.display.stage("Writing the requests")
        parts = job.prepare()
        bill = job.load_bill()
        chosen = iter([_with_rows(options, sum(part.rows for part in parts))])

        def run_part(files: RunFiles) -> None:
            part_options = next(chosen, replace(options, threshold=None))
            bill.add(context.run_batch(files, replace(part_options, max_cost=_left(options.max_cost, bill.cost))))
            job.save_bill(bill)

        counts = job.run(parts, run_part)
        context.display.clear()
        output.deliver(advice=RESUME)
        seconds = context.clock.now() - begun_at
        say("; ".join([f"{_outcome(counts)} in {format_duration(seconds)}", *bill.describe()]), indent=2, err=True)
        click.echo(f"  output  {printable(output.name)}", err=True)
        if counts.failed:
            say("  To run only the failed rows again, run the same command with --again --reuse", indent=2, err=True)
        if as_json:
            summary = {"rows": counts.total, "completed": counts.completed, "failed": counts.failed}
            show_json(summary | {"output": output.name, "seconds": round(seconds, 3)} | asdict(bill))
        elif self.output == STANDARD:
            copy_to_stdout(output.path, advice=RESUME)
        job.forget()
        return counts.failed

    @contextmanager
    def _output_file(self) -> Iterator[tuple[Destination, Path]]:
        """Yield the destination of the answers, and the folder of the job. Raise UsageError."""
        suffix = ".jsonl" if self.source.suffix.lower() == _PARQUET else self.source.suffix
        named = self.source.with_suffix(f".output{suffix}") if self.output is None else Path(self.output)
        if named.suffix.lower() == _PARQUET:
            raise click.UsageError("Parquet cannot be written; choose an --output with the suffix .csv, .tsv or .jsonl")
        with TemporaryDirectory(prefix="batchline-") as temporary:
            staged = Path(temporary) / f"output{named.suffix or suffix}"
            is_stdout = self.output == STANDARD
            output = stdout_destination(staged) if is_stdout else find_destination(named, staged=staged)
            if os.path.realpath(output.path) == os.path.realpath(self.source):
                raise click.UsageError("FILE and --output must be different files")
            beside = self.source.with_name(f"{self.source.name}.stdout") if output.path == staged else named
            yield output, beside.with_name(f"{beside.name}.batchline")


def _with_rows(options: RunOptions, rows: int) -> RunOptions:
    """Return the options of the first batch: what is said before it, and asked, is about all rows."""
    if options.threshold is None:
        return options
    return replace(options, threshold=replace(options.threshold, job_lines=rows))


def _left(max_cost: float | None, cost: float) -> float | None:
    """Return what the next batch of a job may cost; None if the job has no limit."""
    return None if max_cost is None else max(0.0, max_cost - cost)


def _outcome(counts: Counts) -> str:
    if not counts.failed:
        return f"Completed: all {counted(counts.total, 'row')} succeeded"
    return f"Completed: {counts.completed:,} of {counted(counts.total, 'row')} succeeded, {counts.failed:,} failed"


def _only_model(context: RunContext) -> str:
    """Return the model of the server if it has exactly one. Raise UsageError."""
    models = context.models()
    if len(models) == 1:
        click.echo(f"Model {printable(models[0])}", err=True)
        return models[0]
    listed = f"; the server has {', '.join(map(printable, models[:_MAX_SHOWN_MODELS]))}" if models else ""
    raise click.UsageError(f"name the model with --model{listed}")
