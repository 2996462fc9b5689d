"""The routes of ``/v1/files``."""

import logging
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from batchline.api.auth import Auth
from batchline.api.content import Content, Span, headers_of, span_of
from batchline.api.event_stream import first_of
from batchline.api.form_upload import FormUpload
from batchline.api.lists import Lists
from batchline.api.multipart import Form
from batchline.api.paging import choice, integer, page
from batchline.api.responses import json_response
from batchline.api.services import ApiServices
from batchline.api.throttle import Throttle
from batchline.domain.errors import FileNotFound, InvalidRequest, ObjectsDown
from batchline.domain.ids import canonical_file_id
from batchline.domain.limits import MAX_LIFETIME_SECONDS, MIN_LIFETIME_SECONDS
from batchline.domain.records import BATCH, BATCH_OUTPUT, OTHER_PURPOSES, File, Owner
from batchline.domain.wire import DeletedFile, FileList, FileObject
from batchline.ports import Files

_MAX_PAGE_ROWS = 10_000
_STEP_ROWS = 1_000
"""The rows that are read at once."""
_MAX_PAGE_CHARACTERS = 4 * 1024 * 1024
"""The characters of names in a page. A name may have thousands of them, and 10,000 such names would take 80 MB."""

log = logging.getLogger(__name__)


class FileRoutes:
    """Uploads, lists, downloads and deletes the files of a project."""

    def __init__(self, services: ApiServices, *, auth: Auth, throttle: Throttle, lists: Lists) -> None:
        self._auth, self._lists, self._clock = auth, lists, services.clock
        self._files: Files = services.store
        self._objects, self._download = services.objects, services.download
        self._downloads = Throttle(services.settings.max_project_downloads, of="downloads", bound="project_downloads")
        self._form_upload = FormUpload(
            throttle=throttle,
            upload=services.upload,
            storage_quota=services.storage_quota,
            max_file_bytes=services.settings.max_file_bytes,
        )

    async def create(self, request: Request) -> Response:
        owner = await self._auth.owner_with_funds(request)
        _, file = await self._form_upload.receive(
            request,
            owner,
            check=_check_early,
            check_complete=_check_purpose,
            lifetime=_expires_after,
            check_key=self._auth.check_after_body,
        )
        return json_response(FileObject.from_record(file))

    async def list(self, request: Request) -> ASGIApp:
        owner = await self._auth.owner(request)
        return self._lists.answer(owner, lambda: self._page(request, owner))

    async def _page(self, request: Request, owner: Owner) -> FileList:
        """Return a page of files. They are read in steps, and a page has no further step once it is large."""
        query, limit = request.query_params, _limit(request)
        after = canonical_file_id(query["after"]) if "after" in query else None
        found: list[File] = []
        size, more = 0, True
        while more and len(found) < limit and size < _MAX_PAGE_CHARACTERS:
            step_limit = min(limit - len(found), _STEP_ROWS)
            rows = await self._files.files(
                owner.project_id,
                purpose=choice(query, "purpose", (BATCH, BATCH_OUTPUT, *OTHER_PURPOSES)),
                ascending=choice(query, "order", ("asc", "desc")) == "asc",
                after=after,
                limit=step_limit + 1,
                at=self._due(),
            )
            step, more = page(rows, limit=step_limit)
            found += step
            size += sum(len(file.filename) for file in step)
            after = step[-1].id if step else None
        return FileList.from_records(found, has_more=more)

    async def retrieve(self, request: Request) -> Response:
        return json_response(FileObject.from_record(await self._find(request)))

    async def content(self, request: Request) -> ASGIApp:
        owner = await self._auth.owner(request)
        file = await self._download.find(owner.project_id, _file_id(request))
        if request.method == "HEAD":
            return Response(headers=headers_of(file, span_of(None, file.bytes)))
        # If-Range names a version, and the service never sends one.
        range_header = None if "if-range" in request.headers else request.headers.get("range")
        span = span_of(range_header, file.bytes)
        return partial(self._send, owner, file, span)

    async def _send(self, owner: Owner, file: File, span: Span, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a file while the project has a slot for it, and until the end of the key."""
        with self._downloads.slot(owner.project_id):
            chunks = await self._download.open(file, start=span.start, length=span.length)
            content = Content(chunks, status=206 if span.partial else 200, headers=headers_of(file, span))
            await first_of(content(scope, receive, send), self._auth.wait_until_invalid(owner, clock=self._clock))

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


def _check_early(form: Form) -> None:
    if "purpose" in form.fields:
        _check_purpose(form)


def _check_purpose(form: Form) -> None:
    if form.fields.get("purpose") != BATCH:
        raise InvalidRequest('purpose must be "batch"', code="invalid_purpose", param="purpose")


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
