"""Downloads a wheel from a package index without pip, for environments that uv and others make without it.

A variable must name the index, as for uv or pip: ``UV_DEFAULT_INDEX``, ``UV_INDEX_URL`` or ``PIP_INDEX_URL``.
Pages of an index are JSON (PEP 691) or HTML (PEP 503). The caller checks the sha256 of what it takes from the wheel.
"""

import os
import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from httpx import AsyncClient, HTTPError, InvalidURL, Response
from msgspec import DecodeError, Struct
from msgspec.json import Decoder

_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPT = f"{_JSON}, application/vnd.pypi.simple.v1+html;q=0.5, text/html;q=0.1"
_TIMEOUT_SECONDS = 60.0
_LINK = re.compile(r"""<a\s[^>]*?href\s*=\s*["']([^"']+)["']""", re.IGNORECASE)


class IndexUnavailable(Exception):
    """The index cannot be reached, or does not have the wheel."""


class _File(Struct):
    url: str


class _Page(Struct):
    files: list[_File]


_pages = Decoder(_Page)


def named_index() -> str | None:
    """Return the URL of the package index that a variable names, or None."""
    return next((url for name in _VARIABLES if (url := os.environ.get(name))), None)


async def download_wheel(project: str, version: str, folder: Path, *, max_bytes: int) -> None:
    """Write the wheel of a project into a folder, under its own name. Raise IndexUnavailable."""
    index = named_index()
    if index is None:
        raise IndexUnavailable(
            f"neither pip nor uv is installed, and none of {', '.join(_VARIABLES)} names a package index"
        )
    try:
        async with AsyncClient(follow_redirects=True, timeout=_TIMEOUT_SECONDS) as web:
            page = await web.get(f"{index.rstrip('/')}/{project}/", headers={"accept": _ACCEPT})
            page.raise_for_status()
            await _save(web, _wheel_url(page, project, version), folder, max_bytes=max_bytes)
    except (HTTPError, InvalidURL, DecodeError) as error:
        raise IndexUnavailable(str(error) or type(error).__name__) from error


async def _save(web: AsyncClient, url: str, folder: Path, *, max_bytes: int) -> None:
    received = 0
    async with web.stream("GET", url) as answer:
        answer.raise_for_status()
        with (folder / _filename(url)).open("xb") as target:
            async for chunk in answer.aiter_bytes():
                received += len(chunk)
                if received > max_bytes:
                    raise IndexUnavailable(f"{_filename(url)} is larger than expected")
                target.write(chunk)


def _wheel_url(page: Response, project: str, version: str) -> str:
    prefix = f"{project.replace('-', '_')}-{version}-"
    for link in _links(page):
        if _filename(link).startswith(prefix) and link.partition("#")[0].endswith(".whl"):
            return urljoin(str(page.url), link.partition("#")[0])
    raise IndexUnavailable(f"{page.url.host} has no wheel of {project} {version}")


def _links(page: Response) -> list[str]:
    if page.headers.get("content-type", "").startswith(_JSON):
        return [file.url for file in _pages.decode(page.content).files]
    return [unescape(link) for link in _LINK.findall(page.text)]


def _filename(url: str) -> str:
    return unquote(urlsplit(url).path).rpartition("/")[2]
