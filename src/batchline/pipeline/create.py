"""Create a batch: validate its input in one pass, keep its lines as its own work file, open its shards.

The row exists as ``validating`` from the start, under a lease of this process. The answer is kept with the row, so
that a client that did not hear it can be given it again byte for byte.
"""

from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Protocol

from msgspec import Struct
from msgspec.json import encode as encode_json

from batchline.domain import ids
from batchline.domain.errors import (
    Conflict,
    InvalidInput,
    LeaseLost,
    NotFound,
    ObjectMissing,
    StoreDown,
    Unavailable,
)
from batchline.domain.limits import InputLimits
from batchline.domain.records import BATCH, Batch, File, InputFault, Owner, errors_document
from batchline.domain.states import BatchStatus
from batchline.pipeline.lease import while_renewing
from batchline.ports import Batches, Clock, CreateRecord, Files, NewBatch, Objects, Random, Validator, Verdict

INTERRUPTED = InputFault("Validation was interrupted; create the batch again")
_KEEP_IDEMPOTENCY_KEYS = 86_400
_REPLAY_RETRIES = 15 * 60
_POLL_SECONDS = 0.05
_EPOCH = 1


class CreateRequest(Struct, frozen=True, kw_only=True):
    input_file_id: str
    endpoint: str
    metadata: bytes

    def digest(self) -> bytes:
        """What makes two creates the same."""
        return blake2b(
            encode_json([ids.canonical_file_id(self.input_file_id), self.endpoint, self.metadata]), digest_size=16
        ).digest()


class CreateAnswer(Struct, frozen=True, kw_only=True):
    status: int
    body: bytes
    batch_id: str
    replayed: bool


class FilesAndBatches(Files, Batches, Protocol):
    pass


class BatchCreator:
    def __init__(
        self,
        *,
        store: FilesAndBatches,
        objects: Objects,
        validator: Validator,
        clock: Clock,
        random: Random,
        owner: str,
        lease_seconds: float,
        window_seconds: int,
        limits: InputLimits,
        on_work_available: Callable[[], None],
    ) -> None:
        self._store, self._objects, self._validator = store, objects, validator
        self._clock, self._random = clock, random
        self._owner, self._lease = owner, lease_seconds
        self._window, self._limits = window_seconds, limits
        self._on_work_available = on_work_available

    async def create(
        self,
        owner: Owner,
        request: CreateRequest,
        *,
        idempotency_key: str | None,
        retried: bool,
        admit: Callable[[], None],
    ) -> CreateAnswer:
        """``admit`` may refuse a new batch; an answer that was given before is given again in any case."""
        earlier = await self._earlier(owner, request, idempotency_key=idempotency_key, retried=retried)
        if earlier is not None:
            return await self._replay(earlier, request)
        admit()
        file = await self._input_file(owner, request)
        batch = self._new_batch(owner, request, file)
        earlier = await self._store.begin_batch(
            NewBatch(batch=batch, digest=request.digest(), idempotency_key=idempotency_key),
            owner=self._owner,
            lease=self._lease,
            since=self._now() - _KEEP_IDEMPOTENCY_KEYS,
        )
        if earlier is not None:
            return await self._replay(earlier, request)
        return await self._validate_and_start(batch, file)

    async def mark_answered(self, batch_id: str) -> None:
        """The client has the whole answer: a retry that comes now is a new create."""
        await self._store.mark_answered(batch_id)

    def _now(self) -> int:
        return int(self._clock.now())

    async def _earlier(
        self, owner: Owner, request: CreateRequest, *, idempotency_key: str | None, retried: bool
    ) -> CreateRecord | None:
        if idempotency_key is not None:
            return await self._store.find_create(
                owner.project_id, idempotency_key, since=self._now() - _KEEP_IDEMPOTENCY_KEYS
            )
        if retried:
            return await self._store.find_unanswered_create(
                key_id=owner.key_id, digest=request.digest(), since=self._now() - _REPLAY_RETRIES
            )
        return None

    async def _replay(self, earlier: CreateRecord, request: CreateRequest) -> CreateAnswer:
        if earlier.digest != request.digest():
            raise Conflict(
                "This Idempotency-Key was used with another body",
                code="idempotency_key_reused",
                param="Idempotency-Key",
            )
        while earlier.answer_body is None:
            await self._clock.sleep(_POLL_SECONDS)
            now = await self._store.create_record(earlier.batch_id)
            if now is None:
                raise Unavailable
            earlier = now
        return _answer(earlier, replayed=True)

    async def _input_file(self, owner: Owner, request: CreateRequest) -> File:
        file = await self._store.file(owner.project_id, ids.canonical_file_id(request.input_file_id), at=self._now())
        if file is None or file.purpose != BATCH:
            raise NotFound(
                f"Input file not found: {request.input_file_id}", code="file_not_found", param="input_file_id"
            )
        return file

    def _new_batch(self, owner: Owner, request: CreateRequest, file: File) -> Batch:
        now = self._clock.now()
        return Batch(
            id=ids.batch_id(now, self._random.bytes(10)),
            project_id=owner.project_id,
            key_id=owner.key_id,
            endpoint=request.endpoint,
            input_file_id=file.id,
            metadata=request.metadata,
            status=BatchStatus.VALIDATING,
            created_at=int(now),
            expires_at=int(now) + self._window,
            epoch=_EPOCH,
        )

    async def _validate_and_start(self, batch: Batch, file: File) -> CreateAnswer:
        try:
            created = await while_renewing(
                self._validate(batch, file),
                renew=lambda: self._renew(batch),
                every=self._lease / 3,
                clock=self._clock,
            )
        except LeaseLost:
            # Cancelled while it was validated, or taken for dead: either way the row has an answer by now.
            return await self._answer_of_row(batch)
        except ObjectMissing:
            await self._store.drop_batch(batch.id, epoch=_EPOCH)
            raise NotFound(
                f"Input file object missing: {file.id}", code="file_not_found", param="input_file_id"
            ) from None
        except Exception:
            # Where even this fails, the lease lapses and the batch ends as interrupted.
            with suppress(StoreDown):
                await self._store.drop_batch(batch.id, epoch=_EPOCH)
            raise
        self._on_work_available()
        return _answer(created, replayed=False)

    async def _renew(self, batch: Batch) -> None:
        await self._store.renew_batch(batch.id, epoch=_EPOCH, owner=self._owner, lease=self._lease)

    async def _validate(self, batch: Batch, file: File) -> CreateRecord:
        async with self._objects.local(file.object_key) as source, self._objects.scratch() as work:
            verdict = await self._validator.validate(
                source=source, work=work, endpoint=batch.endpoint, limits=self._limits
            )
            if verdict.faults:
                return await self._refuse(batch, verdict)
            work_key = f"work/{batch.id}/{_EPOCH}"
            await self._objects.accept(work, work_key)
        return await self._store.start_batch(
            batch.id, epoch=_EPOCH, shards=verdict.shards, total=verdict.lines, work_key=work_key, at=self._now()
        )

    async def _refuse(self, batch: Batch, verdict: Verdict) -> CreateRecord:
        return await self._store.fail_batch(
            batch.id,
            epoch=_EPOCH,
            errors=errors_document(verdict.faults),
            answer=refusal(verdict.faults[0]),
            at=self._now(),
        )

    async def _answer_of_row(self, batch: Batch) -> CreateAnswer:
        created = await self._store.create_record(batch.id)
        if created is None or created.answer_body is None:
            raise Unavailable
        return _answer(created, replayed=False)


def refusal(fault: InputFault) -> bytes:
    """The body of the 400 for an input file with faults."""
    return encode_json(InvalidInput(fault.message, line=fault.line).body())


def _answer(created: CreateRecord, *, replayed: bool) -> CreateAnswer:
    if created.answer_status is None or created.answer_body is None:
        raise Unavailable
    return CreateAnswer(
        status=created.answer_status, body=created.answer_body, batch_id=created.batch_id, replayed=replayed
    )
