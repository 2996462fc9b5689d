"""The upstreams that the settings name: D1, F5."""

import math

import pytest

from batchline.app.startup import StartupError
from batchline.app.upstreams import engine_queues_for, open_upstreams
from batchline.domain.held_bytes import HeldBytes
from batchline.settings import ModelSettings, Settings, UpstreamSettings
from batchline.upstream.http import HttpUpstream

pytestmark = pytest.mark.anyio


def _ignore(_done: int, _total: int) -> None:
    pass


async def test_each_upstream_of_the_settings_is_opened_by_its_name() -> None:
    """D1: the default one and those with a name."""
    settings = Settings(
        upstream_url="http://127.0.0.1:1/v1", upstreams={"second": UpstreamSettings(url="http://127.0.0.1:2/v1")}
    )
    upstreams = await open_upstreams(settings, _ignore, held_bytes=HeldBytes(math.inf))
    assert set(upstreams) == {"default", "second"}
    for upstream in upstreams.values():
        assert isinstance(upstream, HttpUpstream)
        await upstream.close()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("BATCHLINE_UPSTREAM_URL", {"upstream_url": "http://127.0.0.1:1/v1"}),
        ("upstreams.second", {"upstreams": {"second": UpstreamSettings(url="http://127.0.0.1:1/v1")}}),
    ],
)
async def test_an_upstream_that_cannot_be_used_is_named_by_its_setting(
    name: str, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F5: the operator sees which setting to change."""

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("a header has a line break")

    monkeypatch.setattr("batchline.app.upstreams.HttpUpstream", refuse)
    given = Settings.model_validate({"upstream_url": "http://127.0.0.1:1/v1"} | settings)
    if name != "BATCHLINE_UPSTREAM_URL":
        given = given.model_copy(update={"upstream_url": None})
    with pytest.raises(StartupError, match=f"{name} cannot be used: a header has a line break"):
        await open_upstreams(given, _ignore, held_bytes=HeldBytes(math.inf))


def test_each_upstream_with_a_url_has_a_reader_of_its_engines_queue() -> None:
    """D9: but the embedded model and the classifier have none."""
    second = {"second": UpstreamSettings(url="http://127.0.0.1:2/v1")}
    classifier = {"labels": ModelSettings(upstream=("classifier",))}
    assert set(engine_queues_for(Settings(upstream_url="http://127.0.0.1:1/v1", upstreams=second))) == {
        *("default", "second")
    }
    assert set(engine_queues_for(Settings(upstreams=second, models=classifier))) == {"second"}
    assert engine_queues_for(Settings()) == {}


@pytest.mark.rule("D9", "The operator can turn off the reading of engines' queues.")
def test_no_engine_is_asked_for_its_queue_if_the_setting_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHLINE_UPSTREAM_METRICS", "off")
    assert engine_queues_for(Settings(upstream_url="http://127.0.0.1:1/v1")) == {}
