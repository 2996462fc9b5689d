"""The wheel and the source archive: built twice with the same bytes, and installed with all they need."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from batchline import __version__

_ROOT = Path(__file__).parents[2]


def _run(*command: str | Path, cwd: Path, **environment: str) -> str:
    ran = subprocess.run(
        [sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=False, env=os.environ | environment
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def _build(source: Path, folder: Path) -> tuple[Path, Path]:
    """Return the wheel and the source archive of a source tree."""
    _run("-m", "hatchling", "build", "--directory", folder, cwd=source)
    [wheel], [sdist] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def test_two_builds_have_the_same_bytes_and_the_archive_builds_the_same_wheel(tmp_path: Path) -> None:
    first, second = (_build(_ROOT, tmp_path / name) for name in ("first", "second"))
    for one, other in zip(first, second, strict=True):
        assert one.name == other.name
        assert one.read_bytes() == other.read_bytes()
    with tarfile.open(first[1]) as archive:
        # The filter came with 3.11.4, and later versions warn if there is none.
        safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path / "unpacked", **safely)
    [source] = (tmp_path / "unpacked").iterdir()
    assert not (source / "tests").exists()
    assert _build(source, tmp_path / "third")[0].read_bytes() == first[0].read_bytes()


def test_an_installed_wheel_has_every_file_and_runs_a_batch(tmp_path: Path) -> None:
    """F1: outside of the source tree, with the files beside the code: SQL, migrations, pages."""
    wheel, _ = _build(_ROOT, tmp_path / "dist")
    data = {path for path in (_ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    with ZipFile(wheel) as archive:
        assert {str(path.relative_to(_ROOT / "src")) for path in data} <= set(archive.namelist())
    target = tmp_path / "site"
    _run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel, cwd=tmp_path)
    site = {"PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": ""}
    where = _run("-c", "import batchline; print(batchline.__file__)", cwd=tmp_path, **site)
    assert where.startswith(str(target))
    assert _run("-m", "batchline", "--version", cwd=tmp_path, **site).strip().endswith(__version__)
    assert "api_key" in _run("-m", "batchline", "keys", "create", "--json", cwd=tmp_path, **site)
