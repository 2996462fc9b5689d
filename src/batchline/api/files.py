"""The routes of ``/v1/files``."""

import logging

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from batchline.api.auth import Auth
from batchline.api.content import Content, headers_of, span_of
from batchline.api.multipart import Form
from batchline.api.paging import choice, integer, page
from batchline.api.request_context import body_chunks
from batchline.api.responses import json_response
from batchline.api.throttle import Throttle
from batchline.domain.errors import ApiError, FileNotFound, InvalidMultipart, InvalidRequest, ObjectsDown, TooLarge
from batchline.domain.ids import canonical_file_id
from batchline.domain.limits import MAX_LIFETIME_SECONDS, MIN_LIFETIME_SECONDS
from batchline.domain.records import BATCH, BATCH_OUTPUT, OTHER_PURPOSES, File
from batchline.domain.wire import DeletedFile, FileList, FileObject
from batchline.pipeline.download import Download
from batchline.pipeline.storage_quota import Room, StorageQuota
from batchline.pipeline.upload import IncomingFile, Upload
from batchline.ports import Files, Objects, StoreClock

MULTIPART_OVERHEAD_BYTES = 1024 * 1024
_MAX_PAGE_ROWS = 10_000

log = logging.getLogger(__name__)


class FileRoutes:
    """Uploads, lists, downloads and deletes the files of a project."""

    def __init__(
        self,
        *,
        auth: Auth,
        throttle: Throttle,
        upload: Upload,
        download: Download,
        files: Files,
        objects: Objects,
        clock: StoreClock,
        storage_quota: StorageQuota,
        max_file_bytes: int,
    ) -> None:
        self._auth, self._throttle = auth, throttle
        self._upload, self._download = upload, download
        self._files, self._objects = files, objects
        self._clock = clock
        self._storage_quota = storage_quota
        self._max_file_bytes = max_file_bytes

    async def create(self, request: Request) -> Response:
        owner = await self._auth.owner_with_funds(request)
        with self._throttle.slot(owner.project_id):
            form = Form(request.headers.get("content-type", ""))
            async with (
                self._storage_quota.reserve(owner, self._announced_bytes(request)) as room,
                self._upload.begin(owner.project_id) as incoming,
            ):
                await self._receive(request, form, incoming, room)
                file = await incoming.finish(filename=form.filename, expires_after=_expires_after(form))
        return json_response(FileObject.from_record(file))

    async def list(self, request: Request) -> Response:
        owner = await self._auth.owner(request)
        query = request.query_params
        limit = _limit(request)
        rows = await self._files.files(
            owner.project_id,
            purpose=choice(query, "purpose", (BATCH, BATCH_OUTPUT, *OTHER_PURPOSES)),
            ascending=choice(query, "order", ("asc", "desc")) == "asc",
            after=canonical_file_id(query["after"]) if "after" in query else None,
            limit=limit + 1,
            at=self._due(),
        )
        shown, has_more = page(rows, limit=limit)
        return json_response(FileList.from_records(shown, has_more=has_more))

    async def retrieve(self, request: Request) -> Response:
        return json_response(FileObject.from_record(await self._find(request)))

    async def content(self, request: Request) -> ASGIApp:
        file = await self._find(request)
        if request.method == "HEAD":
            return Response(headers=headers_of(file, span_of(None, file.bytes)))
        # If-Range names a version, and the service never sends one.
        range_header = None if "if-range" in request.headers else request.headers.get("range")
        span = span_of(range_header, file.bytes)
        chunks = await self._download.open(file, start=span.start, length=span.length)
        return Content(chunks, status=206 if span.partial else 200, headers=headers_of(file, span))

    async def delete(self, request: Request) -> Response:
        owner = await self._auth.owner(request)
        file_id = _file_id(request)
        file = await self._files.delete_file(owner.project_id, canonical_file_id(file_id), at=self._due())
        if file is None:
            raise FileNotFound(file_id)
        await self._delete_object(file)
        return json_response(DeletedFile(id=file.id, object="file", deleted=True))

    async def _find(self, request: Request) -> File:
        owner = await self._auth.owner(request)
        return await self._download.find(owner.project_id, _file_id(request))

    async def _receive(self, request: Request, form: Form, incoming: IncomingFile, room: Room | None) -> None:
        """Read the form to its end and write its file part, checking the fields as soon as they are read.

        ``room`` is what the project may still store, or None.
        """
        max_bytes = self._max_file_bytes + MULTIPART_OVERHEAD_BYTES
        too_large: ApiError = TooLarge(
            f"File exceeds maximum size of {self._max_file_bytes} bytes", code="file_too_large", param="file"
        )
        if room is not None and room.bytes < self._max_file_bytes:
            max_bytes, too_large = room.bytes, room.error
        chunks = body_chunks(
            request,
            max_bytes=max_bytes,
            too_large=too_large,
            cut_off=InvalidMultipart("The upload was cut off"),
        )
        async for chunk in chunks:
            pieces = form.feed(chunk)
            if "purpose" in form.fields:
                _check_purpose(form)
            for piece in pieces:
                await incoming.write(piece)
        _check_complete(form)

    def _announced_bytes(self, request: Request) -> int | None:
        """Return the size of an upload if it is known; one that is too large anyway is not a matter of the quota."""
        length = request.headers.get("content-length")
        return None if length is None or int(length) > self._max_file_bytes else int(length)

    async def _delete_object(self, file: File) -> None:
        """Delete the object of a deleted file. If that fails, the pruner deletes it: the row already says deleted."""
        try:
            await self._objects.delete(file.object_key)
        except ObjectsDown as error:
            log.warning(
                "failed to delete object, left for the pruner", extra={"file_id": file.id, "reason": str(error)}
            )

    def _due(self) -> int:
        return int(self._clock.due())


def _file_id(request: Request) -> str:
    file_id: str = request.path_params.get("file_id", "")
    if not file_id:
        raise InvalidRequest("A file id is required", param="file_id")
    return file_id


def _limit(request: Request) -> int:
    limit = integer(request.query_params, "limit", code="invalid_limit")
    if limit is not None and limit < 1:
        raise InvalidRequest("limit must be a positive integer", code="invalid_limit", param="limit")
    return min(limit or _MAX_PAGE_ROWS, _MAX_PAGE_ROWS)


def _check_purpose(form: Form) -> None:
    if form.fields.get("purpose") != BATCH:
        raise InvalidRequest('purpose must be "batch"', code="invalid_purpose", param="purpose")


def _check_complete(form: Form) -> None:
    form.end()
    _check_purpose(form)
    if not form.has_file:
        raise InvalidRequest("file is required", code="missing_file", param="file")


def _expires_after(form: Form) -> int | None:
    anchor, seconds = form.fields.get("expires_after[anchor]"), form.fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest('expires_after[anchor] must be "created_at"', param="expires_after[anchor]")
    if (
        seconds is None
        or not seconds.isdecimal()
        or not seconds.isascii()
        or len(seconds) > len(str(MAX_LIFETIME_SECONDS))
    ):
        lifetime = 0
    else:
        lifetime = int(seconds)
    if not MIN_LIFETIME_SECONDS <= lifetime <= MAX_LIFETIME_SECONDS:
        raise InvalidRequest(
            f"expires_after[seconds] must be an integer from {MIN_LIFETIME_SECONDS} to {MAX_LIFETIME_SECONDS}",
            param="expires_after[seconds]",
        )
    return lifetime
