"""The upstreams that the settings name: D1, F5."""

import math

import pytest

from batchline.app.startup import StartupError
from batchline.app.upstreams import engine_queues_for, open_upstreams
from batchline.domain.held_bytes import HeldBytes
from batchline.settings import ModelSettings, Settings, UpstreamSettings
from batchline.upstream.embedded.download import ModelUnavailable
from batchline.upstream.http import HttpUpstream

pytestmark = pytest.mark.anyio


def _ignore(_name: str, _done: int, _total: int) -> None:
    pass


async def test_each_upstream_of_the_settings_is_opened_by_its_name() -> None:
    """D1: the default one and those with a name."""
    settings = Settings(
        upstream_url="http://127.0.0.1:1/v1", upstreams={"second": UpstreamSettings(url="http://127.0.0.1:2/v1")}
    )
    async with open_upstreams(settings, _ignore, held_bytes=HeldBytes(math.inf)) as upstreams:
        assert set(upstreams) == {"default", "second"}
        assert all(isinstance(upstream, HttpUpstream) for upstream in upstreams.values())


@pytest.mark.parametrize("fails", ["a later upstream", "what uses them"])
async def test_upstreams_are_closed_if_anything_after_them_fails(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F5: no process of an embedded model is left behind."""
    closed: list[str] = []

    async def close(upstream: HttpUpstream) -> None:
        closed.append("http")

    async def no_classifier(_progress: object) -> None:
        raise ModelUnavailable("no disk")

    monkeypatch.setattr(HttpUpstream, "close", close)
    monkeypatch.setattr("batchline.app.upstreams._classifier", no_classifier)
    models = {"labels": ModelSettings(upstream=("classifier",))} if fails == "a later upstream" else {}
    settings = Settings(upstream_url="http://127.0.0.1:1/v1", models=models)
    with pytest.raises(StartupError):
        async with open_upstreams(settings, _ignore, held_bytes=HeldBytes(math.inf)):
            raise StartupError("the database is away")
    assert closed == ["http"]


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
        async with open_upstreams(given, _ignore, held_bytes=HeldBytes(math.inf)):
            pass


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
