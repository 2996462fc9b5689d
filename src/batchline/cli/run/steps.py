"""The job itself, in steps that can be repeated: submit, follow, collect."""

import os
from collections.abc import Callable
from hashlib import file_digest
from pathlib import Path

from msgspec import DecodeError, Struct
from msgspec.json import decode as decode_json
from msgspec.structs import replace

from batchline.cli.run.display import Display, amount
from batchline.cli.run.journal import Journal, JournalEntry
from batchline.client.client import Client
from batchline.client.errors import RequestRefused
from batchline.client.models import Counts, RemoteBatch
from batchline.client.retry import PASSING, Retrying
from batchline.pipeline.create import INTERRUPTED
from batchline.ports import Clock, Random

_FIRST_POLL, _POLL_GROWTH, _LONGEST_POLL = 0.05, 1.5, 1.0
_STALL_SECONDS = 5.0
_LONGEST_LINE = 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DEFAULT_ENDPOINT = "/v1/chat/completions"


class Steps:
    def __init__(
        self,
        *,
        client: Client,
        retrying: Retrying,
        journal: Journal,
        display: Display,
        clock: Clock,
        random: Random,
        pause: Callable[[float], None],
    ) -> None:
        self._client, self._retrying, self._journal, self._display = client, retrying, journal, display
        self._clock, self._random, self._pause = clock, random, pause

    def begin(self, source: Path, *, digest: str, place: str) -> JournalEntry:
        job = JournalEntry(
            input_digest=digest,
            endpoint=endpoint_of(source),
            place=place,
            begun_at=self._clock.now(),
            idempotency_key=self._new_token(),
        )
        self._journal.write(job)
        return job

    def submit(self, job: JournalEntry, source: Path) -> str:
        """The id of the job's batch: one, however often this is begun. Raises Refused."""
        lost = job.file_id
        while job.batch_id is None:
            job = self._created(self._uploaded(job, source), lost=lost)
            self._journal.write(job)
        return job.batch_id

    def follow(self, batch_id: str) -> RemoteBatch:
        """Wait until the batch is over, however long its server cannot be reached."""
        poll, watch = _FIRST_POLL, _Watch(self._client, self._clock)
        while True:
            batch = self._retrying.long(lambda: self._client.batch(batch_id))
            self._display.lines(batch.request_counts, trouble=watch.trouble(batch.request_counts))
            if batch.is_over:
                return batch
            self._pause(poll)
            poll = min(poll * _POLL_GROWTH, _LONGEST_POLL)

    def collect(self, file_id: str | None, target: Path) -> Path | None:
        """The file, whole, under its name; where there is none, nothing of an earlier run stays there."""
        if file_id is None:
            target.unlink(missing_ok=True)
            return None
        part = target.with_name(f"{target.name}.part")
        self._download(file_id, part)
        part.replace(target)
        _sync_folder(target.parent)
        return target

    def cancel(self, batch_id: str) -> None:
        self._retrying.soon(lambda: self._client.cancel(batch_id))

    def _uploaded(self, job: JournalEntry, source: Path) -> JournalEntry:
        if job.file_id is not None:
            return job
        size, boundary = max(1, source.stat().st_size), self._new_token()
        text = f"Uploading {source.name} ({amount(size)} bytes)"
        self._display.stage(text)
        file_id = self._retrying.soon(
            lambda: self._client.upload(
                source, boundary=boundary, sent=lambda sent: self._display.stage(text, share=sent / size)
            )
        )
        job = replace(job, file_id=file_id)
        self._journal.write(job)
        return job

    def _created(self, job: JournalEntry, *, lost: str | None) -> JournalEntry:
        """With its batch; or as it has to be tried again, where an earlier try came to nothing on the server."""
        self._display.stage("Checking the input")
        file_id = str(job.file_id)
        try:
            batch = self._retrying.soon(
                lambda: self._client.create(file_id, endpoint=job.endpoint, idempotency_key=job.idempotency_key)
            )
        except RequestRefused as refused:
            if str(refused) == INTERRUPTED.message:
                return replace(job, idempotency_key=self._new_token())
            if refused.status == 404 and file_id == lost:
                # Uploaded long ago, and gone since.
                return replace(job, file_id=None, idempotency_key=self._new_token())
            raise
        return replace(job, batch_id=batch.id)

    def _download(self, file_id: str, part: Path) -> None:
        """A download that breaks off goes on where it was; the tries count anew whenever more of it came."""
        text, tries = f"Downloading {part.stem}", 0
        with part.open("wb") as file:
            while True:
                before = file.tell()
                try:
                    self._client.fetch(
                        file_id, file, got=lambda got, total: self._display.stage(text, share=got / max(1, total))
                    )
                    break
                except PASSING as fault:
                    tries = 1 if file.tell() > before else tries + 1
                    self._retrying.again(fault, tries=tries)
            file.flush()
            os.fsync(file.fileno())

    def _new_token(self) -> str:
        return "run-" + self._random.bytes(16).hex()


class _Watch:
    """Asks what is wrong once the counts have not moved for a while."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client, self._clock = client, clock
        self._done, self._moved_at = 0, clock.steady()

    def trouble(self, counts: Counts) -> str | None:
        now = self._clock.steady()
        if counts.done != self._done:
            self._done, self._moved_at = counts.done, now
        if now - self._moved_at < _STALL_SECONDS:
            return None
        reason = self._client.pause_reason()
        return f"the upstream is paused: {reason}" if reason else None


class _FirstLine(Struct):
    url: str


def endpoint_of(source: Path) -> str:
    """What the first line asks for. Where that cannot be read, the server will say what is wrong with it."""
    with source.open("rb") as file:
        file.seek(len(_BYTE_ORDER_MARK) if file.read(len(_BYTE_ORDER_MARK)) == _BYTE_ORDER_MARK else 0)
        lines = iter(lambda: file.readline(_LONGEST_LINE + 2), b"")
        first = next((line for line in lines if line.strip(b" \t\r\n")), b"")
    try:
        return decode_json(first, type=_FirstLine).url or _DEFAULT_ENDPOINT
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return _DEFAULT_ENDPOINT


def digest_of(source: Path) -> str:
    with source.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
