"""Runs one batch from the start, or from where an earlier run stopped, and explains every failure to the user."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import click
from msgspec import Struct, field

from batchline.cli.connection.explain import RESUME, explain_errors
from batchline.cli.connection.target import Target
from batchline.cli.output import say
from batchline.cli.run.answers import AnswerPrinter, put_in_order
from batchline.cli.run.display import Display
from batchline.cli.run.estimate import Threshold, describe, estimate_batch
from batchline.cli.run.files import RunFiles
from batchline.cli.run.journal import Journal, JournalEntry
from batchline.cli.run.report import SavedResults, fault_lines
from batchline.cli.run.steps import Steps, digest_of
from batchline.cli.run.waiting import describe_wait
from batchline.cli.text import printable
from batchline.client.client import Client
from batchline.client.errors import ClientError, Denied, OutOfFunds, RequestRefused, ServerTrouble, Throttled
from batchline.client.models import LineFault, RemoteBatch, RemoteProgress, progress_decoder
from batchline.client.retry import Retrier
from batchline.domain.wait_text import AnyWait
from batchline.ports import Clock, Random


class RunOptions(Struct, frozen=True, kw_only=True):
    """The options of a run."""

    restart: bool
    """Whether an earlier job for the same output is given up."""
    create: dict[str, Any] = field(default_factory=dict)
    """Further fields of the create."""
    holds: bool = False
    """Whether the batch is held when nearly all of its first lines fail (G6)."""
    reuses: bool = False
    """Whether lines take answers that the same lines got before (G7)."""
    max_cost: float | None = None
    """The units that the batch may cost (G8)."""
    in_input_order: bool = False
    """Whether the results are saved in the order of the input."""
    prints_answers: bool = False
    """Whether answers are printed as they come."""
    confirms: Callable[[str], bool] = lambda _: False
    """Asks the user whether a held batch goes on, or a finished job is run again."""
    threshold: Threshold | None = None
    """The threshold of large jobs, whose estimate is shown first; None if no job is large."""
    place: str = ""
    """The flags that chose the server or the data folder, for the commands that are printed."""


class BatchHeld(click.ClickException):
    """The batch is held, and the user did not want to go on."""

    exit_code = 5


class BatchRun:
    """One run of one input file."""

    def __init__(
        self,
        files: RunFiles,
        options: RunOptions,
        *,
        target: Target,
        journal: Journal,
        display: Display,
        clock: Clock,
        random: Random,
        pause: Callable[[float], None],
    ) -> None:
        self._files, self._options, self._target, self._journal = files, options, target, journal
        self._display, self._clock = display, clock
        self._client = Client(locate=target.url, headers=target.credentials.headers)
        self._retrier = Retrier(pause=pause, on_retry=display.retrying, await_server=target.may_be_starting)
        self._steps = Steps(
            client=self._client,
            retrier=self._retrier,
            journal=journal,
            display=display,
            clock=clock,
            random=random,
            pause=pause,
        )

    def run(self) -> SavedResults:
        """Run the batch and save its results. Raise ClickException with an explanation and the exit code."""
        with explain_errors(self._target, advice=RESUME, if_gone="Add --restart to begin again."), self._client:
            entry = self._resume_or_begin()
            batch_id = self._submit(entry)
            self._say(f"Batch {batch_id}")
            printer = AnswerPrinter(self._steps, batch_id) if self._options.prints_answers else None
            batch = self._steps.follow(
                batch_id,
                on_look=(lambda: None) if printer is None else printer.print_new,
                on_held=lambda held: self._go_on_or_end(batch_id, held),
            )
            if printer is not None:
                printer.print_new()
            self._refuse_without_results(batch)
            output = self._steps.collect(batch.output_file_id, self._files.output)
            errors = self._steps.collect(batch.error_file_id, self._files.errors)
            if self._options.in_input_order:
                put_in_order(self._files.source, *(saved.path for saved in (output, errors) if saved is not None))
            for destination in (self._files.output, self._files.errors):
                destination.deliver(advice=RESUME)
            self._journal.remove()
            return SavedResults(
                batch=batch,
                output=output,
                errors=errors,
                seconds=self._clock.now() - entry.begun_at,
                to_stdout=self._files.to_stdout,
                progress=self._final_progress(batch_id),
            )

    def give_up(self) -> None:
        """Cancel the batch of an earlier run, if it created one. Raise ClickException."""
        with explain_errors(self._target), self._client:
            if self._journal.entry is not None:
                self._give_up(self._journal.entry)

    def _final_progress(self, batch_id: str) -> RemoteProgress:
        """Return what the batch cost and what it reused, as far as the server says so."""
        with suppress(ClientError):
            return progress_decoder.decode(self._client.progress(batch_id))
        return RemoteProgress()

    def _go_on_or_end(self, batch_id: str, held: AnyWait) -> None:
        """Release a held batch if the user says so, else end the run. Raise BatchHeld."""
        self._display.clear()
        reason = printable(describe_wait(held))
        if not self._options.confirms(f"The batch is {reason}. Go on with the other lines?"):
            named = f"{batch_id}{self._options.place}"
            raise BatchHeld(
                f"{batch_id} is {reason}. No further line starts. To go on: batchline batches release {named}, then "
                f"run the same command again. To stop it: batchline batches cancel {named}"
            )
        self._steps.release(batch_id)

    def _say(self, *lines: str) -> None:
        self._display.clear()
        for line in lines:
            say(printable(line), indent=2, err=True)

    def _resume_or_begin(self) -> JournalEntry:
        digest, earlier = digest_of(self._files.source), self._journal.entry
        if earlier is not None and earlier.file_id is not None:
            if not self._options.restart:
                self._refuse_another(earlier, digest)
                return earlier
            self._give_up(earlier)
        return self._steps.begin(
            self._files.source, digest=digest, target=self._target.name, create=self._create_fields()
        )

    def _create_fields(self) -> dict[str, Any]:
        """Return further fields of the create. Only a batchline server gets the object ``batchline``."""
        options = self._options
        wanted = {"hold": options.holds, "reuse": options.reuses, "max_cost": options.max_cost}
        extension = {name: value for name, value in wanted.items() if value is not None and value is not False}
        if not extension:
            return options.create
        if self._target.is_batchline():
            return options.create | {"batchline": extension}
        if options.reuses or options.max_cost is not None:
            raise click.UsageError(f"--reuse and --max-cost need batchline, which {self._target.name} is not")
        return options.create

    def _refuse_another(self, earlier: JournalEntry, digest: str) -> None:
        batch = f" ({earlier.batch_id})" if earlier.batch_id else ""
        if earlier.target != self._target.name:
            raise click.ClickException(
                f"This job{batch} was begun at {earlier.target}, not at {self._target.name}. Use that one to resume "
                "it, or add --restart to begin again here."
            )
        if earlier.input_digest != digest:
            raise click.ClickException(
                f"{self._files.source_name} has changed since this job{batch} was begun. Add --restart to give that "
                "job up and begin again."
            )
        changed = self._changed_options(earlier)
        if changed:
            raise click.ClickException(
                f"This job{batch} was begun with other options: {', '.join(changed)} cannot be added or changed now. "
                "Repeat the options of the first run to resume it, or add --restart to give it up and begin again."
            )

    def _changed_options(self, earlier: JournalEntry) -> list[str]:
        """Return the options that are given now and that the earlier batch was not created with."""
        options, begun_with = self._options, earlier.create.get("batchline", {})
        changed = {
            "--max-cost": options.max_cost not in (None, begun_with.get("max_cost")),
            "--reuse": options.reuses and not begun_with.get("reuse"),
            "--no-hold": not options.holds and bool(begun_with.get("hold")),
            "--name or --metadata": bool(options.create) and options.create != _without_extension(earlier.create),
        }
        return [name for name, is_changed in changed.items() if is_changed]

    def _give_up(self, earlier: JournalEntry) -> None:
        """Cancel the earlier batch. One at another target cannot be reached, and one that has ended is refused."""
        if earlier.batch_id is not None and earlier.target == self._target.name:
            try:
                self._steps.cancel(earlier.batch_id)
            except (Denied, Throttled, ServerTrouble):
                raise
            except RequestRefused:
                return

    def _submit(self, entry: JournalEntry) -> str:
        try:
            return self._steps.submit(entry, self._files.source, before_create=self._confirm_large_job)
        except (Denied, OutOfFunds, Throttled, ServerTrouble):
            raise
        except RequestRefused as error:
            # The user has to change the input, so this job cannot be resumed.
            self._journal.remove()
            if error.batch_id is None:
                raise
            raise self._input_refused(self._client.batch(error.batch_id)) from None

    def _confirm_large_job(self, entry: JournalEntry) -> None:
        """Say what a large job will take, and ask whether to run it. Raise ClickException if the user says no."""
        threshold = self._options.threshold
        if threshold is None or not threshold.is_exceeded_by(self._files.source) or not self._target.is_batchline():
            return
        self._display.stage("Estimating tokens, cost and time")
        file_id = str(entry.file_id)
        found = estimate_batch(self._client, self._retrier, file_id, endpoint=entry.endpoint)
        if found is None:
            return
        self._say(*describe(found, job_lines=threshold.job_lines))
        if threshold.asks is not None and not threshold.asks("Run it?"):
            self._journal.remove()
            with suppress(ClientError):
                self._client.delete_file(file_id)
            raise click.ClickException("Nothing was run.")

    def _refuse_without_results(self, batch: RemoteBatch) -> None:
        if batch.request_counts.total:
            return
        self._journal.remove()
        if batch.status == "failed":
            raise self._input_refused(batch)
        raise click.ClickException(f"{batch.id} was {batch.status} before any of its lines ran.")

    def _input_refused(self, batch: RemoteBatch) -> click.ClickException:
        faults = batch.errors.data if batch.errors else [LineFault("the input was refused")]
        told = fault_lines(faults, first_row=self._files.first_row)
        return click.ClickException("\n".join([f"{self._files.source_name} was refused; no line was run.", *told]))


def _without_extension(create: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a create that every server understands."""
    return {name: value for name, value in create.items() if name != "batchline"}
