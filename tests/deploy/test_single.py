"""One machine: the compose file with one service, and the systemd unit. That docker starts it is not shown here."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from batchline.settings import Settings
from tests.support.deploy_files import ENV, IMAGE, ROOT, VARIABLES, load, settings_of

_GRACE: float = Settings.model_fields["shutdown_grace_seconds"].default
_UNIT = ROOT / "deploy" / "systemd" / "batchline.service"


def test_one_container_serves_on_loopback_and_keeps_its_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    compose = load(ROOT / "compose.single.yaml")
    [service] = compose["services"].values()
    assert service["image"] == IMAGE
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    assert service["volumes"] == [f"{next(iter(compose['volumes']))}:{ENV['BATCHLINE_DATA_DIR']}"]
    assert service["read_only"] is True
    assert int(service["stop_grace_period"].removesuffix("s")) > _GRACE
    environment = {name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) for name, value in service["environment"].items()}
    assert set(environment) <= VARIABLES
    assert settings_of(monkeypatch, ENV, environment).embeds_model


def _unit() -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(_UNIT)
    return parser["Service"]


def test_the_unit_runs_the_service_in_the_folders_that_systemd_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = _unit()
    assert unit["ExecStart"].endswith("/bin/batchline serve")
    environment = dict(pair.split("=") for pair in unit["Environment"].split())
    assert environment.keys() - {"XDG_CACHE_HOME"} <= VARIABLES
    settings = settings_of(monkeypatch, {k: v for k, v in environment.items() if k in VARIABLES})
    assert str(settings.data_dir).startswith(f"/var/lib/{unit['StateDirectory']}/")
    assert environment["XDG_CACHE_HOME"] == f"/var/cache/{unit['CacheDirectory']}"
    assert int(unit["TimeoutStopSec"]) > _GRACE


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / _UNIT.name
    copy.write_text(_UNIT.read_text().replace("/opt/batchline/bin/batchline", "/bin/true"))
    ran = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
