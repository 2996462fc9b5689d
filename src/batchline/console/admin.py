"""The pages of the administrator: what runs over all projects, projects and organizations, and upstreams."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from batchline.api.services import ApiServices
from batchline.console.charts import LatencyChart, LoadChart, latency_chart, load_chart
from batchline.console.guard import ADMIN_HOME, see_other
from batchline.console.pages import Pages
from batchline.console.sessions import AdminVisit, Sessions
from batchline.console.sign_in import HOME, own_path
from batchline.console.text import moment, sentence
from batchline.console.views import BatchView, BatchViews
from batchline.domain.errors import BatchNotFound, NotFound
from batchline.domain.records import Batch, Key, Organization, Project
from batchline.domain.states import BatchStatus
from batchline.domain.wait_text import AnyWait, describe_wait
from batchline.domain.waiting import WaitReason
from batchline.pipeline.load_history import HISTORY_SECONDS
from batchline.pipeline.overview import UpstreamState, open_batches

_LISTED_BATCHES = 100
_FOLLOWED_BATCHES = 25
"""The most running batches whose rate and wait reason are read, the oldest first."""
_PAGE_PROJECTS = 50
_DAY_SECONDS = 86_400
_MAX_DIGITS = 6
_MAX_SEARCHED_CHARACTERS = 200


class OpenBatch(Struct, frozen=True, kw_only=True):
    """A batch that has not ended, and its project."""

    project: Project
    view: BatchView


class ProjectView(Struct, frozen=True, kw_only=True):
    """A project, what it uses and what it may use."""

    project: Project
    organization: Organization | None
    keys: int
    """Its valid keys."""
    stored: int
    storage_limit: int | None
    spent_today: int
    day_limit: int | None


class OrganizationView(Struct, frozen=True, kw_only=True):
    """An organization, what it stores and what it may store."""

    organization: Organization
    projects: int
    stored: int
    storage_limit: int | None


class UpstreamView(Struct, frozen=True, kw_only=True):
    """An upstream now and in the last hour."""

    state: UpstreamState
    notices: list[str]
    """The reasons why lines do not start, as text."""
    load: LoadChart | None
    latency: LatencyChart | None


class AdminPages:
    """Shows the administrator all projects, and opens one."""

    def __init__(self, services: ApiServices, *, pages: Pages, sessions: Sessions) -> None:
        self._services, self._pages, self._sessions = services, pages, sessions
        settings = services.settings
        self._views = BatchViews(metered=settings.metering)
        self._storage, self._day_limits = settings.storage_limits, settings.day_limits

    async def overview(self, request: Request, visit: AdminVisit) -> ASGIApp:
        """Show what runs and waits; only its table if a script asks for that."""
        found = await open_batches(self._services.store, limit=_LISTED_BATCHES)
        upstreams = await self._services.upstreams_reader.upstreams()
        batches = await self._followed(found)
        values = visit.values | {
            "batches": batches,
            "is_cut": len(found) == _LISTED_BATCHES,
            "lines_left": sum(batch.total - batch.completed - batch.failed for _, batch in found),
            "in_flight": sum(upstream.in_flight for upstream in upstreams),
            "rate": sum(each.view.rate for each in batches),
            "is_rate_cut": len(found) == _LISTED_BATCHES or len(_running(found)) > _FOLLOWED_BATCHES,
            "followed": _FOLLOWED_BATCHES,
            "workers": await self._services.upstreams_reader.workers(),
            "paused": [upstream.name for upstream in upstreams if upstream.pauses],
            "now": self._services.clock.now(),
        }
        return self._pages.render("admin_table.html" if "table" in request.query_params else "admin.html", values)

    async def _followed(self, found: Sequence[tuple[Project, Batch]]) -> list[OpenBatch]:
        running = _running(found)[:_FOLLOWED_BATCHES]
        views = dict(zip((batch.id for batch in running), await asyncio.gather(*map(self._view, running)), strict=True))
        return [
            OpenBatch(project=project, view=views.get(batch.id) or self._views.of_batch(batch))
            for project, batch in found
        ]

    async def _view(self, batch: Batch) -> BatchView:
        try:
            progress = await self._services.progress_reader.progress(batch.project_id, batch.id)
        except BatchNotFound:
            return self._views.of_batch(batch)
        return self._views.of_progress(progress, now=self._services.clock.now())

    async def projects(self, request: Request, visit: AdminVisit) -> ASGIApp:
        """Show a page of projects, and the organizations of these."""
        store, text = self._services.store, request.query_params.get("search", "").strip()[:_MAX_SEARCHED_CHARACTERS]
        matching = [each for each in await store.projects() if _names(each, text)]
        pages = max(1, -(-len(matching) // _PAGE_PROJECTS))
        page = min(_page_number(request), pages)
        shown = matching[(page - 1) * _PAGE_PROJECTS : page * _PAGE_PROJECTS]
        organizations = {each.id: each for each in await store.organizations()}
        keys = _valid_keys(await store.keys(), now=self._services.clock.now())
        of_organization = Counter(each.organization_id for each in await store.projects())
        values = visit.values | {
            "projects": [await self._project(each, organizations, keys) for each in shown],
            "organizations": [
                await self._organization(organizations[each], of_organization[each])
                for each in dict.fromkeys(project.organization_id for project in shown)
                if each in organizations
            ],
            "matches": len(matching),
            "page": page,
            "pages": pages,
            "search": text,
            "metered": self._services.settings.metering,
            "now": self._services.clock.now(),
        }
        return self._pages.render("admin_projects.html", values)

    async def _project(
        self, project: Project, organizations: dict[str, Organization], keys: Counter[str]
    ) -> ProjectView:
        store, now = self._services.store, int(self._services.clock.now())
        metered = self._services.settings.metering
        return ProjectView(
            project=project,
            organization=organizations.get(project.organization_id),
            keys=keys[project.id],
            stored=await store.stored_bytes(project.id),
            storage_limit=self._storage.of_project(project.id),
            spent_today=await store.cost_of_project(project.id, since=now - now % _DAY_SECONDS) if metered else 0,
            day_limit=self._day_limits.get(project.id),
        )

    async def _organization(self, organization: Organization, projects: int) -> OrganizationView:
        return OrganizationView(
            organization=organization,
            projects=projects,
            stored=await self._services.store.stored_bytes_of_organization(organization.id),
            storage_limit=self._storage.of_organization(organization.id),
        )

    async def upstreams(self, request: Request, visit: AdminVisit) -> ASGIApp:
        """Show the upstreams, now and in the last hour."""
        found = [self._upstream(state) for state in await self._services.upstreams_reader.upstreams()]
        values: dict[str, Any] = visit.values | {"upstreams": found}
        template = "admin_upstreams_live.html" if "table" in request.query_params else "admin_upstreams.html"
        return self._pages.render(template, values)

    def _upstream(self, state: UpstreamState) -> UpstreamView:
        samples, now = self._services.load_history.upstream(state.name), self._services.clock.now()
        return UpstreamView(
            state=state,
            notices=_notices(state),
            load=load_chart(samples, since=now - HISTORY_SECONDS, until=now),
            latency=latency_chart(samples, until=now),
        )

    async def open_project(self, request: Request, visit: AdminVisit) -> ASGIApp:
        """Open a project, and show one of its pages."""
        project_id = request.path_params["project_id"]
        for project in await self._services.store.projects():
            if project.id == project_id:
                await self._sessions.open_project(request, project)
                return see_other(own_path(visit.form.get("next", "")) or HOME)
        raise NotFound(f"Project {project_id} not found")

    async def close_project(self, request: Request, visit: AdminVisit) -> ASGIApp:
        """Close the project that is open."""
        await self._sessions.open_project(request, None)
        return see_other(ADMIN_HOME)


def _running(found: Sequence[tuple[Project, Batch]]) -> list[Batch]:
    return [batch for _, batch in found if batch.status is BatchStatus.IN_PROGRESS]


def _names(project: Project, text: str) -> bool:
    """Return whether a text is part of the name of a project or of its organization, or is the id of one."""
    wanted = text.lower()
    return (
        wanted in project.name.lower()
        or wanted in project.organization.lower()
        or text
        in {
            project.id,
            project.organization_id,
        }
    )


def _valid_keys(keys: Sequence[Key], *, now: float) -> Counter[str]:
    return Counter(
        key.project_id for key in keys if key.revoked_at is None and (key.expires_at is None or key.expires_at > now)
    )


def _page_number(request: Request) -> int:
    number = request.query_params.get("page", "")
    return max(1, int(number)) if number.isascii() and number.isdecimal() and len(number) <= _MAX_DIGITS else 1


def _notices(state: UpstreamState) -> list[str]:
    """Return why lines do not start at an upstream, in words."""
    pauses = [
        AnyWait(
            reason=WaitReason.UPSTREAM_PAUSED,
            upstream=pause.upstream,
            model=pause.model,
            detail=pause.detail,
            since=pause.since,
        )
        for pause in state.pauses
    ]
    holds = [AnyWait(reason=hold, upstream=state.name) for hold in state.holds]
    return [sentence(describe_wait(wait, moment=moment)) for wait in (*pauses, *holds)]
