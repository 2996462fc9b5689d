"""Creates a batch: validates its input in one pass, writes its lines to its own work file, and opens its shards.

The row exists as ``validating`` from the start, under a lease of this process. The response is stored with the row, so
that a client that did not receive it gets it again byte for byte.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Protocol

from msgspec import Struct
from msgspec.json import encode as encode_json

from batchline.domain import ids
from batchline.domain.errors import (
    Conflict,
    InvalidInput,
    InvalidRequest,
    LeaseLost,
    NotFound,
    ObjectMissing,
    StoreDown,
    Unavailable,
)
from batchline.domain.limits import QUOTED_CHARACTERS, InputLimits
from batchline.domain.models import Catalog
from batchline.domain.money import Tariff
from batchline.domain.records import BATCH, Batch, File, InputFault, Owner
from batchline.domain.reuse import sending_rules
from batchline.domain.states import BatchStatus, Hold, Reuse
from batchline.domain.wire import ErrorBody, encode_errors
from batchline.pipeline.batch_ends import BatchEnds
from batchline.pipeline.lease import renewing
from batchline.ports import Batches, CreateRecord, Files, NewBatch, Objects, Random, StoreClock, Validator, Verdict

log = logging.getLogger(__name__)

INTERRUPTED = InputFault("Validation was interrupted; create the batch again")
_IDEMPOTENCY_KEY_SECONDS = 86_400
"""The time for which an Idempotency-Key is remembered."""
_RETRY_WINDOW_SECONDS = 15 * 60
"""The time after a create in which a retry without an Idempotency-Key gets its response."""
_POLL_SECONDS = 0.05
_LOGGED_MODELS = 10
_MAX_COST = "batchline.max_cost"
_EPOCH = 1
"""The epoch of the lease under which a new batch is validated."""


class RerunOf(Struct, frozen=True, kw_only=True):
    """The batch whose failed lines are run again, with the codes and the patch of the request."""

    batch_id: str
    codes: list[str] | None
    patch: bytes | None


class CreateRequest(Struct, frozen=True, kw_only=True):
    input_file_id: str
    endpoint: str
    metadata: bytes
    rerun: RerunOf | None = None
    output_lifetime: int | None = None
    """The seconds after which the result files expire; None for the retention of all files."""
    hold: bool = False
    """Whether the batch is held if nearly all of its lines fail."""
    reuse: bool = False
    """Whether lines take earlier answers to the same request."""
    max_cost: int | None = None
    """The nano-units that the batch may cost; None without a limit."""

    def digest(self) -> bytes:
        """Return a digest of everything that two requests must share to be the same create."""
        shared: list[object] = [ids.canonical_file_id(self.input_file_id), self.endpoint, self.metadata]
        # Creates without these keep the digest that earlier versions stored for them.
        if self.rerun is not None:
            shared.append(self.rerun)
        if self.output_lifetime is not None or self.hold:
            shared += [self.output_lifetime, self.hold]
        if self.reuse or self.max_cost is not None:
            shared += [self.reuse, self.max_cost]
        return blake2b(encode_json(shared), digest_size=16).digest()


class CreateAnswer(Struct, frozen=True, kw_only=True):
    status: int
    body: bytes
    batch_id: str
    replayed: bool


class FilesAndBatches(Files, Batches, Protocol):
    pass


class BatchCreator:
    """Creates batches. ``on_work_available`` is called for each one that has lines to run."""

    def __init__(
        self,
        *,
        store: FilesAndBatches,
        objects: Objects,
        validator: Validator,
        clock: StoreClock,
        random: Random,
        owner: str,
        lease_seconds: float,
        window_seconds: int,
        limits: InputLimits,
        catalog: Catalog,
        tariff: Tariff,
        batch_ends: BatchEnds,
        on_work_available: Callable[[], None],
    ) -> None:
        self._store, self._objects, self._validator = store, objects, validator
        self._clock, self._random = clock, random
        self._owner, self._lease_seconds = owner, lease_seconds
        self._window_seconds, self._limits = window_seconds, limits
        self._catalog, self._tariff = catalog, tariff
        self._batch_ends = batch_ends
        self._on_work_available = on_work_available

    async def create(
        self,
        owner: Owner,
        request: CreateRequest,
        *,
        idempotency_key: str | None,
        retried: bool,
        admit: Callable[[], None],
        make_input: Callable[[], Awaitable[File]] | None = None,
    ) -> CreateAnswer:
        """Create a batch, or replay an earlier response. ``admit`` may refuse a new batch, but never a replay.

        The input file is the one that the request names, or the one that ``make_input`` makes.
        """
        earlier = await self._earlier(owner, request, idempotency_key=idempotency_key, retried=retried)
        if earlier is not None:
            return await self._replay(earlier, request)
        admit()
        require_metering(request, self._tariff)
        if make_input is None:
            file = await find_input_file(self._store, owner, request, at=int(self._clock.due()))
        else:
            file = await make_input()
        batch = self._new_batch(owner, request, file)
        earlier = await self._store.begin_batch(
            NewBatch(batch=batch, digest=request.digest(), idempotency_key=idempotency_key),
            owner=self._owner,
            lease=self._lease_seconds,
            since=self._now() - _IDEMPOTENCY_KEY_SECONDS,
        )
        if earlier is not None:
            return await self._replay(earlier, request)
        return await self._validate_and_start(batch, file)

    async def mark_answered(self, batch_id: str) -> None:
        """Note that the client has the whole response: a retry that arrives later is a new create."""
        await self._store.mark_answered(batch_id)

    def _now(self) -> int:
        return int(self._clock.now())

    async def _earlier(
        self, owner: Owner, request: CreateRequest, *, idempotency_key: str | None, retried: bool
    ) -> CreateRecord | None:
        if idempotency_key is not None:
            return await self._store.find_create(
                owner.project_id, idempotency_key, since=self._now() - _IDEMPOTENCY_KEY_SECONDS
            )
        if retried:
            return await self._store.find_unanswered_create(
                key_id=owner.key_id, digest=request.digest(), since=self._now() - _RETRY_WINDOW_SECONDS
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
            current = await self._store.create_record(earlier.batch_id)
            if current is None:
                raise Unavailable
            earlier = current
        return _answer(earlier, replayed=True)

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
            expires_at=int(now) + self._window_seconds,
            epoch=_EPOCH,
            parent_batch_id=None if request.rerun is None else request.rerun.batch_id,
            hold=Hold.TRIAL if request.hold else None,
            output_lifetime=request.output_lifetime,
            max_cost=request.max_cost,
            reuse=Reuse.LOOKUP if request.reuse else None,
        )

    async def _validate_and_start(self, batch: Batch, file: File) -> CreateAnswer:
        try:
            async with renewing(lambda: self._renew(batch), every=self._lease_seconds / 3, clock=self._clock):
                created = await self._validate(batch, file)
        except LeaseLost:
            # The batch was cancelled during validation, or another process has ended it. Its row has a response.
            return await self._stored_response(batch)
        except ObjectMissing:
            await self._store.drop_batch(batch.id, epoch=_EPOCH)
            raise missing_object(file) from None
        except Exception:
            # If even this fails, the lease expires and the batch ends as interrupted.
            with suppress(StoreDown):
                await self._store.drop_batch(batch.id, epoch=_EPOCH)
            raise
        self._on_work_available()
        return _answer(created, replayed=False)

    async def _renew(self, batch: Batch) -> None:
        await self._store.renew_batch(batch.id, epoch=_EPOCH, owner=self._owner, lease=self._lease_seconds)

    async def _validate(self, batch: Batch, file: File) -> CreateRecord:
        async with self._objects.local(file.object_key) as source, self._objects.scratch() as work:
            verdict = await self._validator.validate(
                project_id=batch.project_id, source=source, work=work, endpoint=batch.endpoint, limits=self._limits
            )
            if verdict.faults:
                return await self._refuse(batch, verdict)
            if batch.max_cost is not None:
                require_prices({shard.model for shard in verdict.shards}, batch.project_id, self._catalog)
            work_key = f"work/{batch.id}/{_EPOCH}"
            await self._objects.accept(work, work_key)
        record = await self._store.start_batch(
            batch.id,
            epoch=_EPOCH,
            shards=verdict.shards,
            total=verdict.lines,
            work_key=work_key,
            sent_as=sending_rules(self._catalog, {shard.model for shard in verdict.shards}, batch.project_id),
            at=self._now(),
        )
        log.info("batch created", extra=_creation_fields(batch, verdict))
        return record

    async def _refuse(self, batch: Batch, verdict: Verdict) -> CreateRecord:
        record = await self._store.fail_batch(
            batch.id,
            epoch=_EPOCH,
            errors=encode_errors(verdict.faults),
            answer=refusal(verdict.faults[0]),
            at=self._now(),
        )
        log.info("input file is invalid, batch failed", extra=_refusal_fields(batch, verdict))
        self._batch_ends.on_batch_ended(batch, BatchStatus.FAILED)
        return record

    async def _stored_response(self, batch: Batch) -> CreateAnswer:
        created = await self._store.create_record(batch.id)
        if created is None or created.answer_body is None:
            raise Unavailable
        return _answer(created, replayed=False)


async def find_input_file(files: Files, owner: Owner, request: CreateRequest, *, at: int) -> File:
    """Return the input file that a create names. Raises NotFound."""
    file = await files.file(owner.project_id, ids.canonical_file_id(request.input_file_id), at=at)
    if file is None or file.purpose != BATCH:
        raise NotFound(f"Input file not found: {request.input_file_id}", code="file_not_found", param="input_file_id")
    return file


def require_metering(request: CreateRequest, tariff: Tariff) -> None:
    """Raise InvalidRequest if a create limits its cost where nothing is charged."""
    if request.max_cost is not None and not tariff.metered:
        raise InvalidRequest(f"{_MAX_COST} needs metering, which is off", param=_MAX_COST)


def require_prices(models: set[str], project_id: str, catalog: Catalog) -> None:
    """Raise InvalidRequest unless every model of an input file has a price, which a limit of its cost needs."""
    for name in sorted(models):
        model = catalog.find(name, project_id) if name else None
        if model is None or model.price.is_zero:
            shown = f"the model {name[:QUOTED_CHARACTERS]}" if name else "lines that name no known model"
            raise InvalidRequest(f"{_MAX_COST} needs a price for each model; {shown} has none", param=_MAX_COST)


def missing_object(file: File) -> NotFound:
    """Return the error of an input file whose object does not exist."""
    return NotFound(f"Input file object missing: {file.id}", code="file_not_found", param="input_file_id")


def refusal(fault: InputFault) -> bytes:
    """Return the body of the 400 response to an input file with faults."""
    return encode_json(ErrorBody.from_error(InvalidInput(fault.message, line=fault.line)))


def _creation_fields(batch: Batch, verdict: Verdict) -> dict[str, object]:
    """Return the log fields of a new batch. The models of lines in the shared lane are not among them."""
    models = sorted({shard.model for shard in verdict.shards if shard.model})
    shown = models[:_LOGGED_MODELS] + (["..."] if len(models) > _LOGGED_MODELS else [])
    return {
        "batch": batch.id,
        "project_id": batch.project_id,
        "key_id": batch.key_id,
        "endpoint": batch.endpoint,
        "lines": verdict.lines,
        "models": ",".join(shown),
    }


def _refusal_fields(batch: Batch, verdict: Verdict) -> dict[str, object]:
    """Return the log fields of a batch with an invalid input file. The texts of the faults may quote the file."""
    return {
        "batch": batch.id,
        "project_id": batch.project_id,
        "key_id": batch.key_id,
        "endpoint": batch.endpoint,
        "file": batch.input_file_id,
        "faults": len(verdict.faults),
        "line": verdict.faults[0].line,
    }


def _answer(created: CreateRecord, *, replayed: bool) -> CreateAnswer:
    if created.answer_status is None or created.answer_body is None:
        raise Unavailable
    return CreateAnswer(
        status=created.answer_status, body=created.answer_body, batch_id=created.batch_id, replayed=replayed
    )
