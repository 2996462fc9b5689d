"""A real Chromium on the console: every page in light and dark, on a desktop and on a phone, checked by axe-core."""

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from openai import BadRequestError
from playwright.sync_api import Browser, BrowserContext, Page, Route, sync_playwright

from tests.console import test_pages
from tests.console.conftest import BROKEN, Console
from tests.console.test_pages import pages_of
from tests.support.console import ADMIN_PAGES
from tests.support.service import await_end, chat_lines, submit

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--no-first-run", "--disable-dev-shm-usage"),
)
_DESKTOP, _PHONE, _WALL = (1280, 800), (360, 740), (2560, 1300)
_LOOKS = (("light", _WALL), ("light", _DESKTOP), ("dark", _PHONE))
_TOO_WIDE = """[...document.querySelectorAll("body *")]
    .filter(each => !each.closest("nav") && each.getBoundingClientRect().right > innerWidth + 1)
    .map(each => each.outerHTML.slice(0, 200))"""
_AXE_SCRIPT: str = Axe().axe_script
_RUN_AXE = "axe.run({resultTypes: ['violations']}).then(results => results.violations)"
_TIMEOUT_MILLISECONDS = 120_000
"""It only ends a hang: no test depends on its length."""

_MARK_PAGE = "window.isTheSame = true"
"""A page that is loaded again has no such mark."""
_REFRESH_MILLISECONDS = 3000
"""The time between two updates of a list, as in ``console.js``: a test passes it on the clock of the page."""
_END_EVENT = "event: end\ndata: {}\n\n"
_WITHOUT_HAS = """
const find = Document.prototype.querySelectorAll;
Document.prototype.querySelectorAll = function (selector) {
    if (selector.includes(":has(")) throw new DOMException("unknown selector", "SyntaxError");
    return find.call(this, selector);
};"""
"""It makes the browser refuse a selector as those do that do not know it."""

hostile = test_pages.hostile

pytestmark = [
    pytest.mark.chromium,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]


@pytest.fixture(scope="module")
def chromium(console: Console) -> Iterator[Browser]:
    """Start one browser for all tests of a backend.

    It comes after the console, because no event loop can be started in this thread while it is open.
    """
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(_FLAGS))
        yield browser
        browser.close()


class Window:
    """A window of the browser that is signed in, and what it asked for."""

    def __init__(self, context: BrowserContext, console: Console) -> None:
        self.requests: list[str] = []
        self.messages: list[str] = []
        self.base = f"http://127.0.0.1:{console.port}"
        self.page: Page = context.new_page()
        self.page.set_default_timeout(_TIMEOUT_MILLISECONDS)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.goto(f"{self.base}/")

    def sign_in(self, key: str, *, to: str = "/console/batches") -> None:
        self.page.fill("#key", key)
        self.page.press("#key", "Enter")
        self.page.wait_for_url(f"**{to}")

    def open(self, path: str) -> Page:
        self.page.goto(f"{self.base}{path}")
        return self.page

    def foreign_hosts(self) -> set[str]:
        return {url for url in self.requests if not url.startswith(self.base)}


def _window(chromium: Browser, console: Console, *, is_signed_in: bool = True, **options: Any) -> Window:
    context = chromium.new_context(**options)
    window = Window(context, console)
    if is_signed_in:
        window.sign_in(console.key)
    return window


def _faults(page: Page) -> list[tuple[str, list[str]]]:
    """Return the widths that a page does not fit in, and what axe-core says about it in light and in dark."""
    faults = list[tuple[str, list[str]]]()
    for scheme, size in _LOOKS:
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.set_viewport_size({"width": size[0], "height": size[1]})
        if page.evaluate("document.documentElement.scrollWidth") > size[0]:
            faults.append((f"wider than {size[0]}", page.evaluate(_TOO_WIDE)))
        if size != _WALL:
            faults += [(each["id"], [node["html"][:200] for node in each["nodes"]][:3]) for each in _violations(page)]
    return faults


def _violations(page: Page) -> list[dict[str, Any]]:
    """Return the violations that axe-core finds. It is sent to a page once: each time takes as long as many rules."""
    if page.evaluate("!window.axe"):
        page.evaluate(_AXE_SCRIPT)
    found: list[dict[str, Any]] = page.evaluate(_RUN_AXE)
    return found


@pytest.mark.rule("F7", "Pages ask no other host.")
@pytest.mark.parametrize("console", ["sqlite"], indirect=True)
def test_every_page_fits_is_accessible_and_asks_no_other_host(chromium: Browser, console: Console) -> None:
    window = _window(chromium, console)
    found = {path: _faults(window.open(path)) for path in [*pages_of(console)][:-1]}
    assert {path: faults for path, faults in found.items() if faults} == {}
    assert window.foreign_hosts() == set()
    assert [text for text in window.messages if "username" not in text] == []
    window.page.context.close()


@pytest.mark.parametrize("console", ["sqlite"], indirect=True)
def test_on_a_phone_the_link_of_the_open_page_is_in_sight(chromium: Browser, console: Console) -> None:
    """The links at the top scroll sideways there."""
    window = _window(chromium, console)
    window.page.set_viewport_size({"width": _PHONE[0], "height": _PHONE[1]})
    page = window.open("/console/webhooks")
    right_end: float = page.evaluate("document.querySelector('nav [aria-current]').getBoundingClientRect().right")
    assert right_end <= _PHONE[0]
    window.page.context.close()


@pytest.mark.parametrize("console", ["sqlite"], indirect=True)
def test_the_pages_before_a_first_batch_and_those_of_errors_are_accessible(chromium: Browser, console: Console) -> None:
    """Sign-in, a refused sign-in, first run, the review of a file, the faults of one, and errors."""
    window = _window(chromium, console, is_signed_in=False)
    page, found = window.page, {}

    def look(name: str) -> None:
        if faults := _faults(page):
            found[name] = faults

    def check(name: str, data: bytes, **fields: str) -> None:
        window.open("/console/new")
        for field, text in fields.items():
            page.evaluate("document.getElementById('table').open = true")
            page.fill(f"#{field}", text)
        page.set_input_files("#file", {"name": name, "mimeType": "text/plain", "buffer": data})
        page.click("text=Check the file")

    look("sign-in")
    page.fill("#key", "bl-wrong")
    page.press("#key", "Enter")
    page.wait_for_selector(".notice.bad")
    look("refused")
    window.sign_in(console.newcomer["api_key"])
    page.wait_for_selector("text=Your first batch")
    look("first run")
    check("in.jsonl", b"not json\n")
    page.wait_for_selector("text=has faults")
    look("faults")
    check("rows.csv", b"word\none\ntwo\n", prompt="Say {word}", model="m")
    page.wait_for_selector("text=is valid")
    look("review")
    window.open("/console/batches/batch_x")
    look("error")
    page.click("text=Sign out")
    window.sign_in(console.stranger["api_key"])
    window.open("/console/webhooks")
    page.wait_for_selector("text=batch.completed")
    look("deliveries")
    assert found == {}
    assert window.foreign_hosts() == set()
    page.context.close()


@pytest.mark.parametrize("console", ["sqlite"], indirect=True)
def test_the_pages_of_the_administrator_fit_and_are_accessible(chromium: Browser, console: Console) -> None:
    batch_id = submit(console.service.client(), chat_lines(["[[hang]]"])).id
    window = _window(chromium, console, is_signed_in=False)
    window.sign_in(console.admin_token, to="/console/admin")
    found = {path: _faults(window.open(path)) for path in ADMIN_PAGES}
    assert {path: faults for path, faults in found.items() if faults} == {}
    page = window.open("/console/admin")
    page.click(f"#row-{batch_id} .row-link")
    page.wait_for_url(f"**/console/batches/{batch_id}")
    assert _faults(page) == []
    assert window.foreign_hosts() == set()
    assert [text for text in window.messages if "username" not in text] == []
    console.service.client().batches.cancel(batch_id)
    page.context.close()


def test_the_columns_of_a_table_are_shown_before_it_is_sent(chromium: Browser, console: Console) -> None:
    window = _window(chromium, console)
    page = window.open("/console/new")
    data = b'\xef\xbb\xbfname,"<b>age"\nx,1\n'
    page.set_input_files("#file", {"name": "rows.csv", "mimeType": "text/csv", "buffer": data})
    page.wait_for_selector("#columns:not([hidden])")
    assert page.inner_text("#columns") == "Columns: {name} {<b>age}"
    assert page.is_visible("#prompt")
    page.context.close()


def test_a_batch_is_watched_to_its_end(console: Console, chromium: Browser) -> None:
    """The page is not loaded again."""
    window = _window(chromium, console)
    batch_id = submit(console.service.client(), chat_lines(["one", "[[delay=5]]"])).id
    page = window.open(f"/console/batches/{batch_id}")
    page.evaluate(_MARK_PAGE)
    page.wait_for_selector("#live .badge.completed")
    page.wait_for_selector("#files >> text=Merged")
    assert page.evaluate("window.isTheSame") is True
    assert "completed" in page.inner_text("#timeline")
    assert "2 of 2 lines" in page.inner_text("#live")
    assert window.foreign_hosts() == set()
    page.context.close()


def test_a_batch_is_cancelled_after_a_question(chromium: Browser, console: Console) -> None:
    window = _window(chromium, console)
    batch_id = submit(console.service.client(), chat_lines(["[[hang]]"])).id
    page = window.open(f"/console/batches/{batch_id}")
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.click("text=Cancel")
    assert page.locator("#live .badge.in_progress").count() == 1
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("text=Cancel")
    page.wait_for_selector("#live .badge.cancelling")
    page.context.close()


def test_the_keyboard_is_enough(chromium: Browser, console: Console) -> None:
    window = _window(chromium, console)
    page = window.open("/console/batches")
    page.keyboard.press("/")
    page.keyboard.type(console.batch_id)
    page.keyboard.press("Enter")
    page.wait_for_url("**search=**")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/console/batches/{console.batch_id}")
    page.keyboard.press("?")
    assert page.is_visible("#help")
    page.keyboard.press("Escape")
    assert not page.is_visible("#help")
    page.context.close()


@pytest.mark.parametrize("console", ["sqlite"], indirect=True)
def test_what_changes_with_the_status_is_live_and_the_focus_and_selection_stay(
    chromium: Browser, console: Console
) -> None:
    """A batch that is held while somebody looks at it can be released, and that is said to a screen reader once."""
    client = console.service.client()
    file = client.files.create(file=chat_lines([BROKEN] * 100), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "batchline": {"hold": True}}
    made: dict[str, Any] = client.post("/batches", body=body, cast_to=dict[str, Any])
    window = _window(chromium, console)
    page = window.page
    page.route("**/events", lambda route: route.abort())
    window.open(f"/console/batches/{made['id']}")
    page.wait_for_selector("[data-note]:visible")
    page.evaluate("document.querySelector('#actions').replaceChildren()")
    page.evaluate("document.querySelector('[data-shape]').dataset.shape = 'validating'")
    page.evaluate("document.querySelector('[data-shape]').dataset.status = 'validating'")
    page.focus("summary >> text=Use it from a program")
    page.evaluate("getSelection().selectAllChildren(document.querySelector('h1'))")
    page.unroute("**/events")
    page.wait_for_selector("#actions >> text=Release")
    page.wait_for_selector("[data-note]:visible", state="detached")
    assert page.inner_text("[data-said]").startswith("The batch is now")
    assert "Use it from a program" in page.evaluate("document.activeElement.textContent")
    assert page.evaluate("getSelection().toString()") == made["id"]
    page.click("#actions >> text=Release")
    page.wait_for_selector("#live .badge.completed")
    page.context.close()


def _named(console: Console, name: str, prompt: str) -> str:
    """Create a batch of one line, and return its id."""
    client = console.service.client()
    file = client.files.create(file=chat_lines([prompt]), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"name": name}
    ).id


def _send_events(page: Page, events: str) -> None:
    """Answer the requests for live events with these, in place of the service."""
    page.route("**/events", lambda route: route.fulfill(content_type="text/event-stream", body=events))


def _show_as(page: Page, path: str, html: str) -> None:
    """Answer a script that gets a page again with another text. The page itself is loaded as it is."""

    def answer(route: Route) -> None:
        if route.request.resource_type == "fetch":
            route.fulfill(content_type="text/html", body=html)
        else:
            route.continue_()

    page.route(f"**{path}", answer)


@pytest.mark.parametrize("console", ["sqlite"], indirect=True)
def test_a_page_shows_the_faults_of_a_batch_that_failed_and_follows_it_no_more(
    chromium: Browser, console: Console
) -> None:
    """The part of the page with the progress is gone then."""
    client = console.service.client()
    with pytest.raises(BadRequestError) as refused:
        submit(client, b"not json\n")
    faulty_id = refused.value.response.headers["x-batch-id"]
    batch_id = submit(client, chat_lines(["[[hang]]"])).id
    window = _window(chromium, console)
    page = window.page
    page.clock.install()
    _send_events(page, _END_EVENT)
    _show_as(page, f"/batches/{batch_id}", page.request.get(f"{window.base}/console/batches/{faulty_id}").text())
    window.open(f"/console/batches/{batch_id}")
    page.wait_for_selector("text=The input file has faults")
    page.clock.fast_forward(60_000)
    with page.expect_request("**/icon.svg"):
        page.evaluate("fetch('/console/assets/icon.svg')")
    assert len([url for url in window.requests if url.endswith("/events")]) == 1
    assert page.locator("#live, [data-pause]").count() == 0
    assert page.inner_text("#state .quiet") == "1 fault. Nothing ran. Correct these lines and create the batch again."
    client.batches.cancel(batch_id)
    page.context.close()


@pytest.mark.parametrize("console", ["sqlite"], indirect=True)
def test_the_focus_on_a_button_never_moves_to_one_that_does_something_else(chromium: Browser, console: Console) -> None:
    """A person who presses Enter on "Cancel" is asked first, and for a rerun nobody is."""
    batch_id = submit(console.service.client(), chat_lines(["[[hang]]"])).id
    window = _window(chromium, console)
    page = window.page
    ended = page.request.get(f"{window.base}/console/batches?table&search={console.batch_id}").text()
    page.clock.install()
    page.route("**table=**", lambda route: route.fulfill(body=ended.replace(console.batch_id, batch_id)))
    window.open(f"/console/batches?search={batch_id}")
    page.focus(f"#row-{batch_id} >> text=Cancel")
    page.clock.fast_forward(_REFRESH_MILLISECONDS)
    page.wait_for_selector(f"#row-{batch_id} >> text=Rerun failed")
    assert page.evaluate("document.activeElement.closest('form')") is None
    assert page.get_attribute(f"#row-{batch_id} form", "data-confirm") is None
    console.service.client().batches.cancel(batch_id)
    page.context.close()


@pytest.mark.rule("F7", "A form that is sent twice makes one batch.")
@pytest.mark.parametrize("console", ["sqlite"], indirect=True)
def test_a_form_of_a_live_list_stays_the_same_until_the_page_is_shown_again(
    chromium: Browser, console: Console
) -> None:
    """The service knows by its field ``once`` that a form is sent twice, for example before and after an update."""
    client = console.service.client()
    await_end(client, _named(console, "of a live list", BROKEN))
    running = _named(console, "of a live list", "[[hang]]")
    window = _window(chromium, console)
    page = window.page

    def answer(route: Route) -> None:
        now = route.fetch()
        route.fulfill(response=now, body=now.text().replace("newest first", "read again"))

    page.clock.install()
    page.route("**table=**", answer)
    window.open("/console/batches?search=of+a+live+list")
    once = page.input_value("[name=once]")
    page.clock.fast_forward(_REFRESH_MILLISECONDS)
    page.wait_for_selector("caption >> text=read again")
    assert page.input_value("[name=once]") == once
    with page.expect_navigation():
        page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")
    assert page.input_value("[name=once]") != once
    client.batches.cancel(running)
    page.context.close()


@pytest.mark.rule("F7", "A form does nothing in another project than that of its page.")
@pytest.mark.parametrize("console", ["sqlite"], indirect=True)
def test_a_live_list_shows_no_rows_of_another_project_below_the_name_of_its_own(
    chromium: Browser, console: Console
) -> None:
    """The administrator opens another project in a second tab. Then the list is loaded again as a whole."""
    batch_id = submit(console.service.client(), chat_lines(["[[hang]]"])).id
    window = _window(chromium, console, is_signed_in=False)
    window.sign_in(console.admin_token, to="/console/admin")
    page = window.page
    page.click(f"#row-{batch_id} .row-link")
    page.wait_for_url(f"**/console/batches/{batch_id}")
    page.clock.install()
    window.open("/console/batches")
    own = page.inner_text(".project")
    other = page.context.new_page()
    other.goto(f"{window.base}/console/admin/projects?search=stranger")
    other.click("[aria-label='Open the project stranger']")
    other.wait_for_url("**/console/batches")
    page.evaluate(_MARK_PAGE)
    with page.expect_response("**table=**"):
        page.clock.fast_forward(_REFRESH_MILLISECONDS)
    page.wait_for_function(f"!document.getElementById('row-{batch_id}')")
    assert "stranger" in page.inner_text(".project")
    assert own != page.inner_text(".project")
    assert page.evaluate("window.isTheSame") is None
    console.service.client().batches.cancel(batch_id)
    page.context.close()


@pytest.mark.parametrize("console", ["sqlite"], indirect=True)
def test_the_end_of_a_batch_is_said_although_its_progress_goes(chromium: Browser, console: Console) -> None:
    batch_id = submit(console.service.client(), chat_lines(["[[hang]]"])).id
    window = _window(chromium, console)
    page = window.page
    live = 'event: live\ndata: "<div data-shape=completed data-status=completed></div>"\n\n'
    _send_events(page, live + _END_EVENT)
    _show_as(page, f"/batches/{batch_id}", page.request.get(f"{window.base}/console/batches/{console.batch_id}").text())
    window.open(f"/console/batches/{batch_id}")
    page.wait_for_selector("#files >> text=Merged")
    page.wait_for_selector("[data-pause]", state="detached")
    assert page.locator("[data-said]").all_inner_texts() == ["The batch is now completed."]
    console.service.client().batches.cancel(batch_id)
    page.context.close()


@pytest.mark.parametrize("console", ["sqlite"], indirect=True)
def test_a_browser_that_does_not_know_the_selector_has_runs_the_script(chromium: Browser, console: Console) -> None:
    """Firefox knows it since 121."""
    batch_id = submit(console.service.client(), chat_lines(["[[hang]]"])).id
    window = _window(chromium, console)
    page = window.page
    page.add_init_script(_WITHOUT_HAS)
    page.clock.install()
    window.open(f"/console/batches?search={batch_id}")
    assert page.is_visible("[data-pause]")
    with page.expect_request("**table=**"):
        page.clock.fast_forward(_REFRESH_MILLISECONDS)
    page.keyboard.press("?")
    assert page.is_visible("#help")
    console.service.client().batches.cancel(batch_id)
    page.context.close()


@pytest.mark.parametrize("console", ["sqlite"], indirect=True)
def test_updates_and_single_keys_can_be_turned_off_for_good(chromium: Browser, console: Console) -> None:
    """WCAG 2.2.2 and 2.1.4."""
    client = console.service.client()
    batch_id = submit(client, chat_lines(["[[hang]]"])).id
    window = _window(chromium, console)
    page = window.open(f"/console/batches/{batch_id}")
    page.click("text=Pause updates")
    page.click("[data-keys]")
    page.uncheck("[data-single-keys]")
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert not page.is_visible("#help")
    window.requests.clear()
    page.reload()
    page.wait_for_selector("text=Resume updates")
    page.keyboard.press("?")
    assert not page.is_visible("#help")
    assert [url for url in window.requests if url.endswith("/events")] == []
    with page.expect_request("**/events"):
        page.click("text=Resume updates")
    client.batches.cancel(batch_id)
    page.context.close()


@pytest.mark.parametrize("console", ["sqlite"], indirect=True)
def test_a_page_that_nobody_sees_holds_no_connection(chromium: Browser, console: Console) -> None:
    client = console.service.client()
    batch_id = submit(client, chat_lines(["[[hang]]"])).id
    window = _window(chromium, console)
    page = window.page
    ended = list[str]()
    page.on("requestfailed", lambda request: ended.append(request.url))
    with page.expect_request("**/events"):
        window.open(f"/console/batches/{batch_id}")
    hide = "Object.defineProperty(document, 'hidden', {{value: {}, configurable: true}})"
    with page.expect_event("requestfailed"):
        page.evaluate(f"{hide.format('true')}; document.dispatchEvent(new Event('visibilitychange'))")
    assert ended[-1].endswith("/events")
    with page.expect_request("**/events"):
        page.evaluate(f"{hide.format('false')}; document.dispatchEvent(new Event('visibilitychange'))")
    client.batches.cancel(batch_id)
    page.context.close()


@pytest.mark.parametrize("console", ["sqlite"], indirect=True)
def test_without_a_clipboard_the_text_is_copied_in_another_way(chromium: Browser, console: Console) -> None:
    """A browser has none on an address that is neither https nor its own machine."""
    window = _window(chromium, console)
    window.page.add_init_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page = window.open("/console/keys")
    page.click("text=Copy")
    page.wait_for_selector("text=Copied")
    assert page.evaluate("getSelection().toString()").startswith("batchline keys create")
    page.context.close()


@pytest.mark.rule("F7", "Text of others does nothing.")
def test_hostile_text_does_nothing_in_a_browser_and_fits_a_phone(
    chromium: Browser, console: Console, hostile: str
) -> None:
    window = _window(chromium, console)
    page, one = window.page, f"/console/batches/{hostile}"
    dialogs = list[str]()
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    page.set_viewport_size({"width": _PHONE[0], "height": _PHONE[1]})
    for path in ("/console/batches", one, f"{one}/lines", *(f"{one}/lines/{n}" for n in (1, 2, 3)), "/console/files"):
        window.open(path)
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") <= _PHONE[0], (path, page.evaluate(_TOO_WIDE))
        assert page.locator("main script, main img").count() == 0
    assert dialogs == []
    assert window.foreign_hosts() == set()
    assert [text for text in window.messages if "username" not in text] == []
    page.context.close()


@pytest.mark.rule("F7", "What another project has does not exist.")
def test_ids_of_another_project_lead_nowhere_in_a_browser(chromium: Browser, console: Console) -> None:
    window = _window(chromium, console, is_signed_in=False)
    window.sign_in(console.stranger["api_key"])
    for suffix in ("", "/lines", "/lines/1"):
        page = window.open(f"/console/batches/{console.batch_id}{suffix}")
        assert page.inner_text("h1") == "Not found"
    page = window.open(f"/console/batches?search={console.batch_id}")
    assert page.locator(".row-link").count() == 0
    page.context.close()


@pytest.mark.parametrize("console", ["sqlite"], indirect=True)
def test_a_form_is_filled_and_sent_with_the_keyboard_alone(chromium: Browser, console: Console) -> None:
    window = _window(chromium, console)
    page = window.open(f"/console/batches/{console.batch_id}")
    page.focus("#rerun summary")
    page.keyboard.press("Enter")
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "name":
            break
    page.keyboard.type("by keyboard")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Create the batch"
    page.keyboard.press("Enter")
    page.wait_for_url(lambda url: console.batch_id not in url)
    assert page.inner_text("h1") == "by keyboard"
    await_end(console.service.client(), page.url.rpartition("/")[2])
    page.context.close()


@pytest.mark.rule("F7", "Pages can be read, and their forms sent, without scripts.")
def test_without_scripts_everything_can_be_read_and_sent(chromium: Browser, console: Console) -> None:
    window = _window(chromium, console, java_script_enabled=False)
    page = window.open(f"/console/batches/{console.batch_id}")
    assert "62 of 62 lines" in page.inner_text("main")
    page.click("text=Lines")
    page.select_option("select[name=status]", "failed")
    page.click("text=Filter")
    assert page.locator("tbody tr").count() == 2
    page.click("tbody tr:first-child a")
    assert "invalid_request_error" in page.inner_text("main")
    page.click("text=Sign out")
    assert re.search(r"/console/sign-in$", page.url)
    page.context.close()
