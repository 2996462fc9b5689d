"""Where `batchline run` sends its batch (F4)."""

import click
import pytest

from batchline.cli.connection.target import ServerTarget, Target, WrongCredentials, target_for


def _target(base_url: str, **flags: str) -> Target:
    return target_for(base_url, flags, pause=lambda _: None, on_wait=lambda text, *, fraction=None: None)


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHLINE_API_KEY", " k ")
    monkeypatch.setenv("BATCHLINE_PROJECT_ID", "p")


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
def test_a_server_is_named_with_or_without_v1(tail: str) -> None:
    target = _target(f"http://host:8000/prefix{tail}")
    assert isinstance(target, ServerTarget)
    assert target.url() == target.name == "http://host:8000/prefix"
    assert target.credentials.headers == {"x-api-key": "k", "x-project-id": "p"}
    assert not target.may_be_starting
    assert target.closing_notice() is None


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "http://", "http://host:x", "http://host?a=1", "http://hö"])
def test_what_is_not_a_url_is_wrong_usage(url: str) -> None:
    with pytest.raises(click.UsageError, match="expected a URL such as"):
        _target(url)


def test_a_setting_of_the_service_does_not_go_with_a_server() -> None:
    with pytest.raises(click.UsageError, match="--metering"):
        _target("http://host", metering="on")


@pytest.mark.parametrize(("value", "text"), [("", "is not set"), ("a\nb", "is not usable"), ("ö", "is not usable")])
def test_missing_credentials_are_exit_code_4(monkeypatch: pytest.MonkeyPatch, value: str, text: str) -> None:
    monkeypatch.setenv("BATCHLINE_API_KEY", value)
    with pytest.raises(WrongCredentials, match=f"BATCHLINE_API_KEY {text}") as wrong:
        _target("http://host")
    assert wrong.value.exit_code == 4
