"""Uses the console of a running service as a browser without scripts does."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import unescape
from typing import Any

import httpx

from tests.support.service import PATIENCE

_CSRF = re.compile(r'name="csrf" value="([0-9a-f]{64})"')
PAGES = (
    *("/console/batches", "/console/new", "/console/search", "/console/files", "/console/usage", "/console/keys"),
    "/console/webhooks",
)
"""Every page that names no batch."""
ADMIN_PAGES = ("/console/admin", "/console/admin/projects", "/console/admin/upstreams")


class Visitor:
    """A browser with its cookies. It follows no redirect by itself."""

    def __init__(self, client: httpx.Client) -> None:
        self.http = client

    @property
    def session(self) -> str:
        """The secret of the session; empty if nobody is signed in."""
        return next((secret for name, secret in self.http.cookies.items() if name.startswith("batchline_session")), "")

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def page(self, path: str) -> str:
        """Return the text of a page, which must exist."""
        answer = self.get(path)
        assert answer.status_code == 200, answer.text
        return answer.text

    def csrf(self, path: str = "/console/new") -> str:
        """Return the token of a form on a page."""
        found = _CSRF.search(self.page(path))
        assert found is not None
        return found[1]

    def post(self, path: str, form: Mapping[str, Any] | None = None, *, csrf: str | None = None) -> httpx.Response:
        """Send a form, with the token of this session unless another is given."""
        return self.http.post(path, data={**(form or {}), "csrf": self.csrf() if csrf is None else csrf})

    def open_project(self, name: str) -> None:
        """Open the project of a name, as the administrator."""
        page = self.page(f"/console/admin/projects?search={name}")
        paths = re.findall(
            r'action="(/console/admin/projects/[^"]+/open)".*?aria-label="Open the project ([^"]+)"', page
        )
        [path] = [path for path, found in paths if found == name]
        assert self.post(path, csrf=self.csrf("/console/admin")).headers["location"] == "/console/batches"

    def open_project_by_id(self, project_id: str) -> None:
        """Open a project by its id, as the administrator."""
        answer = self.post(f"/console/admin/projects/{project_id}/open", csrf=self.csrf("/console/admin"))
        assert answer.headers["location"] == "/console/batches"

    def sign_in(self, key: str, **form: str) -> httpx.Response:
        token = _CSRF.search(self.page("/console/sign-in"))
        assert token is not None
        return self.http.post("/console/sign-in", data={"key": key, "csrf": token[1], **form})


@contextmanager
def visitor(port: int, key: str | None = None) -> Iterator[Visitor]:
    """Open a browser, signed in with a key if one is given."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
        opened = Visitor(client)
        if key is not None:
            assert opened.sign_in(key).headers["location"] == "/console/batches"
        yield opened


def shown(page: str) -> str:
    """Return the text that a person reads on a page."""
    return unescape(re.sub(r"<[^>]*>", " ", page))
