"""The routes of ``/v1/batches``."""

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from batchline.api.auth import Auth
from batchline.api.create_fields import read_extension, read_output_lifetime
from batchline.api.lists import Lists
from batchline.api.paging import choice, integer, page
from batchline.api.request_context import client_state_of, read_body
from batchline.api.responses import JSON, json_response
from batchline.api.throttle import Throttle
from batchline.domain.errors import BatchNotFound, InsufficientQuota, InvalidRequest, StorageFull, TooLarge
from batchline.domain.limits import (
    MAX_ENDPOINT_CHARACTERS,
    MAX_IDEMPOTENCY_KEY_CHARACTERS,
    MAX_JSON_BODY_BYTES,
    MAX_METADATA_BYTES,
)
from batchline.domain.merge_patch import MergePatch
from batchline.domain.records import Owner
from batchline.domain.request_body import parse_json_object
from batchline.domain.states import BatchStatus
from batchline.domain.wire import BatchList, BatchObject, BatchProgress
from batchline.pipeline.cancel import Cancellation
from batchline.pipeline.create import BatchCreator, CreateAnswer, CreateRequest
from batchline.pipeline.progress import ProgressReader
from batchline.pipeline.release import HoldRelease
from batchline.pipeline.rerun import Rerun
from batchline.pipeline.storage_quota import StorageQuota
from batchline.ports import Batches

_DEFAULT_PAGE_ROWS, _MAX_PAGE_ROWS = 20, 100

_STRING = Decoder(str)
_STRINGS = Decoder(list[str])


class BatchRoutes:
    """Creates, reruns, lists, retrieves, cancels and releases the batches of a project."""

    def __init__(
        self,
        *,
        auth: Auth,
        throttle: Throttle,
        creator: BatchCreator,
        rerun: Rerun,
        cancellation: Cancellation,
        hold_release: HoldRelease,
        progress_reader: ProgressReader,
        batches: Batches,
        storage_quota: StorageQuota,
        lists: Lists,
    ) -> None:
        self._auth, self._throttle = auth, throttle
        self._creator, self._rerun = creator, rerun
        self._cancellation, self._progress_reader = cancellation, progress_reader
        self._hold_release, self._batches = hold_release, batches
        self._storage_quota, self._lists = storage_quota, lists

    async def create(self, request: Request) -> Response:
        owner = await self._auth.owner(request)
        with self._throttle.slot(owner.project_id):
            fields = create_request(await self._read_body(request))
            full = await self._storage_quota.exhausted(owner)
            answer = await self._creator.create(
                owner,
                fields,
                idempotency_key=_idempotency_key(request),
                retried=is_retry(request),
                admit=lambda: self._admit(owner, full=full),
            )
        return self._create_response(request, answer)

    async def rerun(self, request: Request) -> Response:
        owner = await self._auth.owner(request)
        with self._throttle.slot(owner.project_id):
            fields = rerun_fields(await self._read_body(request))
            full = await self._storage_quota.exhausted(owner)
            answer = await self._rerun.create(
                owner,
                batch_id_of(request),
                codes=fields.codes,
                patch=fields.patch,
                metadata=fields.metadata,
                idempotency_key=_idempotency_key(request),
                retried=is_retry(request),
                admit=lambda: self._admit(owner, full=full),
            )
        return self._create_response(request, answer)

    async def _read_body(self, request: Request) -> bytes:
        body = await read_create_body(request)
        await self._auth.check_after_body(request)
        return body

    def _create_response(self, request: Request, answer: CreateAnswer) -> Response:
        return Response(
            answer.body,
            answer.status,
            headers=_answer_headers(answer),
            media_type=JSON,
            background=BackgroundTask(self._mark_answered, request, answer.batch_id),
        )

    async def list(self, request: Request) -> ASGIApp:
        owner = await self._auth.owner(request)
        return self._lists.answer(owner, lambda: self._page(request, owner))

    async def _page(self, request: Request, owner: Owner) -> BatchList:
        query = request.query_params
        limit = integer(query, "limit", code="invalid_limit")
        limit = _DEFAULT_PAGE_ROWS if limit is None else max(1, min(limit, _MAX_PAGE_ROWS))
        rows = await self._batches.batches(
            owner.project_id,
            after=query.get("after"),
            limit=limit + 1,
            status=choice(query, "status", tuple(BatchStatus)),
            created_after=integer(query, "created_after"),
            created_before=integer(query, "created_before"),
        )
        shown, has_more = page(rows, limit=limit)
        return BatchList.from_records(shown, has_more=has_more)

    async def retrieve(self, request: Request) -> Response:
        owner = await self._auth.owner(request)
        batch_id = batch_id_of(request)
        batch = await self._batches.batch(owner.project_id, batch_id)
        if batch is None:
            raise BatchNotFound(batch_id)
        return json_response(BatchObject.from_record(batch))

    async def progress(self, request: Request) -> Response:
        owner = await self._auth.owner(request)
        progress = await self._progress_reader.progress(owner.project_id, batch_id_of(request))
        return json_response(BatchProgress.from_progress(progress))

    async def cancel(self, request: Request) -> Response:
        owner = await self._auth.owner(request)
        batch = await self._cancellation.cancel(owner.project_id, batch_id_of(request))
        return json_response(BatchObject.from_record(batch))

    async def release(self, request: Request) -> Response:
        owner = await self._auth.owner(request)
        batch = await self._hold_release.release(owner.project_id, batch_id_of(request))
        return json_response(BatchObject.from_record(batch))

    def _admit(self, owner: Owner, *, full: StorageFull | None) -> None:
        if full is not None:
            raise full
        if not self._auth.has_funds(owner):
            raise InsufficientQuota

    async def _mark_answered(self, request: Request, batch_id: str) -> None:
        """Mark the answer as received, unless the client disconnected before its end: then a retry must get it."""
        if not client_state_of(request.scope).disconnected:
            await self._creator.mark_answered(batch_id)


def create_request(body: bytes) -> CreateRequest:
    """Parse the body of a create. Raise InvalidRequest for the first invalid field, in the order of the fields."""
    fields = parse_json_object(body)
    input_file_id = _required(fields, "input_file_id")
    endpoint = _required(fields, "endpoint")
    if len(endpoint) > MAX_ENDPOINT_CHARACTERS:
        raise InvalidRequest(f"endpoint exceeds maximum size of {MAX_ENDPOINT_CHARACTERS} characters", param="endpoint")
    window = fields.get("completion_window", Raw(b"null"))
    if not _is_null(window) and _string(window) != "24h":
        raise InvalidRequest('completion_window must be "24h"', param="completion_window")
    metadata, output_lifetime = _metadata(fields), read_output_lifetime(fields)
    extension = read_extension(fields)
    return CreateRequest(
        input_file_id=input_file_id,
        endpoint=endpoint,
        metadata=metadata,
        output_lifetime=output_lifetime,
        hold=extension.hold,
        reuse=extension.reuse,
        max_cost=extension.max_cost,
    )


class RerunFields(Struct, frozen=True, kw_only=True):
    """The body of a rerun."""

    codes: frozenset[str] | None
    patch: bytes | None
    metadata: bytes


def rerun_fields(body: bytes) -> RerunFields:
    """Parse the body of a rerun, which may be empty. Raise InvalidRequest for the first invalid field."""
    fields = parse_json_object(body) if body.strip() else {}
    return RerunFields(codes=_codes(fields), patch=_patch(fields), metadata=_metadata(fields))


def _codes(fields: dict[str, Raw]) -> frozenset[str] | None:
    raw = fields.get("codes", Raw(b"null"))
    try:
        return None if _is_null(raw) else frozenset(_STRINGS.decode(raw))
    except DecodeError:
        raise InvalidRequest("codes must be a list of strings", param="codes") from None


def _patch(fields: dict[str, Raw]) -> bytes | None:
    raw = fields.get("patch", Raw(b"null"))
    if _is_null(raw):
        return None
    try:
        MergePatch.parse(bytes(raw))
    except ValueError as error:
        raise InvalidRequest(f"patch must be a JSON object: it is {error}", param="patch") from None
    return bytes(raw)


def _required(fields: dict[str, Raw], name: str) -> str:
    value = _string(fields.get(name, Raw(b"null")))
    if not value:
        raise InvalidRequest(f"{name} is required", param=name)
    return value


def _metadata(fields: dict[str, Raw]) -> bytes:
    raw = fields.get("metadata", Raw(b"null"))
    if _is_null(raw):
        return b"{}"
    metadata = bytes(raw)
    if not metadata.startswith(b"{"):
        raise InvalidRequest("metadata must be a JSON object", param="metadata")
    if len(metadata) > MAX_METADATA_BYTES:
        raise InvalidRequest(f"metadata exceeds maximum size of {MAX_METADATA_BYTES} bytes", param="metadata")
    return metadata


def _string(raw: Raw) -> str | None:
    try:
        return _STRING.decode(raw)
    except DecodeError:
        return None


def _is_null(raw: Raw) -> bool:
    return bytes(raw) == b"null"


async def read_create_body(request: Request) -> bytes:
    """Return the body of a create. Raise TooLarge, or InvalidRequest if it was cut off."""
    return await read_body(
        request,
        max_bytes=MAX_JSON_BODY_BYTES,
        too_large=TooLarge(f"The request's body exceeds {MAX_JSON_BODY_BYTES} bytes"),
        cut_off=InvalidRequest("The request's body was cut off"),
    )


def batch_id_of(request: Request) -> str:
    """Return the id of the batch in the path. Raise InvalidRequest if it is empty."""
    batch_id: str = request.path_params.get("batch_id", "")
    if not batch_id:
        raise InvalidRequest("A batch id is required", param="batch_id")
    return batch_id


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key", "").strip()
    if len(key) > MAX_IDEMPOTENCY_KEY_CHARACTERS:
        raise InvalidRequest(
            f"Idempotency-Key exceeds {MAX_IDEMPOTENCY_KEY_CHARACTERS} characters", param="Idempotency-Key"
        )
    return key or None


def is_retry(request: Request) -> bool:
    """Return whether an SDK says that it sent this request before."""
    count = request.headers.get("x-stainless-retry-count", "")
    return count.isdecimal() and count.strip("0") != ""


def _answer_headers(answer: CreateAnswer) -> dict[str, str]:
    headers = {} if answer.status < 400 else {"x-batch-id": answer.batch_id}
    return headers | ({"x-batchline-replayed": "true"} if answer.replayed else {})
