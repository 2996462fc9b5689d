"""Where `batchline run` sends its batch (F4)."""

import click
import pytest

from batchline.cli.connection.target import ServerTarget, Target, WrongCredentials, target_for


def _target(base_url: str | None, **flags: str) -> Target:
    return target_for(base_url, flags, pause=lambda _: None, on_wait=lambda text, *, fraction=None: None)


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHLINE_API_KEY", " k ")
    monkeypatch.setenv("BATCHLINE_PROJECT_ID", "p")
    for name in ("BATCHLINE_BASE_URL", "OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("", "Neither BATCHLINE_API_KEY nor OPENAI_API_KEY is set"),
        ("a\nb", "BATCHLINE_API_KEY is not usable"),
        ("ö", "BATCHLINE_API_KEY is not usable"),
    ],
)
def test_missing_credentials_are_exit_code_4(monkeypatch: pytest.MonkeyPatch, value: str, text: str) -> None:
    monkeypatch.setenv("BATCHLINE_API_KEY", value)
    with pytest.raises(WrongCredentials, match=text) as wrong:
        _target("http://host")
    assert wrong.value.exit_code == 4


@pytest.mark.parametrize("name", ["BATCHLINE_BASE_URL", "OPENAI_BASE_URL"])
def test_the_advice_names_the_variable_that_names_the_server(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "http://host")
    advice = f"Is the server running, and is {name} right? Unset it to run without a server"
    assert _target(None).if_unreachable == advice
    assert "is --base-url right? Leave it out" in _target("http://other").if_unreachable


def test_the_advice_names_the_variable_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _target("http://host").if_denied.startswith("Set BATCHLINE_API_KEY to a key that")
    monkeypatch.delenv("BATCHLINE_API_KEY")
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    target = _target("http://host")
    assert target.if_denied.startswith("Set OPENAI_API_KEY to a key that")
    assert target.if_key_unknown.startswith("The server refuses the key in OPENAI_API_KEY ")
