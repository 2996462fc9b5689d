"""The pages that make a batch: upload a file, read what is wrong with it or what it will take, and start."""

import json
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from batchline.api.form_upload import FormUpload
from batchline.api.multipart import Form
from batchline.api.services import ApiServices
from batchline.api.throttle import Throttle
from batchline.console.batches import BatchPages, metadata_with_name
from batchline.console.lines import ShownSide, view_of
from batchline.console.pages import Pages
from batchline.console.sessions import CSRF_FIELD, Sessions, Visit
from batchline.domain.endpoints import CHAT
from batchline.domain.errors import InsufficientQuota, InvalidRequest, ObjectsDown
from batchline.domain.input_lines import InputLines
from batchline.domain.limits import MAX_FAULTS
from batchline.domain.records import File, InputFault, Owner
from batchline.pipeline.create import CreateRequest
from batchline.pipeline.line_table import LineState, ShownLine
from batchline.pipeline.rows.table import DELIMITERS
from batchline.ports import TableForm

_PREVIEW_LINES = 3
_PREVIEW_BYTES = 4 * 1024 * 1024
"""Room for the first lines, each as long as one may be by default."""
_MAX_PREVIEW_CANDIDATES = 10_000
"""The lines that are looked at before the preview ends without three requests: a file may begin with blank ones."""
_DEMO_COUNTRIES = ("France", "Japan", "Brazil", "Kenya", "Norway", "Canada", "Italy", "Egypt")
_DEMO_TOKENS = 24


class _Chosen(Struct, frozen=True, kw_only=True):
    """The choices that a person made for a new batch."""

    endpoint: str
    name: str
    hold: bool
    prompt: str = ""
    """The template for the rows of a table."""
    system: str = ""
    model: str = ""


class NewBatchPages:
    """Takes files in for new batches."""

    def __init__(
        self,
        services: ApiServices,
        *,
        pages: Pages,
        batches: BatchPages,
        sessions: Sessions,
        throttle: Throttle,
        metered: bool,
    ) -> None:
        self._services, self._pages, self._batches, self._metered = services, pages, batches, metered
        self._sessions = sessions
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
        """Receive a file and check it. A file with faults is deleted at once."""
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
            check_key=self._sessions.check_after_body,
        )
        try:
            chosen = self._chosen(form, visit.project_id)
            if Path(file.filename).suffix.lower() in DELIMITERS:
                return await self._review_table(visit, file, chosen)
            return await self._review(visit, file, chosen, uploaded_name=file.filename)
        except BaseException:
            await self._discard(file)
            raise

    async def demo(self, request: Request, visit: Visit) -> ASGIApp:
        """Run a few lines on a model, so that there is a batch to look at."""
        model = visit.form.get("model", "").strip() or self._batches.demo_model(visit.project_id)
        if not model:
            raise InvalidRequest("Name the model that answers the questions", param="model")
        made: list[File] = []

        async def make_input() -> File:
            made.append(await self._store_demo(visit.owner, model))
            return made[0]

        async def discard() -> None:
            for file in made:
                await self._discard(file)

        fields = CreateRequest(input_file_id="", endpoint=CHAT, metadata=metadata_with_name("Demo: capitals"))
        key = visit.form_key(request.url.path)
        try:
            answer = await self._batches.create_batch(visit.owner, fields, idempotency_key=key, make_input=make_input)
        except BaseException:
            await discard()
            raise
        if answer.replayed:
            await discard()
        return await self._batches.show_created(answer)

    async def _store_demo(self, owner: Owner, model: str) -> File:
        lines = _demo_lines(model)
        async with (
            self._services.storage_quota.reserve(owner, len(lines)),
            self._services.upload.begin(owner.project_id) as incoming,
        ):
            await incoming.write(lines)
            return await incoming.finish(filename="demo.jsonl", expires_after=None)

    async def _review(self, visit: Visit, file: File, chosen: _Chosen, *, uploaded_name: str) -> ASGIApp:
        """Show what a file will take, or its faults. ``uploaded_name`` is that of the file that a person chose."""
        report = await self._services.input_check.check(
            visit.owner,
            CreateRequest(input_file_id=file.id, endpoint=chosen.endpoint, metadata=metadata_with_name(chosen.name)),
        )
        if report.faults:
            await self._discard(file)
            return self._show_faults(visit, file, chosen, report.faults)
        values = self._values(visit) | {"file": file, "chosen": chosen, "report": report}
        values |= {"uploaded_name": uploaded_name, "metered": self._metered}
        return self._pages.render("review.html", values | {"preview": await self._preview(file)})

    async def _review_table(self, visit: Visit, table: File, chosen: _Chosen) -> ASGIApp:
        """Make requests of the rows of a table and check these. The table itself is not kept."""
        form = TableForm(filename=table.filename, prompt=chosen.prompt, system=chosen.system, model=chosen.model)
        made: File | list[InputFault] = [InputFault("Name the model for the rows of the table.")]
        if form.model:
            made = await self._services.table_conversion.convert(visit.owner, table, form)
        await self._discard(table)
        if isinstance(made, list):
            return self._show_faults(visit, table, chosen, made)
        try:
            return await self._review(visit, made, chosen, uploaded_name=table.filename)
        except BaseException:
            await self._discard(made)
            raise

    def _show_faults(self, visit: Visit, file: File, chosen: _Chosen, faults: list[InputFault]) -> ASGIApp:
        values = self._values(visit) | {"file": file, "chosen": chosen, "faults": faults}
        return self._pages.render("new_batch.html", values, status=400)

    async def _preview(self, file: File) -> list[ShownSide]:
        head = await self._services.objects.read(file.object_key, 0, min(file.bytes, _PREVIEW_BYTES))
        return [
            view_of(
                ShownLine(number=n, custom_id="", state=LineState.WAITING, code=None, request=line, result=None)
            ).request
            for n, line in enumerate(_first_requests(head, is_whole=len(head) == file.bytes), 1)
        ]

    def _chosen(self, form: Form, project_id: str) -> _Chosen:
        fields = form.fields
        endpoint = fields.get("endpoint", CHAT)
        if endpoint not in self._endpoints:
            raise InvalidRequest("Choose one of the endpoints", param="endpoint")
        models = self._models(project_id)
        return _Chosen(
            endpoint=endpoint,
            name=fields.get("name", "").strip(),
            hold="hold" in fields,
            prompt=fields.get("prompt", ""),
            system=fields.get("system", ""),
            model=fields.get("model", "").strip() or (models[0] if len(models) == 1 else ""),
        )

    def _models(self, project_id: str) -> list[str]:
        """Return the models that a project may use; none if any name is accepted."""
        return [model.id for model in self._services.settings.catalog.enabled(project_id)]

    async def _discard(self, file: File) -> None:
        """Delete a file that no batch is made of. If its object cannot be deleted now, the pruner does it."""
        await self._services.store.delete_file(file.project_id, file.id, at=int(self._services.clock.due()))
        try:
            await self._services.objects.delete(file.object_key)
        except ObjectsDown:
            return

    def _values(self, visit: Visit) -> dict[str, Any]:
        return visit.values | {
            "endpoints": self._endpoints,
            "models": self._models(visit.project_id),
            "max_bytes": self._services.settings.max_file_bytes,
            "faults": [],
            "max_faults": MAX_FAULTS,
            "chosen": None,
            "file": None,
        }


def _first_requests(head: bytes, *, is_whole: bool) -> list[bytes]:
    """Return the first lines of a file that are requests. The last line of a part of a file may be cut off."""
    counted, found = InputLines(), list[bytes]()
    for line in islice(BytesIO(head), _MAX_PREVIEW_CANDIDATES):
        if found and not is_whole and not line.endswith(b"\n"):
            break
        if (text := counted.take(line)) is not None:
            found.append(text)
        if len(found) == _PREVIEW_LINES:
            break
    return found


def _demo_lines(model: str) -> bytes:
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
