"""The routes of the console."""

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from batchline.api.files import FileRoutes
from batchline.api.lists import Lists
from batchline.api.methods import Handler, Methods
from batchline.api.results import ResultRoutes
from batchline.api.services import ApiServices
from batchline.api.throttle import Throttle
from batchline.console.account import AccountPages
from batchline.console.admin import AdminPages
from batchline.console.batches import BatchPages
from batchline.console.guard import ADMIN_HOME, Guard
from batchline.console.lines import LinePages
from batchline.console.new_batch import NewBatchPages
from batchline.console.pages import Pages
from batchline.console.sessions import OneTimeLinks, SessionAuth, Sessions, Visit
from batchline.console.sign_in import HOME, SignInPages
from batchline.domain.errors import NotFound


def console_routes(services: ApiServices, links: OneTimeLinks | None = None) -> list[Route]:
    """Return the routes of the console; ``links`` are those that sign in without a key."""
    settings, pages = services.settings, Pages()
    sessions = Sessions(services, links=links)
    auth = SessionAuth(accounts=services.store, metered=settings.metering)
    guard = Guard(sessions=sessions, pages=pages, metrics=services.metrics)
    throttle = Throttle(settings.max_project_requests, of="uploads and creates", bound="project_requests")
    batches = BatchPages(services, pages=pages, sessions=sessions, auth=auth, throttle=throttle)
    new = NewBatchPages(
        services, pages=pages, batches=batches, sessions=sessions, throttle=throttle, metered=settings.metering
    )
    return [
        *_sign_in_routes(guard, SignInPages(sessions=sessions, pages=pages, on_refusal=guard.count_refusal), pages),
        *_batch_routes(guard, services, batches, new, pages, auth, throttle),
        *_account_routes(guard, services, pages, auth, throttle),
        *_admin_routes(guard, AdminPages(services, pages=pages, sessions=sessions)),
        Route("/console/{path:path}", Methods(GET=guard.page(_show_missing))),
    ]


def _sign_in_routes(guard: Guard, sign_in: SignInPages, pages: Pages) -> list[Route]:
    return [
        Route("/", Methods(GET=sign_in.home)),
        Route("/console", Methods(GET=sign_in.home)),
        Route("/console/sign-in", Methods(GET=sign_in.show, POST=sign_in.sign_in)),
        Route("/console/sign-out", Methods(POST=guard.action_of_anyone(sign_in.sign_out))),
        Route("/console/assets/{name}", Methods(GET=_assets(pages))),
    ]


async def _show_missing(request: Request, _visit: Visit) -> ASGIApp:
    """Show that a page does not exist, to a person who followed an old link or mistyped an address."""
    raise NotFound(f"There is no page {request.url.path}")


def _assets(pages: Pages) -> Handler:
    async def show(request: Request) -> ASGIApp:
        found = pages.asset(request.path_params["name"])
        if found is None:
            raise NotFound(f"Unknown route: {request.method} {request.url.path}")
        return found

    return show


def _batch_routes(
    guard: Guard,
    services: ApiServices,
    batches: BatchPages,
    new: NewBatchPages,
    pages: Pages,
    auth: SessionAuth,
    throttle: Throttle,
) -> list[Route]:
    limit = services.settings.max_project_requests
    lines = LinePages(services, pages=pages)
    results = ResultRoutes(
        auth=auth,
        throttle=Throttle(limit, of="reads of results", bound="project_result_reads"),
        reader=services.results,
        merger=services.merger,
        clock=services.clock,
    )
    one = "/console/batches/{batch_id}"
    create = guard.action(batches.create, page="/console/new")
    return [
        Route("/console/batches", Methods(GET=guard.page(batches.list), POST=create)),
        Route("/console/new", Methods(GET=guard.page(new.show), POST=guard.page(new.check))),
        Route("/console/search", Methods(GET=guard.page(lines.search))),
        Route("/console/demo", Methods(POST=guard.action(new.demo, page=HOME))),
        Route(one, Methods(GET=guard.page(batches.show))),
        Route(f"{one}/events", Methods(GET=guard.page(batches.events))),
        Route(f"{one}/lines", Methods(GET=guard.page(lines.list))),
        Route(f"{one}/lines/{{number}}", Methods(GET=guard.page(lines.show))),
        Route(f"{one}/merged", Methods(GET=guard.route(results.merged))),
        Route(f"{one}/cancel", Methods(POST=guard.action(batches.cancel, page=one))),
        Route(f"{one}/release", Methods(POST=guard.action(batches.release, page=one))),
        Route(f"{one}/rerun", Methods(POST=guard.action(batches.rerun, page=one))),
    ]


def _account_routes(
    guard: Guard, services: ApiServices, pages: Pages, auth: SessionAuth, throttle: Throttle
) -> list[Route]:
    lists = Lists(limit=services.settings.max_project_requests)
    files = FileRoutes(services, auth=auth, throttle=throttle, lists=lists)
    account = AccountPages(services, pages=pages, files=files)
    of_files, of_keys, of_webhooks = "/console/files", "/console/keys", "/console/webhooks"
    one_webhook = f"{of_webhooks}/{{webhook_id}}"
    create_webhook = guard.action(account.create_webhook, page=of_webhooks)
    delete_webhook = guard.action(account.delete_webhook, page=of_webhooks)
    resend = guard.action(account.resend, page=of_webhooks)
    return [
        Route(of_files, Methods(GET=guard.page(account.files))),
        Route(f"{of_files}/{{file_id}}/content", Methods(GET=guard.route(files.content))),
        Route(f"{of_files}/{{file_id}}/delete", Methods(POST=guard.action(account.delete_file, page=of_files))),
        Route("/console/usage", Methods(GET=guard.page(account.usage))),
        Route(of_keys, Methods(GET=guard.page(account.keys))),
        Route(f"{of_keys}/{{key_id}}", Methods(POST=guard.action(account.change_key, page=of_keys))),
        Route(f"{of_keys}/{{key_id}}/revoke", Methods(POST=guard.action(account.revoke_key, page=of_keys))),
        Route(of_webhooks, Methods(GET=guard.page(account.webhooks), POST=create_webhook)),
        Route(f"{one_webhook}/delete", Methods(POST=delete_webhook)),
        Route(f"{one_webhook}/deliveries/{{delivery_id}}/resend", Methods(POST=resend)),
    ]


def _admin_routes(guard: Guard, admin: AdminPages) -> list[Route]:
    return [
        Route(ADMIN_HOME, Methods(GET=guard.admin_page(admin.overview))),
        Route(f"{ADMIN_HOME}/projects", Methods(GET=guard.admin_page(admin.projects))),
        Route(f"{ADMIN_HOME}/upstreams", Methods(GET=guard.admin_page(admin.upstreams))),
        Route(f"{ADMIN_HOME}/projects/{{project_id}}/open", Methods(POST=guard.admin_action(admin.open_project))),
        Route(f"{ADMIN_HOME}/close", Methods(POST=guard.admin_action(admin.close_project))),
    ]
