"""The steps of a run, each of which can be repeated: begin, submit, follow, collect."""

from collections.abc import Callable
from hashlib import file_digest
from pathlib import Path
from typing import Any

from msgspec import DecodeError, Struct
from msgspec.json import decode as decode_json
from msgspec.structs import replace

from batchline.cli.connection.transfer import download
from batchline.cli.destination import Destination
from batchline.cli.run.display import Display
from batchline.cli.run.journal import Journal, JournalEntry
from batchline.cli.run.waiting import describe_wait, is_held, is_pause, is_unusual
from batchline.cli.text import format_size
from batchline.client.client import Client
from batchline.client.errors import RequestRefused
from batchline.client.models import Counts, RemoteBatch, RemotePage
from batchline.client.retry import TRANSIENT, Retrier
from batchline.domain.endpoints import CHAT
from batchline.domain.input_lines import is_blank, skip_byte_order_mark
from batchline.domain.wait_text import AnyWait
from batchline.pipeline.create import INTERRUPTED
from batchline.ports import Clock, Random

_FIRST_POLL_SECONDS, _POLL_GROWTH, _MAX_POLL_SECONDS = 0.05, 1.5, 1.0
_STALL_SECONDS = 5.0
"""A batch without a new result for this time makes no progress."""
_ASK_SECONDS = 2.0
_PAGE_LINES = 1000
_MAX_LINE_BYTES = 1024 * 1024


class Steps:
    """The steps, with the journal that records each of them."""

    def __init__(
        self,
        *,
        client: Client,
        retrier: Retrier,
        journal: Journal,
        display: Display,
        clock: Clock,
        random: Random,
        pause: Callable[[float], None],
    ) -> None:
        self._client, self._retrier, self._journal, self._display = client, retrier, journal, display
        self._clock, self._random, self._pause = clock, random, pause

    def begin(self, source: Path, *, digest: str, target: str, create: dict[str, Any]) -> JournalEntry:
        """Record a new job in the journal. ``create`` has further fields for the create."""
        entry = JournalEntry(
            input_digest=digest,
            endpoint=endpoint_of(source),
            target=target,
            begun_at=self._clock.now(),
            idempotency_key=self._new_token(),
            create=create,
        )
        self._journal.write(entry)
        return entry

    def submit(self, entry: JournalEntry, source: Path, *, before_create: Callable[[JournalEntry], None]) -> str:
        """Return the id of the job's batch; create it if needed. Repeated calls create one batch.

        ``before_create`` is called when the input is uploaded and no line has run yet. Raise RequestRefused.
        """
        earlier_file = entry.file_id
        while entry.batch_id is None:
            entry = self._upload(entry, source)
            before_create(entry)
            entry = self._create(entry, earlier_file=earlier_file)
            self._journal.write(entry)
        return entry.batch_id

    def follow(self, batch_id: str, *, on_look: Callable[[], None], on_held: Callable[[AnyWait], None]) -> RemoteBatch:
        """Wait until the batch has ended, also while the server cannot be reached.

        ``on_look`` is called after each look at the batch, and ``on_held`` when it is held.
        """
        poll, waits = _FIRST_POLL_SECONDS, WaitMonitor(self._client, self._clock, batch_id)
        while True:
            batch = self._retrier.forever(lambda: self._client.batch(batch_id))
            on_look()
            problem = waits.problem(batch.request_counts)
            self._display.lines(batch.request_counts, problem=problem, paused=waits.paused)
            if batch.is_terminal:
                return batch
            if (held := waits.take_held()) is not None:
                on_held(held)
            self._pause(poll)
            poll = min(poll * _POLL_GROWTH, _MAX_POLL_SECONDS)

    def collect(self, file_id: str | None, target: Destination) -> Destination | None:
        """Download a file of results, which appears only when it is complete. If there is none, delete an old one."""
        if file_id is None:
            target.path.unlink(missing_ok=True)
            return None
        text = f"Downloading {target.path.name}"
        download(
            self._client,
            file_id,
            target.path,
            retrier=self._retrier,
            on_progress=lambda done, total: self._display.stage(text, fraction=done / max(1, total)),
        )
        return target

    def cancel(self, batch_id: str) -> None:
        """Cancel a batch."""
        self._retrier.few_times(lambda: self._client.cancel(batch_id))

    def release(self, batch_id: str) -> None:
        """Let a held batch go on."""
        self._retrier.few_times(lambda: self._client.release(batch_id))

    def recorded_answers(self, batch_id: str, *, after: str | None) -> RemotePage:
        """Return the answers that were recorded after a cursor. If the server cannot be asked, there are none."""
        try:
            return self._client.results(batch_id, after=after, limit=_PAGE_LINES, status="succeeded")
        except TRANSIENT:
            return RemotePage(data=[])

    def _upload(self, entry: JournalEntry, source: Path) -> JournalEntry:
        if entry.file_id is not None:
            return entry
        size = source.stat().st_size
        text = f"Uploading {source.name} ({format_size(size)})"
        self._display.stage(text)
        file_id = self._retrier.few_times(
            lambda: self._client.upload(
                source, on_progress=lambda sent: self._display.stage(text, fraction=sent / max(1, size))
            )
        )
        entry = replace(entry, file_id=file_id)
        self._journal.write(entry)
        return entry

    def _create(self, entry: JournalEntry, *, earlier_file: str | None) -> JournalEntry:
        """Return the entry with its batch, or without it if the create has to be repeated in another way."""
        self._display.stage("Checking the input")
        file_id = str(entry.file_id)
        try:
            batch = self._retrier.few_times(
                lambda: self._client.create(
                    file_id, endpoint=entry.endpoint, idempotency_key=entry.idempotency_key, more=entry.create
                )
            )
        except RequestRefused as error:
            if str(error) == INTERRUPTED.message:
                # The same key would only get the same answer again.
                return replace(entry, idempotency_key=self._new_token())
            if error.status == 404 and file_id == earlier_file:
                # An earlier run uploaded the file, and it has expired or was deleted since.
                return replace(entry, file_id=None, idempotency_key=self._new_token())
            raise
        return replace(entry, batch_id=batch.id)

    def _new_token(self) -> str:
        return "run-" + self._random.bytes(16).hex()


class WaitMonitor:
    """Asks the server from time to time why lines wait, and says so if that is not the usual course of things."""

    def __init__(self, client: Client, clock: Clock, batch_id: str) -> None:
        self._client, self._clock, self._batch_id = client, clock, batch_id
        self._done, self._changed_at = 0, clock.steady()
        self._asked_at = clock.steady()
        self._wait: AnyWait | None = None

    def problem(self, counts: Counts) -> str | None:
        """Return why lines wait, in words; None if nothing is unusual. That a batch makes no progress is unusual."""
        now = self._clock.steady()
        if counts.done != self._done:
            self._done, self._changed_at = counts.done, now
        if now - self._asked_at >= _ASK_SECONDS:
            self._asked_at, self._wait = now, self._client.waiting_for(self._batch_id)
        if self._wait is None or counts.done == counts.total:
            return None
        stalled = now - self._changed_at >= _STALL_SECONDS
        return describe_wait(self._wait) if stalled or is_unusual(self._wait) else None

    def take_held(self) -> AnyWait | None:
        """Return why the batch is held, once for each answer of the server; None if it is not."""
        wait = self._wait
        if wait is None or not is_held(wait):
            return None
        self._wait = None
        return wait

    @property
    def paused(self) -> bool:
        """Whether no line can run until something outside the batch changes."""
        return self._wait is not None and is_pause(self._wait)


class _FirstLine(Struct):
    url: str


def endpoint_of(source: Path) -> str:
    """Return the endpoint of the first line. If it cannot be read, use any: the server will report the fault."""
    with source.open("rb") as file:
        skip_byte_order_mark(file)
        lines = iter(lambda: file.readline(_MAX_LINE_BYTES + 2), b"")
        first = next((line for line in lines if not is_blank(line)), b"")
    try:
        return decode_json(first, type=_FirstLine).url or CHAT
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return CHAT


def digest_of(source: Path) -> str:
    """Return the SHA-256 digest of a file."""
    with source.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
