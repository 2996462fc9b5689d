"""The pages of batches: the list, one batch with its progress, and what a person can do to a batch."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlencode

from msgspec.json import decode as decode_json
from msgspec.json import encode as encode_json
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from batchline.api.event_stream import STREAM_HEADERS, first_of, wait_for_disconnect
from batchline.api.paging import page
from batchline.api.request_context import ClientState, client_state_of
from batchline.api.services import ApiServices
from batchline.api.throttle import Throttle
from batchline.console.guard import see_other
from batchline.console.pages import Pages
from batchline.console.programs import programs_of
from batchline.console.sessions import SessionAuth, Sessions, Visit
from batchline.console.views import BatchView, BatchViews, error_groups, timeline
from batchline.domain.embedded_model import EMBEDDED_MODEL
from batchline.domain.errors import BatchNotFound, InsufficientQuota, InvalidRequest, StorageFull, StoreDown
from batchline.domain.limits import MAX_IDEMPOTENCY_KEY_CHARACTERS
from batchline.domain.merge_patch import MergePatch
from batchline.domain.models import DEFAULT_UPSTREAM, Model, ModelKind
from batchline.domain.progress import Progress
from batchline.domain.records import Batch, File, Owner
from batchline.domain.states import TERMINAL, BatchStatus, Hold
from batchline.domain.wire import BatchErrors
from batchline.pipeline.create import CreateAnswer, CreateRequest

log = logging.getLogger(__name__)

_PAGE_ROWS = 25
_FOLLOWED_BATCHES = 10
"""The running batches of a page whose rate and time left are read, the newest first."""
_POLL_SECONDS = 1.0
"""The time between two updates of the progress on an open page of a running batch."""
_COMMENT_SECONDS = 15.0
_END = b"event: end\ndata: {}\n\n"
"""The event after which a page is loaded again and follows the batch no more."""
_MAX_SHOWN_CHILDREN = 20
_STATUSES = (*BatchStatus, Hold.HELD)
"""The conditions that the list can be filtered by. A held batch is in progress too."""
_AGES = {"hour": 3600, "day": 86_400, "week": 7 * 86_400, "month": 30 * 86_400}
_MAX_SEARCHED_CHARACTERS = 200
_MAX_NAME_CHARACTERS = 200


class BatchPages:
    """Shows batches, and cancels, releases and reruns them."""

    def __init__(
        self, services: ApiServices, *, pages: Pages, sessions: Sessions, auth: SessionAuth, throttle: Throttle
    ) -> None:
        """``throttle`` limits the creates of a project, together with its uploads."""
        self._services, self._pages, self._sessions = services, pages, sessions
        self._auth, self._throttle = auth, throttle
        settings = services.settings
        self._views = BatchViews(metered=settings.metering)
        self._streams = Throttle(settings.max_project_requests, of="live pages", bound="project_live_pages")

    async def list(self, request: Request, visit: Visit) -> ASGIApp:
        """Show a page of batches; only its table if a script asks for that."""
        query = request.query_params
        wanted = _filters(query)
        rows = await self._services.store.batches(
            visit.project_id,
            after=query.get("after") or None,
            limit=_PAGE_ROWS + 1,
            status=wanted["status"] or None,
            created_after=self._since(wanted["age"]),
            model=wanted["model"] or None,
            text=wanted["search"] or None,
        )
        shown, has_more = page(rows, limit=_PAGE_ROWS)
        filtered = any(wanted.values())
        values = visit.values | {
            "batches": await self._with_progress(visit, shown),
            "filters": wanted,
            "statuses": _STATUSES,
            "ages": list(_AGES),
            "older": f"?{urlencode({**_given(wanted), 'after': shown[-1].id})}" if has_more else None,
            "is_first": "after" not in query,
            "newest": f"?{urlencode(_given(wanted))}" if filtered else "?",
            "this_page": f"?{urlencode({**_given(wanted), **({'after': query['after']} if 'after' in query else {})})}",
            "filtered": filtered,
            "now": self._services.clock.now(),
            "embeds_model": self._services.settings.embeds_model,
            "demo_model": self.demo_model(visit.project_id),
            "models": [model.id for model in self._chat_models(visit.project_id)],
            "base_url": _base_url(request),
        }
        if "table" in query:
            return self._pages.render("batch_table.html", values)
        is_new = not shown and not filtered and "after" not in query
        return self._pages.render("first_run.html" if is_new else "batches.html", values)

    def demo_model(self, project_id: str) -> str | None:
        """Return the name under which a project may use the embedded model for nothing; None if it may not."""
        settings = self._services.settings
        if not settings.embeds_model:
            return None
        if settings.catalog.takes_any:
            return EMBEDDED_MODEL
        free = (model for model in self._chat_models(project_id) if model.price.is_zero)
        return next((model.id for model in free if model.upstreams == (DEFAULT_UPSTREAM,)), None)

    def _chat_models(self, project_id: str) -> Sequence[Model]:
        """Return the models that answer chats of a project; none if any name is accepted."""
        enabled = self._services.settings.catalog.enabled(project_id)
        return [model for model in enabled if model.kind is ModelKind.CHAT]

    async def show(self, request: Request, visit: Visit) -> ASGIApp:
        """Show one batch."""
        return self._pages.render("batch.html", await self._batch_values(request, visit))

    async def _batch_values(self, request: Request, visit: Visit) -> dict[str, Any]:
        batch_id = request.path_params["batch_id"]
        progress = await self._services.progress_reader.progress(visit.project_id, batch_id)
        batch = progress.batch
        files = {}
        for kind, file_id in _files_of(batch).items():
            found = None if file_id is None else await self._file(visit, file_id)
            files[kind] = found
        return visit.values | {
            "view": self._view(progress),
            "batch": batch,
            "steps": timeline(batch),
            "errors": error_groups(progress.errors),
            "faults": _faults(batch),
            "files": files,
            "children": progress.child_batch_ids[:_MAX_SHOWN_CHILDREN],
            "now": self._services.clock.now(),
            "programs": programs_of(batch, base_url=_base_url(request)),
        }

    def _view(self, progress: Progress) -> BatchView:
        loads = self._services.load_history.batch(progress.batch.id, progress.activity.upstreams)
        return self._views.of_progress(progress, now=self._services.clock.now(), loads=loads)

    async def _file(self, visit: Visit, file_id: str) -> Any:
        return await self._services.store.file(visit.project_id, file_id, at=int(self._services.clock.due()))

    async def events(self, request: Request, visit: Visit) -> ASGIApp:
        """Send the progress of a batch as server-sent events, each with a part of the page."""
        batch_id = request.path_params["batch_id"]
        await self._services.progress_reader.progress(visit.project_id, batch_id)
        session_end = partial(self._sessions.wait_until_ended, request, visit.project_id)
        return partial(self._send_events, visit, batch_id, session_end)

    async def _send_events(
        self,
        visit: Visit,
        batch_id: str,
        session_end: Callable[[], Coroutine[Any, Any, None]],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Send events until the batch or the session has ended, the client disconnects or the service shuts down.

        Only the first two are an ``end`` for the page. After a shutdown the browser connects again by itself.
        """
        with self._streams.slot(visit.project_id):
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            ended = await first_of(
                self._send_progress(visit, batch_id, send, client_state_of(scope)),
                wait_for_disconnect(receive),
                session_end(),
            )
            last = _END if ended == _SESSION_ENDED else b""
            if ended != _DISCONNECTED:
                await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_progress(self, visit: Visit, batch_id: str, send: Send, client_state: ClientState) -> None:
        clock = self._services.clock
        last, quiet_since = "", clock.steady()
        while not client_state.closing:
            part, ended = await self._live_part(visit, batch_id) or (last, False)
            news = b""
            if part != last:
                news = b"event: live\ndata: " + encode_json(part) + b"\n\n"
            elif clock.steady() - quiet_since >= _COMMENT_SECONDS:
                news = b":\n\n"
            if ended:
                news += _END
            if news:
                await send({"type": "http.response.body", "body": news, "more_body": True})
                last, quiet_since = part, clock.steady()
            if ended:
                return
            await clock.sleep(_POLL_SECONDS)

    async def _live_part(self, visit: Visit, batch_id: str) -> tuple[str, bool] | None:
        """Return the live part of a page, and whether the batch has ended; None if the store is unavailable."""
        try:
            progress = await self._services.progress_reader.progress(visit.project_id, batch_id)
        except StoreDown as error:
            log.warning("failed to read progress for a page, retrying", extra={"reason": str(error)})
            return None
        values = {"view": self._view(progress), "batch": progress.batch, "errors": error_groups(progress.errors)}
        return self._pages.fragment("batch_live.html", values), progress.batch.status in TERMINAL

    async def cancel(self, request: Request, visit: Visit) -> ASGIApp:
        """Cancel a batch."""
        batch = await self._services.cancellation.cancel(visit.project_id, request.path_params["batch_id"])
        return see_other(batch_path(batch.id))

    async def release(self, request: Request, visit: Visit) -> ASGIApp:
        """Release a held batch."""
        batch = await self._services.hold_release.release(visit.project_id, request.path_params["batch_id"])
        return see_other(batch_path(batch.id))

    async def rerun(self, request: Request, visit: Visit) -> ASGIApp:
        """Run the failed lines of a batch again, those with some codes or all, perhaps with a patch."""
        codes = frozenset(visit.form.get("codes", "").split("\n")) - {""}
        if not codes and "all" not in visit.form:
            raise InvalidRequest("Tick at least one code: the lines that failed with it run again", param="codes")
        with self._throttle.slot(visit.project_id):
            answer = await self._services.rerun.create(
                visit.owner,
                request.path_params["batch_id"],
                codes=codes or None,
                patch=_patch(visit.form.get("patch", "")),
                metadata=metadata_with_name(visit.form.get("name", "")),
                idempotency_key=visit.form_key(request.url.path),
                retried=False,
                admit=await self._admission(visit.owner),
            )
        return await self.show_created(answer)

    async def create(self, request: Request, visit: Visit) -> ASGIApp:
        """Create a batch of a file that was uploaded and checked."""
        endpoint, once = visit.form.get("endpoint", ""), visit.form.get("once", "")
        if endpoint not in self._services.settings.batch_endpoints:
            raise InvalidRequest("Choose one of the endpoints", param="endpoint")
        if len(once) > MAX_IDEMPOTENCY_KEY_CHARACTERS:
            raise InvalidRequest("Check the file again: the form is not the one that the console made", param="once")
        fields = CreateRequest(
            input_file_id=visit.form.get("file_id", ""),
            endpoint=endpoint,
            metadata=metadata_with_name(visit.form.get("name", "")),
            hold="hold" in visit.form,
        )
        return await self.show_created(await self.create_batch(visit.owner, fields, idempotency_key=once or None))

    async def create_batch(
        self,
        owner: Owner,
        fields: CreateRequest,
        *,
        idempotency_key: str | None = None,
        make_input: Callable[[], Awaitable[File]] | None = None,
    ) -> CreateAnswer:
        """Create a batch, as far as the project may create one now. See ``BatchCreator.create``."""
        with self._throttle.slot(owner.project_id):
            return await self._services.creator.create(
                owner,
                fields,
                idempotency_key=idempotency_key,
                retried=False,
                admit=await self._admission(owner),
                make_input=make_input,
            )

    async def _admission(self, owner: Owner) -> Callable[[], None]:
        """Return a function that raises unless a project may create a batch now."""
        full = await self._services.storage_quota.exhausted(owner)
        return partial(_admit, full=full, has_funds=self._auth.has_funds(owner))

    async def show_created(self, answer: CreateAnswer) -> ASGIApp:
        """Send a person to the batch that was created."""
        await self._services.creator.mark_answered(answer.batch_id)
        return see_other(batch_path(answer.batch_id))

    async def _with_progress(self, visit: Visit, batches: Sequence[Batch]) -> Sequence[BatchView]:
        """Return views of batches. Those of the first running ones have a rate and a time left."""
        running = [batch.id for batch in batches if batch.status is BatchStatus.IN_PROGRESS][:_FOLLOWED_BATCHES]
        found = await asyncio.gather(*(self._progress(visit, batch_id) for batch_id in running))
        now = self._services.clock.now()
        by_id = {each.batch.id: self._views.of_progress(each, now=now) for each in found if each is not None}
        others = [batch for batch in batches if batch.id not in by_id] if self._services.settings.metering else []
        bills = dict(zip((batch.id for batch in others), await self._services.store.bills(others), strict=True))
        return [by_id.get(batch.id) or self._views.of_batch(batch, bills.get(batch.id)) for batch in batches]

    async def _progress(self, visit: Visit, batch_id: str) -> Progress | None:
        """Return the progress of a batch, or None if it was deleted after it was listed."""
        try:
            return await self._services.progress_reader.progress(visit.project_id, batch_id)
        except BatchNotFound:
            return None

    def _since(self, age: str) -> int | None:
        return int(self._services.clock.now()) - _AGES[age] if age in _AGES else None


_, _DISCONNECTED, _SESSION_ENDED = range(3)
"""The coroutine that ended first, which is the reason why no more events are sent."""


def batch_path(batch_id: str) -> str:
    """Return the path of the page of a batch."""
    return f"/console/batches/{batch_id}"


def metadata_with_name(name: str) -> bytes:
    """Return metadata with a name, or none. A name that is too long is cut."""
    shown = name.strip()[:_MAX_NAME_CHARACTERS]
    return encode_json({"name": shown}) if shown else b"{}"


def _filters(query: QueryParams) -> dict[str, str]:
    status, age = query.get("status", ""), query.get("age", "")
    return {
        "search": query.get("search", "").strip()[:_MAX_SEARCHED_CHARACTERS],
        "status": status if status in _STATUSES else "",
        "model": query.get("model", "").strip()[:_MAX_SEARCHED_CHARACTERS],
        "age": age if age in _AGES else "",
    }


def _given(filters: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in filters.items() if value}


def _files_of(batch: Batch) -> dict[str, str | None]:
    return {"input": batch.input_file_id, "output": batch.output_file_id, "errors": batch.error_file_id}


def _faults(batch: Batch) -> BatchErrors | None:
    """Return what is wrong with the input file of a failed batch."""
    return None if batch.errors is None else decode_json(batch.errors, type=BatchErrors)


def _patch(text: str) -> bytes | None:
    if not text.strip():
        return None
    patch = text.strip().encode("utf-8", "replace")
    try:
        MergePatch.parse(patch)
    except ValueError as error:
        raise InvalidRequest(f"The patch must be a JSON object: it is {error}", param="patch") from None
    return patch


def _admit(*, full: StorageFull | None, has_funds: bool) -> None:
    if full is not None:
        raise full
    if not has_funds:
        raise InsufficientQuota


def _base_url(request: Request) -> str:
    """Return the address of this service as the browser knows it, for the commands that a page shows."""
    host = request.headers.get("host", "127.0.0.1:8000")
    forwarded = request.headers.get("x-forwarded-proto", "").split(",")[0].strip().lower()
    return f"{'https' if forwarded == 'https' else 'http'}://{host}"
