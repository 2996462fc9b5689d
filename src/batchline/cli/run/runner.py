"""One order from its beginning, or from where an earlier run left it, to its files; and every fault in words."""

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
from batchline.cli.run.target import NoCredentials, Place
from batchline.client.client import Client
from batchline.client.errors import ClientError, Denied, OutOfFunds, RequestRefused, Throttled, Trouble, Unreachable
from batchline.client.http import Http
from batchline.client.models import LineFault, RemoteBatch
from batchline.client.retry import Retrying
from batchline.ports import Clock, Random

_GO_ON = "Run the same command again to go on"


class RunRequest(Struct, frozen=True, kw_only=True):
    source: Path
    output: Path
    errors: Path
    restart: bool


class BatchRun:
    def __init__(
        self,
        order: RunRequest,
        *,
        place: Place,
        journal: Journal,
        display: Display,
        clock: Clock,
        random: Random,
        pause: Callable[[float], None],
    ) -> None:
        self._order, self._place, self._journal, self._clock = order, place, journal, clock
        self._client = Client(Http(locate=place.url, headers=place.credentials.headers))
        self._steps = Steps(
            client=self._client,
            retrying=Retrying(pause=pause, waiting=display.waiting, await_server=place.may_be_late),
            journal=journal,
            display=display,
            clock=clock,
            random=random,
            pause=pause,
        )

    def do(self) -> Results:
        """Raises ClickException, with the words and the exit code of what went wrong."""
        with self._explained():
            self._place.url()
            job = self._job()
            batch = self._steps.follow(self._submitted(job))
            self._refuse_without_results(batch)
            output = self._steps.collect(batch.output_file_id, self._order.output)
            errors = self._steps.collect(batch.error_file_id, self._order.errors)
            self._journal.remove()
            return Results(batch=batch, output=output, errors=errors, seconds=self._clock.now() - job.begun_at)

    def _job(self) -> JournalEntry:
        """The one that an earlier run began, if it is still the same job."""
        digest, earlier = digest_of(self._order.source), self._journal.job
        if earlier is not None and earlier.file_id is not None:
            if not self._order.restart:
                self._refuse_another(earlier, digest)
                return earlier
            self._give_up(earlier)
        return self._steps.begin(self._order.source, digest=digest, place=self._place.name)

    def _refuse_another(self, earlier: JournalEntry, digest: str) -> None:
        batch = f" ({earlier.batch_id})" if earlier.batch_id else ""
        if earlier.place != self._place.name:
            raise click.ClickException(
                f"This job{batch} was begun at {earlier.place}, not at {self._place.name}. Name that one to go on with "
                "it; to begin anew here, add --restart."
            )
        if earlier.input_digest != digest:
            raise click.ClickException(
                f"{self._order.source} has changed since this job{batch} was begun. To give that one up and begin "
                "anew, add --restart."
            )

    def _give_up(self, earlier: JournalEntry) -> None:
        """What was begun elsewhere cannot be reached from here; what is over needs no end."""
        if earlier.batch_id is not None and earlier.place == self._place.name:
            with suppress(RequestRefused):
                self._steps.cancel(earlier.batch_id)

    def _submitted(self, job: JournalEntry) -> str:
        try:
            return self._steps.submit(job, self._order.source)
        except (Denied, OutOfFunds, Throttled, Trouble):
            raise
        except RequestRefused as refused:
            # The input will have to change, so there is nothing to go on with.
            self._journal.remove()
            if refused.batch_id is None:
                raise
            raise self._faulty(self._client.batch(refused.batch_id)) from None

    def _refuse_without_results(self, batch: RemoteBatch) -> None:
        if batch.request_counts.total:
            return
        self._journal.remove()
        if batch.status == "failed":
            raise self._faulty(batch)
        raise click.ClickException(f"{batch.id} was {batch.status} before any of its lines ran.")

    def _faulty(self, batch: RemoteBatch) -> click.ClickException:
        faults = batch.errors.data if batch.errors else [LineFault("the input was refused")]
        return click.ClickException(
            "\n".join([f"{self._order.source} was refused; nothing ran.", *fault_lines(faults)])
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        place = self._place
        try:
            yield
        except Denied as fault:
            raise NoCredentials(f"{_said(fault)}. {place.if_denied}.") from None
        except OutOfFunds as fault:
            raise click.ClickException(
                f"{_said(fault)}. Give it some with `batchline orgs set-balance` where the service runs. {_GO_ON}."
            ) from None
        except Unreachable as fault:
            raise click.ClickException(
                f"{place.name} cannot be reached: {_said(fault)}. {place.if_unreachable}."
            ) from None
        except RequestRefused as fault:
            raise click.ClickException(f"{place.name} says: {_said(fault)}. {self._after(fault)}") from None
        except ClientError as fault:
            raise click.ClickException(f"{place.name}: {_said(fault)}. {_GO_ON}.") from None
        except ServiceEnded as fault:
            raise click.ClickException(str(fault)) from None
        except OSError as fault:
            raise click.ClickException(f"{fault.filename or 'a file'}: {fault.strerror}. {_GO_ON}.") from None

    def _after(self, fault: RequestRefused) -> str:
        if isinstance(fault, Trouble):
            return f"{_GO_ON}."
        return "To begin anew, add --restart." if fault.status == 404 else ""


def _said(fault: ClientError) -> str:
    return shortened(str(fault)).rstrip(".")
