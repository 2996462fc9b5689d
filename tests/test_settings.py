"""F2: flag over environment over TOML file over default."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from batchline.domain.models import Model
from batchline.domain.money import Price, Tariff
from batchline.settings import Settings


def read(**flags: Any) -> Settings:
    """As the command line does: text for every flag that was given."""
    return Settings(**flags)


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"BATCHLINE_{name.upper()}", raising=False)


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A settings file, named by the environment."""
    path = tmp_path / "batchline.toml"
    path.write_text("port = 8003\nmax_attempts = 9\n")
    monkeypatch.setenv("BATCHLINE_CONFIG", str(path))
    return path


@pytest.mark.rule("F2", "Flag over environment over file over default.")
@pytest.mark.usefixtures("toml")
def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F2, each step of the ladder by itself."""
    assert read().port == 8003
    assert read().host == "127.0.0.1"
    monkeypatch.setenv("BATCHLINE_PORT", "8002")
    assert read().port == 8002
    assert read(port=8001).port == 8001
    assert read().max_attempts == 9


def test_the_flag_config_beats_the_one_of_the_environment(toml: Path) -> None:
    """F2 holds for the file's own name too."""
    other = toml.with_name("other.toml")
    other.write_text("port = 8004\n")
    assert read(config=other).port == 8004


@pytest.mark.rule("B4", "Files expire 30 days after the upload.")
@pytest.mark.rule("E2", "They are never batchable.")
@pytest.mark.rule("F2", "The defaults are the contract's.")
def test_the_defaults_are_the_contracts() -> None:
    """B2, C14, D3 and F2 name these numbers."""
    settings = read()
    assert settings.port == 8000
    assert settings.max_file_bytes == 104_857_600
    assert settings.input_limits.max_bytes == 209_715_200
    assert settings.input_limits.max_lines == 50_000
    assert settings.input_limits.max_line_bytes == 1_048_576
    assert settings.input_limits.endpoints == ("/v1/chat/completions",)
    assert settings.completion_window_seconds == 86_400
    assert settings.file_retention_seconds == 2_592_000
    assert (settings.max_attempts, settings.max_throttles, settings.retry_base_seconds) == (4, 12, 1)
    assert (settings.request_timeout_seconds, settings.connect_timeout_seconds) == (600, 10)
    assert (settings.header_timeout_seconds, settings.body_timeout_seconds) == (15, 30)


@pytest.mark.rule("C14", "More endpoints can be allowed.")
def test_lists_are_written_with_commas_in_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """C14: more endpoints can be allowed by hand, with or without spaces."""
    expected = ("/v1/chat/completions", "/v1/embeddings")
    assert read(batch_endpoints="/v1/chat/completions,/v1/embeddings").batch_endpoints == expected
    monkeypatch.setenv("BATCHLINE_BATCH_ENDPOINTS", " /v1/chat/completions , /v1/embeddings,")
    assert read().batch_endpoints == expected


def test_lists_are_arrays_or_commas_in_the_file(toml: Path) -> None:
    toml.write_text('batch_endpoints = ["/v1/a", "/v1/b"]\ncors_origins = "https://a.example,https://b.example"\n')
    assert read().batch_endpoints == ("/v1/a", "/v1/b")
    assert read().cors_origins == ("https://a.example", "https://b.example")


def test_an_unknown_key_of_the_file_is_refused(toml: Path) -> None:
    """A misspelt setting must not silently leave the default in force."""
    toml.write_text("prot = 9000\n")
    with pytest.raises(ValidationError, match="prot"):
        read()


def test_secrets_do_not_show_in_the_settings_own_text() -> None:
    """The upstream's key and the administrator's token stay out of logs that print the settings."""
    settings = read(upstream_api_key="sk-hidden", admin_token="tok-hidden")
    assert "hidden" not in f"{settings!r} {settings}"


@pytest.mark.rule("A13", "It is on by default.")
@pytest.mark.rule("F2", "Metering is off by default.")
@pytest.mark.rule("F2", "The free credits are 5.")
def test_the_defaults_of_money_are_the_contracts() -> None:
    """F2, A13: nobody is metered unless somebody says so, and a key alone is enough."""
    settings = read()
    assert (settings.metering, settings.bearer) == (False, True)
    assert settings.free_credits == 5
    assert settings.tariff == Tariff(metered=False, batch_percent=50)


@pytest.mark.rule("E2", "The other routes are never batchable.")
@pytest.mark.parametrize("endpoint", ["/v1/responses", "/summary", "/usecase/classify/iab", "/gliner"])
def test_the_routes_of_synchronous_calls_cannot_be_used_in_batches(endpoint: str) -> None:
    """E2: whatever the operator sets."""
    with pytest.raises(ValidationError, match=f"{endpoint} cannot be used in batches"):
        read(batch_endpoints=f"/v1/embeddings,{endpoint}")


def test_without_models_any_id_goes_to_the_default_upstream() -> None:
    """F2."""
    settings = read(upstream_url="http://127.0.0.1:1/v1", upstream_api_key="sk")
    assert settings.catalog.takes_any
    assert set(settings.all_upstreams) == {"default"}
    key = settings.all_upstreams["default"].api_key
    assert key is not None
    assert key.get_secret_value() == "sk"


@pytest.mark.rule("F2", "A table of the file is a model.")
def test_a_table_of_the_file_is_a_model(toml: Path) -> None:
    """D6, D4: prices as they are written, to the nano-unit, whether they are numbers or text."""
    toml.write_text(
        """
        [upstreams.gpu]
        url = "http://127.0.0.1:1/v1"

        [models."small-1.5"]
        upstream = "gpu"
        name = "org/Small"
        input_price = 0.15
        cached_input_price = "0.000000001"
        output_price = 1
        max_tokens = 8000
        error_on_max_token = false
        projects = ["3c7a9d52-0000-4000-8000-000000000000"]
        paths = ["/gliner"]
        """
    )
    [model] = read().catalog.enabled("3c7a9d52-0000-4000-8000-000000000000")
    assert model == Model(
        id="small-1.5",
        upstreams=("gpu",),
        name="org/Small",
        price=Price(input=150_000_000, cached_input=1, output=1_000_000_000),
        max_tokens=8000,
        error_on_max_token=False,
        projects=frozenset({"3c7a9d52-0000-4000-8000-000000000000"}),
        paths=frozenset({"/gliner"}),
    )
    assert read().catalog.enabled("another") == []


def test_a_model_that_says_little_is_free_and_open_to_all(toml: Path) -> None:
    """Its cached input costs what its input costs, and its upstream knows it by its id."""
    toml.write_text('upstream_url = "http://127.0.0.1:1/v1"\n[models.small]\n[models.priced]\ninput_price = 2\n')
    small, priced = read().catalog.enabled("anybody")
    assert small == Model(id="small", upstreams=("default",), name="small", price=Price())
    assert priced.price == Price(input=2_000_000_000, cached_input=2_000_000_000)


def test_secrets_of_tables_do_not_show_in_the_settings_own_text(toml: Path) -> None:
    toml.write_text('[upstreams.gpu]\nurl = "http://127.0.0.1:1/v1"\napi_key = "sk-hidden"\n')
    settings = read()
    assert "gpu" in repr(settings)
    assert "hidden" not in f"{settings!r} {settings}"


@pytest.mark.rule("F2", "What cannot work is refused by name before anything starts.")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_endpoints", "foo"),
        ("batch_endpoints", "/v1/chat/completions,/v1/{x}"),
        ("shutdown_grace_seconds", "inf"),
        ("retry_base_seconds", "nan"),
        ("file_retention_seconds", "999999999999"),
        ("completion_window_seconds", "3153600001"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"BATCHLINE_{name.upper()}", value)
    with pytest.raises(ValidationError, match=name):
        read()
