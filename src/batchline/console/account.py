"""The pages of a project beside its batches: files, usage, keys and webhooks."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from hmac import compare_digest
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from batchline.api.files import FileRoutes
from batchline.api.paging import page
from batchline.api.services import ApiServices
from batchline.console.charts import ChartBar
from batchline.console.cookies import WEBHOOK_COOKIE, clear_cookie, cookie_of, set_cookie
from batchline.console.guard import see_other
from batchline.console.pages import Pages
from batchline.console.sessions import Visit
from batchline.console.text import day
from batchline.domain.errors import InvalidRequest, MissingScope, NotFound
from batchline.domain.ids import canonical_file_id
from batchline.domain.records import ALL_SCOPES, BATCH, BATCH_OUTPUT, BATCH_SCOPE, Key, ProjectUsage
from batchline.domain.webhooks import EVENTS, Webhook, check_url, new_secret

_PAGE_ROWS = 50
_DAYS = 30
_DAY_SECONDS = 86_400
_MAX_USAGE_ROWS = 10_000
_SHOWN_DELIVERIES = 20
_MAX_WEBHOOKS = 20
_SHOWN_SECRET_SECONDS = 60
"""The time in which the page must follow that shows the secret of a new webhook."""
_WEBHOOKS = "/console/webhooks"
_MAX_NAME_CHARACTERS = 100
_MAX_DIGITS = 18
"""A number with more digits may be larger than any that a database holds."""
CHART_WIDTH, CHART_HEIGHT = 900, 160
_SERIES = 5
"""The number of colours in a chart. The models with the most requests get one each, and all others share the last."""
_OTHERS = "others"


class AccountPages:
    """Shows and changes what a project has."""

    def __init__(self, services: ApiServices, *, pages: Pages, files: FileRoutes) -> None:
        self._services, self._pages, self._files = services, pages, files

    async def files(self, request: Request, visit: Visit) -> ASGIApp:
        """Show a page of files."""
        query = request.query_params
        purpose = query.get("purpose", "")
        purpose = purpose if purpose in (BATCH, BATCH_OUTPUT) else ""
        rows = await self._services.store.files(
            visit.project_id,
            purpose=purpose or None,
            ascending=False,
            after=canonical_file_id(query["after"]) if query.get("after") else None,
            limit=_PAGE_ROWS + 1,
            at=int(self._services.clock.due()),
        )
        shown, has_more = page(rows, limit=_PAGE_ROWS)
        given = {"purpose": purpose} if purpose else {}
        values = visit.values | {
            "files": shown,
            "purpose": purpose,
            "stored": await self._services.store.stored_bytes(visit.project_id),
            "older": f"?{urlencode({**given, 'after': shown[-1].id})}" if has_more else None,
            "is_first": "after" not in query,
            "now": self._services.clock.now(),
        }
        return self._pages.render("files.html", values)

    async def delete_file(self, request: Request, visit: Visit) -> ASGIApp:
        """Delete a file."""
        await self._files.delete(request)
        return see_other("/console/files")

    async def usage(self, request: Request, visit: Visit) -> ASGIApp:
        """Show the usage of the last 30 days, by day and model."""
        now = int(self._services.clock.now())
        since = now - now % _DAY_SECONDS - (_DAYS - 1) * _DAY_SECONDS
        rows = await self._usage_rows(visit.project_id, since=since, until=now + 1)
        metered = self._services.settings.metering
        organization = await self._services.store.organization(visit.owner.organization_id) if metered else None
        models = _by_model(rows)
        values = visit.values | {
            "rows": list(reversed(rows)),
            "models": models,
            "chart": _usage_chart(rows, [name for name, _ in models], since=since),
            "since": since,
            "until": now,
            "peak": max((sum(row.requests for row in rows if row.start == at) for at in _days(rows)), default=0),
            "organization": organization,
            "metered": metered,
            "has_reused": any(row.reused for row in rows),
            "is_cut": len(rows) >= _MAX_USAGE_ROWS,
        }
        return self._pages.render("usage.html", values)

    async def _usage_rows(self, project_id: str, *, since: int, until: int) -> list[ProjectUsage]:
        """Return the usage by day and model, oldest first. If there are too many rows, the oldest are left out."""
        read = partial(self._services.store.project_usage, project_id, model=None, bucket_seconds=_DAY_SECONDS)
        rows = await read(since=since, until=until, limit=_MAX_USAGE_ROWS)
        if len(rows) < _MAX_USAGE_ROWS:
            return rows
        rows = []
        for at in range(until - until % _DAY_SECONDS, since - 1, -_DAY_SECONDS):
            if len(rows) < _MAX_USAGE_ROWS:
                found = await read(since=at, until=at + _DAY_SECONDS, limit=_MAX_USAGE_ROWS - len(rows))
                rows = [*found, *rows]
        return rows

    async def keys(self, request: Request, visit: Visit) -> ASGIApp:
        """Show the keys of the project. They are created with ``batchline keys create``, not on this page."""
        keys = list(reversed(await self._own_keys(visit)))
        values = visit.values | {
            "keys": keys,
            "changeable": {key.id for key in keys if _may_change(visit, key)},
            "scopes": ALL_SCOPES.split(","),
            "now": int(self._services.clock.now()),
        }
        return self._pages.render("keys.html", values)

    async def change_key(self, request: Request, visit: Visit) -> ASGIApp:
        """Change the name, the scopes and the expiry of a key. Only the administrator may add scopes or time."""
        key = await self._changeable_key(request, visit)
        scopes = ",".join(scope for scope in ALL_SCOPES.split(",") if scope in visit.form.get("scopes", "").split("\n"))
        expires_at = _end_of_day(visit.form.get("expires", ""), key, now=self._services.clock.now())
        if not scopes:
            raise InvalidRequest("Leave the key at least one scope, or revoke it", param="scopes")
        if not visit.is_admin and not _is_narrower(key, scopes=scopes, expires_at=expires_at):
            raise InvalidRequest("A project can take scopes and time from a key. The administrator can give them")
        name = visit.form.get("name", "").strip()[:_MAX_NAME_CHARACTERS]
        if not await self._services.store.change_key(key, name=name, scopes=scopes, expires_at=expires_at):
            raise InvalidRequest("The key was changed meanwhile; look at it again")
        return see_other("/console/keys")

    async def revoke_key(self, request: Request, visit: Visit) -> ASGIApp:
        """Revoke a key of the project."""
        key = await self._changeable_key(request, visit)
        await self._services.store.revoke_key(key.id, at=int(self._services.clock.now()))
        return see_other("/console/keys")

    async def _own_keys(self, visit: Visit) -> list[Key]:
        return [key for key in await self._services.store.keys() if key.project_id == visit.project_id]

    async def _changeable_key(self, request: Request, visit: Visit) -> Key:
        """Return a key of the project that a person may change. Raise NotFound or MissingScope."""
        key_id = request.path_params["key_id"]
        for key in await self._own_keys(visit):
            if key.id == key_id:
                if not _may_change(visit, key):
                    missing = [scope for scope in key.scopes.split(",") if not visit.owner.may(scope)]
                    raise MissingScope(missing[0]) if missing else NotFound(f"Key {key_id} is revoked")
                return key
        raise NotFound(f"Key {key_id} not found")

    async def webhooks(self, request: Request, visit: Visit) -> ASGIApp:
        """Show the webhooks of the project and their last deliveries, and the secret of one that was just made."""
        proof, created = cookie_of(request, WEBHOOK_COOKIE), None
        found: list[dict[str, Any]] = []
        for webhook in await self._own_webhooks(visit):
            deliveries = await self._services.store.deliveries(webhook.id, limit=_SHOWN_DELIVERIES)
            found.append({"webhook": webhook, "deliveries": deliveries})
            if proof and compare_digest(_proof_of(webhook).encode(), proof.encode("utf-8", "replace")):
                created = webhook
        values = visit.values | {
            "found": found,
            "events": EVENTS,
            "created": created,
            "now": self._services.clock.now(),
        }
        response = self._pages.render("webhooks.html", values)
        if proof:
            clear_cookie(response, request, WEBHOOK_COOKIE)
        return response

    async def create_webhook(self, request: Request, visit: Visit) -> ASGIApp:
        """Make a webhook. The page that follows shows its secret this once."""
        url = visit.form.get("url", "").strip()
        events = [event for event in EVENTS if event in visit.form.get("events", "").split("\n")]
        try:
            check_url(url)
        except ValueError as error:
            raise InvalidRequest(f"{error}.", param="url") from None
        if not url.startswith("https://"):
            raise InvalidRequest("A webhook of a project must begin with https://", param="url")
        if not events:
            raise InvalidRequest("Choose at least one event", param="events")
        if len(await self._own_webhooks(visit)) >= _MAX_WEBHOOKS:
            raise InvalidRequest(f"A project has at most {_MAX_WEBHOOKS} webhooks; delete one first")
        random = self._services.random
        webhook = Webhook(
            id=f"wh_{random.bytes(12).hex()}",
            project_id=visit.project_id,
            url=url,
            events=",".join(events),
            secret=new_secret(random.bytes(32)),
            by_operator=False,
            created_at=int(self._services.clock.now()),
        )
        await self._services.store.create_webhook(webhook)
        response: Response = see_other(_WEBHOOKS)
        set_cookie(response, request, WEBHOOK_COOKIE, _proof_of(webhook), seconds=_SHOWN_SECRET_SECONDS)
        return response

    async def delete_webhook(self, request: Request, visit: Visit) -> ASGIApp:
        """Delete a webhook of the project."""
        webhook_id = request.path_params["webhook_id"]
        if webhook_id not in {webhook.id for webhook in await self._own_webhooks(visit)}:
            raise NotFound(f"Webhook {webhook_id} not found")
        await self._services.store.delete_webhook(webhook_id)
        return see_other(_WEBHOOKS)

    async def resend(self, request: Request, visit: Visit) -> ASGIApp:
        """Send an event to a webhook of the project again."""
        webhook_id, delivery_id = request.path_params["webhook_id"], request.path_params["delivery_id"]
        if webhook_id not in {webhook.id for webhook in await self._own_webhooks(visit)}:
            raise NotFound(f"Webhook {webhook_id} not found")
        if not delivery_id.isdecimal() or not delivery_id.isascii() or len(delivery_id) > _MAX_DIGITS:
            raise NotFound("There is no such delivery")
        if not await self._services.store.resend_delivery(webhook_id, int(delivery_id)):
            raise InvalidRequest("The event is on its way already, or its webhook is disabled")
        return see_other(_WEBHOOKS)

    async def _own_webhooks(self, visit: Visit) -> list[Webhook]:
        return [webhook for webhook in await self._services.store.webhooks() if webhook.project_id == visit.project_id]


def _proof_of(webhook: Webhook) -> str:
    """Return the text by which the browser that made a webhook asks for its secret. Nobody else can compute it."""
    return sha256(f"made {webhook.secret}".encode()).hexdigest()


def _may_change(visit: Visit, key: Key) -> bool:
    """Return whether a person may change a key: one that is not revoked and may do nothing that their own may not."""
    return key.revoked_at is None and all(visit.owner.may(scope) for scope in (BATCH_SCOPE, *key.scopes.split(",")))


def _is_narrower(key: Key, *, scopes: str, expires_at: int | None) -> bool:
    """Return whether a key would have no scope and no time that it does not have already."""
    ends_later = key.expires_at is not None and (expires_at is None or expires_at > key.expires_at)
    return set(scopes.split(",")) <= set(key.scopes.split(",")) and not ends_later


def _end_of_day(text: str, key: Key, *, now: float) -> int | None:
    """Return the expiry of a key that is to be valid through a day, or None if no day is given. Raise InvalidRequest.

    If the key expires on that day already, its exact time stays as it is.
    """
    if not text.strip():
        return None
    if key.expires_at is not None and text.strip() == day(key.expires_at - 1):
        return key.expires_at
    try:
        end = datetime.strptime(text.strip(), "%Y-%m-%d").replace(tzinfo=UTC) + timedelta(days=1)
    except (ValueError, OverflowError):
        raise InvalidRequest("Write the day as YYYY-MM-DD", param="expires") from None
    if end.timestamp() <= now:
        raise InvalidRequest("That day is over; revoke the key to end it now", param="expires")
    return int(end.timestamp())


def _days(rows: Sequence[ProjectUsage]) -> set[int]:
    return {row.start for row in rows}


def _by_model(rows: Sequence[ProjectUsage]) -> list[tuple[str, dict[str, int]]]:
    """Return the sums of each model, the one with most requests first."""
    sums: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        for name in ("requests", "lines", "reused", "input_tokens", "output_tokens", "cost", "saved"):
            sums[row.model][name] += getattr(row, name)
    return sorted(sums.items(), key=lambda each: -each[1]["requests"])


def _usage_chart(rows: Sequence[ProjectUsage], models: list[str], *, since: int) -> list[ChartBar]:
    """Return the requests of each day as bars, divided by model. The models after the first few have one bar a day."""
    series = {model: number for number, model in enumerate(models[: _SERIES - 1])}
    by_day: dict[int, Counter[int]] = defaultdict(Counter)
    for row in rows:
        by_day[row.start][series.get(row.model, _SERIES - 1)] += row.requests
    peak = max((found.total() for found in by_day.values()), default=0)
    width = CHART_WIDTH / _DAYS
    names = [*series, *[_OTHERS] * (_SERIES - len(series))]
    bars = []
    for at, found in sorted(by_day.items()):
        top = float(CHART_HEIGHT)
        for number, requests in sorted(found.items()):
            height = CHART_HEIGHT * max(0, requests) / peak if peak > 0 else 0.0
            top -= height
            bars.append(
                ChartBar(
                    x=round((at - since) / _DAY_SECONDS * width, 1),
                    y=round(top, 1),
                    width=round(width - 3, 1),
                    height=round(height, 1),
                    label=f"{day(at)}: {requests:,} requests of {names[number]}",
                    series=number,
                )
            )
    return bars
