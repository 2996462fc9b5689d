"""The page at /docs: it works on a machine that reaches nothing but the service."""

import re
from pathlib import Path

import pytest

import batchline.api
from tests.support.api_server import Api

_FOLDER = Path(batchline.api.__file__).parent / "docs"
_ASSETS = sorted(path.name for path in _FOLDER.iterdir() if path.name != "docs.html")
_KINDS = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}


def test_the_page_is_served_to_anyone(api: Api) -> None:
    reply = api.call("GET", "/docs", anonymous=True)
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.body == (_FOLDER / "docs.html").read_bytes()


@pytest.mark.parametrize("name", _ASSETS)
def test_every_part_of_the_page_is_served_under_its_kind(api: Api, name: str) -> None:
    reply = api.call("GET", f"/docs/{name}", anonymous=True)
    assert reply.status == 200
    assert reply.headers["content-type"] == _KINDS[Path(name).suffix]
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.body == (_FOLDER / name).read_bytes()


def test_every_part_that_the_page_names_exists_and_every_part_is_named() -> None:
    texts = [path.read_text() for path in _FOLDER.iterdir()]
    assert sorted({name for text in texts for name in re.findall(r'"/docs/([\w.]+)"', text)}) == _ASSETS


@pytest.mark.parametrize("name", ["docs.html", *_ASSETS])
def test_nothing_is_loaded_from_elsewhere(name: str) -> None:
    text = (_FOLDER / name).read_text()
    assert not re.search(r"https?:|[\"'(]//|@import|\burl\(", text)


@pytest.mark.rule("B3", "No page may be harmed: /docs runs nothing but its own files.")
@pytest.mark.parametrize("path", ["/docs", "/docs/docs.js", "/openapi.json"])
def test_the_policy_allows_nothing_but_the_services_own_files(api: Api, path: str) -> None:
    """No part of an answer that is shown, a file's name for one, can become a script (B3)."""
    policy = api.call("GET", path, anonymous=True).headers["content-security-policy"]
    rules = dict(rule.split(None, 1) for rule in policy.split("; "))
    assert rules.pop("default-src") == "'self'"
    assert set(rules.values()) == {"'none'"}
    assert set(rules) == {"base-uri", "form-action", "frame-ancestors"}


def test_the_page_has_nothing_inline_that_the_policy_would_refuse() -> None:
    page = (_FOLDER / "docs.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page)


def test_scripts_make_text_and_never_markup() -> None:
    for path in _FOLDER.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(", path.read_text()
        )


def test_credentials_are_kept_for_the_tab_only() -> None:
    texts = "".join(path.read_text() for path in _FOLDER.glob("*.js"))
    assert "sessionStorage" in texts
    assert not re.search(r"localStorage|document\.cookie|indexedDB", texts)


@pytest.mark.parametrize("name", ["docs.html", "nothing.js", "..%2fdescription.py", "%2e%2e"])
def test_nothing_else_of_the_folder_is_served(api: Api, name: str) -> None:
    reply = api.call("GET", f"/docs/{name}", anonymous=True)
    assert reply.status == 404
    assert reply.error["code"] == "not_found"
