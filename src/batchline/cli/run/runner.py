"""Runs one batch from the start, or from where an earlier run stopped, and explains every failure to the user."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click
from msgspec import Struct

from batchline.cli.run.display import Display, shortened
from batchline.cli.run.journal import Journal, JournalEntry
from batchline.cli.run.local_service import ServiceEnded
from batchline.cli.run.report import Results, fault_lines
from batchline.cli.run.steps import Steps, digest_of
from batchline.cli.run.target import Target, WrongCredentials
from batchline.client.client import Client
from batchline.client.errors import (
    ClientError,
    Denied,
    OutOfFunds,
    RequestRefused,
    ServerTrouble,
    Throttled,
    Unreachable,
)
from batchline.client.models import LineFault, RemoteBatch
from batchline.client.retry import Retrier
from batchline.ports import Clock, Random

_RESUME = "Run the same command again to resume"


class RunRequest(Struct, frozen=True, kw_only=True):
    """The files of a run, and whether to give up an earlier one."""

    source: Path
    output: Path
    errors: Path
    restart: bool


class BatchRun:
    """One run of one input file."""

    def __init__(
        self,
        request: RunRequest,
        *,
        target: Target,
        journal: Journal,
        display: Display,
        clock: Clock,
        random: Random,
        pause: Callable[[float], None],
    ) -> None:
        self._request, self._target, self._journal, self._clock = request, target, journal, clock
        self._client = Client(locate=target.url, headers=target.credentials.headers)
        self._steps = Steps(
            client=self._client,
            retrier=Retrier(pause=pause, on_retry=display.retrying, await_server=target.may_be_starting),
            journal=journal,
            display=display,
            clock=clock,
            random=random,
            pause=pause,
        )

    def run(self) -> Results:
        """Run the batch and save its results. Raise ClickException with an explanation and the exit code."""
        with self._explain_errors(), self._client:
            self._target.url()
            entry = self._resume_or_begin()
            batch = self._steps.follow(self._submit(entry))
            self._refuse_without_results(batch)
            output = self._steps.collect(batch.output_file_id, self._request.output)
            errors = self._steps.collect(batch.error_file_id, self._request.errors)
            self._journal.remove()
            return Results(batch=batch, output=output, errors=errors, seconds=self._clock.now() - entry.begun_at)

    def _resume_or_begin(self) -> JournalEntry:
        digest, earlier = digest_of(self._request.source), self._journal.entry
        if earlier is not None and earlier.file_id is not None:
            if not self._request.restart:
                self._refuse_another(earlier, digest)
                return earlier
            self._give_up(earlier)
        return self._steps.begin(self._request.source, digest=digest, target=self._target.name)

    def _refuse_another(self, earlier: JournalEntry, digest: str) -> None:
        batch = f" ({earlier.batch_id})" if earlier.batch_id else ""
        if earlier.target != self._target.name:
            raise click.ClickException(
                f"This job{batch} was begun at {earlier.target}, not at {self._target.name}. Use that one to resume "
                "it, or add --restart to begin again here."
            )
        if earlier.input_digest != digest:
            raise click.ClickException(
                f"{self._request.source} has changed since this job{batch} was begun. Add --restart to give that job "
                "up and begin again."
            )

    def _give_up(self, earlier: JournalEntry) -> None:
        """Cancel the earlier batch. One at another target cannot be reached, and one that has ended is refused."""
        if earlier.batch_id is not None and earlier.target == self._target.name:
            with suppress(RequestRefused):
                self._steps.cancel(earlier.batch_id)

    def _submit(self, entry: JournalEntry) -> str:
        try:
            return self._steps.submit(entry, self._request.source)
        except (Denied, OutOfFunds, Throttled, ServerTrouble):
            raise
        except RequestRefused as error:
            # The user has to change the input, so this job cannot be resumed.
            self._journal.remove()
            if error.batch_id is None:
                raise
            raise self._input_refused(self._client.batch(error.batch_id)) from None

    def _refuse_without_results(self, batch: RemoteBatch) -> None:
        if batch.request_counts.total:
            return
        self._journal.remove()
        if batch.status == "failed":
            raise self._input_refused(batch)
        raise click.ClickException(f"{batch.id} was {batch.status} before any of its lines ran.")

    def _input_refused(self, batch: RemoteBatch) -> click.ClickException:
        faults = batch.errors.data if batch.errors else [LineFault("the input was refused")]
        return click.ClickException(
            "\n".join([f"{self._request.source} was refused; no line was run.", *fault_lines(faults)])
        )

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        target = self._target
        try:
            yield
        except Denied as error:
            raise WrongCredentials(f"{_text(error)}. {target.if_denied}.") from None
        except OutOfFunds as error:
            advice = "Add some with `batchline orgs set-balance` on the machine of the service"
            raise click.ClickException(f"{_text(error)}. {advice}. {_RESUME}.") from None
        except Unreachable as error:
            raise click.ClickException(
                f"{target.name} cannot be reached: {_text(error)}. {target.if_unreachable}."
            ) from None
        except RequestRefused as error:
            raise click.ClickException(f"{target.name} says: {_text(error)}. {_advice(error)}") from None
        except ClientError as error:
            raise click.ClickException(f"{target.name}: {_text(error)}. {_RESUME}.") from None
        except ServiceEnded as error:
            raise click.ClickException(str(error)) from None
        except OSError as error:
            raise click.ClickException(f"{error.filename or 'a file'}: {error.strerror}. {_RESUME}.") from None


def _advice(error: RequestRefused) -> str:
    if isinstance(error, ServerTrouble):
        return f"{_RESUME}."
    return "Add --restart to begin again." if error.status == 404 else ""


def _text(error: ClientError) -> str:
    return shortened(str(error)).rstrip(".")
