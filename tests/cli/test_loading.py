"""The tables of the settings file: what is wrong in one is told with its place, the file's name and what was meant."""

from pathlib import Path

import click
import pytest

from batchline.cli.loading import RUN_VARIABLES, load_settings
from batchline.settings import Settings

_UPSTREAM = '[upstreams.here]\nurl = "http://127.0.0.1:1/v1"\n'


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"BATCHLINE_{name.upper()}", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "batchline.toml"


def _told(file: Path, text: str) -> list[str]:
    """What is told of a file with this text."""
    file.write_text(text)
    with pytest.raises(click.UsageError) as refused:
        load_settings(config=str(file))
    return refused.value.message.splitlines()


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        (
            "[models.small]\ninput_price = -1",
            "models.small.input_price",
            "the value must be at least 0. Expected: Price of a million input tokens, in units.",
        ),
        (
            "[models.small]\noutput_price = 0.0000000001",
            "models.small.output_price",
            "the highest number of decimals is 9. Expected: Price of a million output tokens, in units.",
        ),
        (
            '[models.small]\nkind = "chatty"',
            "models.small.kind",
            "the value must be 'chat' or 'classification'. "
            "Expected: chat, or classification if the answers are JSON documents.",
        ),
        (
            "[models.small]\nprojects = [7]",
            "models.small.projects.0",
            "the value is not a text. Expected: Ids of the projects that may use the model; if not set, all projects.",
        ),
        (
            '[upstreams.there]\napi_key = "sk"',
            "upstreams.there.url",
            "it is missing. Expected: Base URL of an OpenAI-compatible API, ending in /v1.",
        ),
        (
            "[models.small]\ninput_prise = 1",
            "models.small.input_prise",
            "there is no such setting; did you mean input_price?",
        ),
        (
            "[upstreams.there]\nuri = 1\nurl = 'http://h'",
            "upstreams.there.uri",
            "there is no such setting; did you mean url?",
        ),
        ("[models.small]\nzzz = 1", "models.small.zzz", "there is no such setting"),
        ("[modles.small]", "modles", "there is no such setting; did you mean models?"),
        (
            '[models."small-1.5"]\nmax_tokens = 0',
            'models."small-1.5".max_tokens',
            "the value must be greater than 0. Expected: Maximum number of input tokens.",
        ),
    ],
)
def test_a_fault_is_told_with_its_place_and_file(file: Path, text: str, place: str, reason: str) -> None:
    """F2: prices and upstreams are put right at the first try."""
    assert _told(file, text) == [f"{place} in {file}: {reason}"]


def test_a_setting_below_a_table_is_told_to_stand_above(file: Path) -> None:
    """TOML takes what follows a table's head as the table's own."""
    [told] = _told(file, f"{_UPSTREAM}[models.small]\nupstream = 'here'\nport = 9000\n")
    assert told.startswith(f"models.small.port in {file}: there is no such setting")
    assert told.endswith("settings of the service must be above the first table of the file")


def test_an_id_with_dots_is_told_to_stand_in_quotes(file: Path) -> None:
    """Most ids of models have dots, and TOML reads each as one more table."""
    [told] = _told(file, "[models.small-1.5]\ninput_price = 1\n")
    assert told.startswith(f"models.small-1.5 in {file}: there is no such setting")
    assert told.endswith('a name with dots must be in quotes, as in [models."small-1.5"]')


@pytest.mark.rule("F2", "A model whose upstream is not configured is refused with a message.")
def test_a_model_of_an_upstream_that_is_nowhere_is_told(file: Path) -> None:
    """Every table is right by itself, and they do not fit."""
    [told] = _told(file, _UPSTREAM + "[models.small]\nupstream = 'there'\n")
    assert told == f"models.small in {file}: there is no upstream there"


def test_the_default_upstream_is_no_table(file: Path) -> None:
    [told] = _told(file, "[upstreams.default]\nurl = 'http://127.0.0.1:1/v1'\n")
    assert told == f"upstreams.default in {file}: the default upstream is set with upstream_url"


def test_every_fault_of_every_table_is_told_at_once(file: Path) -> None:
    told = _told(file, "port = 99999\n[models.a]\nmax_tokens = 0\n[models.b]\nname = ''\n[upstreams.c]\n")
    places = [line.partition(" in ")[0] for line in told]
    assert sorted(places) == ["models.a.max_tokens", "models.b.name", "port", "upstreams.c.url"]


@pytest.mark.rule("F2", "A refused value is never repeated.")
@pytest.mark.parametrize(
    "text",
    [
        "[upstreams.there]\nurl = 'ftp://user:hush@host'",
        "[upstreams.there]\nurl = 'http://h'\napi_key = ['hush']",
        "[upstreams.there]\nurl = 'http://h'\nkey = 'hush'",
        "upstreams = 'hush'",
        "[models.small]\ninput_price = 'hush'",
    ],
)
def test_a_refused_value_is_never_repeated(file: Path, text: str) -> None:
    """It may be a secret, in its place or in a wrong one."""
    assert "hush" not in "\n".join(_told(file, text))


@pytest.mark.parametrize("name", ["BATCHLINE_MODELS", "batchline_upstreams"])
@pytest.mark.parametrize("value", ['{"small": {}}', "no JSON"])
def test_tables_are_not_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """One place for them, so that nobody has to find out which of two was used."""
    monkeypatch.setenv(name, value)
    with pytest.raises(click.UsageError) as refused:
        load_settings()
    table = name.lower().removeprefix("batchline_")
    assert refused.value.message == f"{name.upper()}: {table} are tables of the TOML file, not a variable"
    monkeypatch.setenv(name, "")
    assert load_settings().models == {}


def test_the_variables_of_run_are_known_to_the_service(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """F2, F4: a shell that is set up for runs also starts services, without a warning."""
    for name in RUN_VARIABLES:
        monkeypatch.setenv(name, "x")
    load_settings()
    assert capsys.readouterr().err == ""
    assert set(RUN_VARIABLES) == {"BATCHLINE_BASE_URL", "BATCHLINE_API_KEY", "BATCHLINE_PROJECT_ID"}
