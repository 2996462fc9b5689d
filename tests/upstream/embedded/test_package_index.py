"""A wheel from a package index, without pip."""

from pathlib import Path

import pytest

from batchline.upstream.embedded.package_index import IndexUnavailable, download_wheel
from tests.support.package_index import serving

WHEEL = "tiny_weights-1.0-py3-none-any.whl"
LINKS = ["tiny_weights-0.9-py3-none-any.whl", "tiny_weights-1.0.tar.gz", WHEEL]

pytestmark = pytest.mark.anyio


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / WHEEL).write_bytes(b"wheel")
    return folder


@pytest.mark.parametrize("variable", ["UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"])
@pytest.mark.parametrize("html", [False, True])
async def test_the_wheel_of_the_version_is_found_in_either_form_of_the_page(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, html: bool
) -> None:
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    with serving(files, links=LINKS, html=html) as url:
        monkeypatch.setenv(variable, url)
        await download_wheel("tiny-weights", "1.0", tmp_path, max_bytes=5)
    assert (tmp_path / WHEEL).read_bytes() == b"wheel"


async def test_an_index_that_nobody_named_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(IndexUnavailable, match="none of UV_DEFAULT_INDEX, UV_INDEX_URL, PIP_INDEX_URL names"):
        await download_wheel("tiny-weights", "1.0", tmp_path, max_bytes=5)


async def test_a_wheel_that_is_missing_gone_or_too_large_is_refused(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(files, links=LINKS) as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        with pytest.raises(IndexUnavailable, match=r"has no wheel of tiny-weights 2\.0"):
            await download_wheel("tiny-weights", "2.0", tmp_path, max_bytes=5)
        with pytest.raises(IndexUnavailable, match="404"):
            await download_wheel("tiny-weights", "0.9", tmp_path, max_bytes=5)
        with pytest.raises(IndexUnavailable, match="larger than expected"):
            await download_wheel("tiny-weights", "1.0", tmp_path, max_bytes=4)
