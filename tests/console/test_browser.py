"""A real Chromium on the console: every page in light and dark, on a desktop and on a phone, checked by axe-core."""

import re
import shutil
from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.console.conftest import Console
from tests.console.test_pages import pages_of
from tests.support.service import chat_lines, submit

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--no-first-run", "--disable-dev-shm-usage"),
)
_DESKTOP, _PHONE, _WALL = (1280, 800), (360, 740), (2560, 1300)
_TIMEOUT_MILLISECONDS = 120_000
"""It only ends a hang: no test depends on its length."""

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
        self.page.fill("#key", console.key)
        self.page.press("#key", "Enter")
        self.page.wait_for_url("**/console/batches")

    def open(self, path: str) -> Page:
        self.page.goto(f"{self.base}{path}")
        return self.page

    def foreign_hosts(self) -> set[str]:
        return {url for url in self.requests if not url.startswith(self.base)}


def _window(chromium: Browser, console: Console, **options: object) -> Window:
    size = options.pop("size", _DESKTOP)
    assert isinstance(size, tuple)
    context = chromium.new_context(viewport={"width": size[0], "height": size[1]}, **options)  # type: ignore[arg-type]
    return Window(context, console)


@pytest.mark.rule("F7", "Pages ask no other host.")
@pytest.mark.parametrize("console", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("scheme", "size"), [("light", _DESKTOP), ("dark", _DESKTOP), ("light", _PHONE), ("dark", _PHONE), ("light", _WALL)]
)
def test_every_page_fits_is_accessible_and_asks_no_other_host(
    chromium: Browser, console: Console, scheme: str, size: tuple[int, int]
) -> None:
    window = _window(chromium, console, size=size, color_scheme=scheme)
    found = {}
    for path in [*pages_of(console)][:-1]:
        page = window.open(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0], path
        violations = Axe().run(page).response["violations"]
        if violations:
            found[path] = [(each["id"], [node["html"][:200] for node in each["nodes"]][:3]) for each in violations]
    assert found == {}
    assert window.foreign_hosts() == set()
    assert [text for text in window.messages if "username" not in text] == []
    window.page.context.close()


def test_a_batch_is_watched_to_its_end(console: Console, chromium: Browser) -> None:
    """Nobody reloads the page: the last event does."""
    window = _window(chromium, console)
    batch_id = submit(console.service.client(), chat_lines(["one", "[[delay=5]]"])).id
    page = window.open(f"/console/batches/{batch_id}")
    page.wait_for_selector("#live .badge.completed")
    page.wait_for_selector("text=Merged")
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
