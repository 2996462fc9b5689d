"""Stores the file of a form while it arrives."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request

from batchline.api.multipart import Form
from batchline.api.request_context import body_chunks
from batchline.api.throttle import Throttle
from batchline.domain.errors import InvalidMultipart, InvalidRequest, TooLarge
from batchline.domain.records import File, Owner
from batchline.pipeline.storage_quota import StorageQuota, UploadReservation
from batchline.pipeline.upload import IncomingFile, Upload

MULTIPART_OVERHEAD_BYTES = 1024 * 1024
"""The most bytes that a form may have beside its file: boundaries, headers and other fields."""


class FormUpload:
    """Receives forms with one file."""

    def __init__(self, *, throttle: Throttle, upload: Upload, storage_quota: StorageQuota, max_file_bytes: int) -> None:
        self._throttle, self._upload = throttle, upload
        self._storage_quota, self._max_file_bytes = storage_quota, max_file_bytes

    async def receive(
        self,
        request: Request,
        owner: Owner,
        *,
        check: Callable[[Form], None],
        check_complete: Callable[[Form], None],
        lifetime: Callable[[Form], int | None],
        check_key: Callable[[Request], Awaitable[None]] | None = None,
    ) -> tuple[Form, File]:
        """Store the file of a form, and return both.

        ``check`` may refuse the form by the fields that have arrived: it is called before any further byte of the file
        is stored. ``check_complete`` sees all fields. ``lifetime`` returns after how many seconds the file expires, if
        the form says so. ``check_key`` is called once the body has arrived; if it raises, nothing is stored.
        """
        with self._throttle.slot(owner.project_id):
            form = Form(request.headers.get("content-type", ""))
            async with (
                self._storage_quota.reserve(owner, self._announced_bytes(request)) as reservation,
                self._upload.begin(owner.project_id) as incoming,
            ):
                await self._receive(request, form, incoming, reservation, check)
                if check_key is not None:
                    await check_key(request)
                _check_end(form, check_complete)
                file = await incoming.finish(filename=form.filename, expires_after=lifetime(form))
        return form, file

    async def _receive(
        self,
        request: Request,
        form: Form,
        incoming: IncomingFile,
        reservation: UploadReservation,
        check: Callable[[Form], None],
    ) -> None:
        """Read the form to its end and write its file part, checking the fields as soon as they are read."""
        chunks = body_chunks(
            request,
            max_bytes=self._max_file_bytes + MULTIPART_OVERHEAD_BYTES,
            too_large=TooLarge(
                f"File exceeds maximum size of {self._max_file_bytes} bytes", code="file_too_large", param="file"
            ),
            cut_off=InvalidMultipart("The upload was cut off"),
        )
        received = 0
        async for chunk in chunks:
            received += len(chunk)
            await reservation.cover(received)
            pieces = form.feed(chunk)
            check(form)
            for piece in pieces:
                await incoming.write(piece)

    def _announced_bytes(self, request: Request) -> int | None:
        """Return the size that an upload announces.

        Return None if it announces none. An upload that announces more than a file may have counts as one without a
        size: the limit on files is checked while it arrives.
        """
        length = request.headers.get("content-length")
        return None if length is None or int(length) > self._max_file_bytes else int(length)


def _check_end(form: Form, check_complete: Callable[[Form], None]) -> None:
    form.end()
    check_complete(form)
    if not form.has_file:
        raise InvalidRequest("file is required", code="missing_file", param="file")
