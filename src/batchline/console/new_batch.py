"""The pages that make a batch: upload a file, read what is wrong with it or what it will take, and start."""

import json
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from batchline.api.form_upload import FormUpload
from batchline.api.multipart import Form
from batchline.api.services import ApiServices
from batchline.api.throttle import Throttle
from batchline.console.batches import BatchPages, metadata_with_name
from batchline.console.lines import view_of
from batchline.console.pages import Pages
from batchline.console.sessions import CSRF_FIELD, Visit
from batchline.domain.embedded_model import EMBEDDED_MODEL
from batchline.domain.endpoints import CHAT
from batchline.domain.errors import InsufficientQuota, InvalidRequest, ObjectsDown
from batchline.domain.records import File
from batchline.pipeline.create import CreateRequest
from batchline.pipeline.line_table import LineState, ShownLine

_PREVIEW_LINES = 3
_PREVIEW_BYTES = 256 * 1024
_DEMO_COUNTRIES = ("France", "Japan", "Brazil", "Kenya", "Norway", "Canada", "Italy", "Egypt")
_DEMO_TOKENS = 24


class _Chosen(Struct, frozen=True, kw_only=True):
    """The choices that a person made for a new batch."""

    endpoint: str
    name: str
    hold: bool


class NewBatchPages:
    """Takes files in for new batches."""

    def __init__(
        self, services: ApiServices, *, pages: Pages, batches: BatchPages, throttle: Throttle, metered: bool
    ) -> None:
        self._services, self._pages, self._batches, self._metered = services, pages, batches, metered
        self._endpoints = services.settings.batch_endpoints
        self._form_upload = FormUpload(
            throttle=throttle,
            upload=services.upload,
            storage_quota=services.storage_quota,
            max_file_bytes=services.settings.max_file_bytes,
        )

    async def show(self, request: Request, visit: Visit) -> ASGIApp:
        """Show the form."""
        return self._pages.render("new_batch.html", self._values(visit))

    async def check(self, request: Request, visit: Visit) -> ASGIApp:
        """Take a file in and check it. A file with faults is deleted at once."""
        if self._metered and visit.owner.funds <= 0:
            raise InsufficientQuota

        def check_form(form: Form) -> None:
            if form.has_file:
                visit.check_csrf(form.fields.get(CSRF_FIELD))

        form, file = await self._form_upload.receive(
            request,
            visit.owner,
            check=check_form,
            check_complete=lambda form: visit.check_csrf(form.fields.get(CSRF_FIELD)),
            lifetime=lambda _form: None,
        )
        try:
            return await self._review(visit, file, self._chosen(form))
        except BaseException:
            await self._discard(file)
            raise

    async def demo(self, request: Request, visit: Visit) -> ASGIApp:
        """Run a few lines on a model of this service, so that there is a batch to look at."""
        async with self._services.upload.begin(visit.project_id) as incoming:
            await incoming.write(self._demo_lines(visit.project_id))
            file = await incoming.finish(filename="demo.jsonl", expires_after=None)
        answer = await self._services.creator.create(
            visit.owner,
            CreateRequest(input_file_id=file.id, endpoint=CHAT, metadata=metadata_with_name("Demo: capitals")),
            idempotency_key=None,
            retried=False,
            admit=await self._batches.admission(visit.owner),
        )
        return await self._batches.show_created(answer)

    async def _review(self, visit: Visit, file: File, chosen: _Chosen) -> ASGIApp:
        report = await self._services.input_check.check(
            visit.owner,
            CreateRequest(input_file_id=file.id, endpoint=chosen.endpoint, metadata=metadata_with_name(chosen.name)),
        )
        values = self._values(visit) | {"file": file, "chosen": chosen, "report": report}
        if report.faults:
            await self._discard(file)
            return self._pages.render("new_batch.html", values, status=400)
        return self._pages.render("review.html", values | {"preview": await self._preview(file)})

    async def _preview(self, file: File) -> list[Any]:
        head = await self._services.objects.read(file.object_key, 0, min(file.bytes, _PREVIEW_BYTES))
        lines = [line for line in head.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()][:_PREVIEW_LINES]
        shown = [
            ShownLine(number=n, custom_id="", state=LineState.WAITING, code=None, request=line, result=None)
            for n, line in enumerate(lines, 1)
        ]
        return [view_of(line) for line in shown]

    def _chosen(self, form: Form) -> _Chosen:
        endpoint = form.fields.get("endpoint", CHAT)
        if endpoint not in self._endpoints:
            raise InvalidRequest("Choose one of the endpoints", param="endpoint")
        return _Chosen(endpoint=endpoint, name=form.fields.get("name", "").strip()[:200], hold="hold" in form.fields)

    async def _discard(self, file: File) -> None:
        """Delete a file that no batch is made of. If its object cannot be deleted now, the pruner does it."""
        await self._services.store.delete_file(file.project_id, file.id, at=int(self._services.clock.due()))
        try:
            await self._services.objects.delete(file.object_key)
        except ObjectsDown:
            return

    def _demo_lines(self, project_id: str) -> bytes:
        models = self._services.settings.catalog.enabled(project_id)
        model = models[0].id if models else EMBEDDED_MODEL
        lines = [
            {
                "custom_id": f"capital-of-{country}",
                "method": "POST",
                "url": CHAT,
                "body": {
                    "model": model,
                    "messages": [
                        {"role": "user", "content": "What is the capital of Slovakia?"},
                        {"role": "assistant", "content": "The capital of Slovakia is Bratislava."},
                        {"role": "user", "content": f"What is the capital of {country}?"},
                    ],
                    "temperature": 0,
                    "max_tokens": _DEMO_TOKENS,
                },
            }
            for country in _DEMO_COUNTRIES
        ]
        return "".join(f"{json.dumps(line)}\n" for line in lines).encode()

    def _values(self, visit: Visit) -> dict[str, Any]:
        return visit.values | {
            "endpoints": self._endpoints,
            "max_bytes": self._services.settings.max_file_bytes,
            "report": None,
            "chosen": None,
            "file": None,
        }
