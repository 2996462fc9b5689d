"""What a service says about itself."""

import pytest
from pydantic import SecretStr

from batchline import __version__
from batchline.service_description import describe, differing
from batchline.settings import ModelSettings, Settings, UpstreamSettings


def test_settings_that_were_given_are_compared_and_others_are_not() -> None:
    running = describe(Settings(upstream_url="http://a/v1", max_attempts=7))
    assert differing(Settings(), running) == []
    assert differing(Settings(upstream_url="http://a/v1", max_attempts=7), running) == []
    assert differing(Settings(upstream_url="http://b/v1", max_attempts=7), running) == ["upstream_url"]
    assert differing(Settings(request_timeout_seconds=600), running) == []
    assert differing(Settings(port=1, host="::1"), running) == []


def test_settings_of_the_environment_are_given_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHLINE_METERING", "on")
    assert differing(Settings(), describe(Settings(metering=False))) == ["metering"]


def test_a_service_that_says_nothing_has_none_of_the_settings() -> None:
    """It may be of an earlier version, so what it runs with is unknown."""
    assert differing(Settings(max_attempts=4), None) == ["max_attempts"]
    assert differing(Settings(), None) == []


def test_secrets_are_compared_but_not_written_down() -> None:
    tables = {"one": UpstreamSettings(url="http://u:hush@a/v1", headers={"x-secret": SecretStr("hush")})}
    running = describe(Settings(upstream_api_key=SecretStr("hush"), upstreams=tables))
    assert "hush" not in repr(running)
    assert differing(Settings(upstream_api_key=SecretStr("hush")), running) == []
    assert differing(Settings(upstream_api_key=SecretStr("other")), running) == ["upstream_api_key"]
    other = {"one": UpstreamSettings(url="http://u:hush@a/v1", headers={"x-secret": SecretStr("other")})}
    assert differing(Settings(upstreams=other), running) == ["upstreams"]


def test_the_toy_is_called_a_toy() -> None:
    description = describe(Settings())
    assert description.version == __version__
    [answer] = description.answers
    assert answer.startswith("embedded model SmolLM2-135M: a toy, for trying (answers to smollm2-135m-instruct, any; ")


def test_each_upstream_is_listed_with_its_url_and_models() -> None:
    settings = Settings(
        upstream_url="http://user:hush@a:1/v1?key=hush",
        upstreams={"big": UpstreamSettings(url="https://b/v1")},
        models={"small": ModelSettings(), "large": ModelSettings(upstream=("big",))},
    )
    assert describe(settings).answers == ["default http://a:1/v1 (small)", "big https://b/v1 (large)"]
    assert describe(Settings(upstream_url="http://a/v1")).answers == ["default http://a/v1 (every model id)"]


def test_the_embedded_model_answers_to_names_that_the_operator_maps() -> None:
    models = {"gpt-4o": ModelSettings(), "mine": ModelSettings(name="any"), "far": ModelSettings(upstream=("far",))}
    settings = Settings(models=models, upstreams={"far": UpstreamSettings(url="http://a/v1")})
    assert settings.embedded_names == ("smollm2-135m-instruct", "any", "gpt-4o")
