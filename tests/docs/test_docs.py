"""The documents name only what exists, and they name every setting."""

import re
import shlex
from pathlib import Path

import click
import pytest

from batchline import __version__
from batchline.cli import main
from batchline.cli.loading import RUN_VARIABLES, load_settings
from batchline.cli.options import FLAGS, TABLES, default_text, flag, variable
from batchline.domain.money import units
from batchline.domain.usage import Usage
from batchline.settings import Settings

_ROOT = Path(__file__).parents[2]
_README = (_ROOT / "README.md").read_text()
_CONTRIBUTING = (_ROOT / "CONTRIBUTING.md").read_text()
_SETTINGS = (_ROOT / "docs" / "settings.md").read_text()
_PAGES = sorted(f"docs/{page.name}" for page in (_ROOT / "docs").glob("*.md"))
_TARGETS = set(re.findall(r"^([a-z-]+):", (_ROOT / "Makefile").read_text(), re.MULTILINE))
_VERBS = "|".join(main.list_commands(click.Context(main)))


def _commands(text: str) -> list[list[str]]:
    """Return every call of batchline that a document shows, without pipes and redirections."""
    shown = re.findall(rf"(?:^|[\s(`])(?:\.venv/bin/)?batchline ((?:{_VERBS})\b[^`\n|&)>]*)", text, re.MULTILINE)
    return [shlex.split(line.replace("\\", " "), comments=True) for line in shown]


def _rows_below(text: str) -> list[str]:
    """Return the rows of the first table of docs/settings.md after this text."""
    table = re.search(r"(?:^\|.*\n)+", _SETTINGS[_SETTINGS.index(text) :], re.MULTILINE)
    assert table is not None
    return table[0].splitlines()[2:]


def test_every_setting_has_its_row_and_every_row_its_setting() -> None:
    """F2: docs/settings.md lists every setting, in the order of the code."""
    assert _rows_below("## Flags and variables") == [
        f"| `{name}` | `{flag(name)}` | `{variable(name)}` | `{default_text(field)}` | {field.description} |"
        for name, field in FLAGS.items()
    ]


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("upstreams", "`[upstreams.NAME]`"),
        ("models", "`[models.ID]`"),
        ("projects", "`[projects.ID]`"),
        ("organizations", "`[organizations.ID]`"),
    ],
)
def test_every_field_of_a_table_has_its_row_and_every_row_its_field(table: str, text: str) -> None:
    """F2, for settings that only the TOML file can hold."""
    assert _rows_below(text) == [
        f"| `{name}` | `{default_text(field)}` | {field.description} |"
        for name, field in TABLES[table].model_fields.items()
    ]


def test_the_example_of_a_price_is_right(tmp_path: Path) -> None:
    """D4: the cost in the document is the cost that is charged."""
    [example] = re.findall(r"```toml\n(metering.*?)```", _SETTINGS, re.DOTALL)
    stated = re.search(r"costs half of .*: (\S+) units", _SETTINGS)
    assert stated is not None
    path = tmp_path / "batchline.toml"
    path.write_text(example)
    settings = load_settings(config=str(path))
    model = settings.models["small-1.5"].model("small-1.5")
    usage = Usage(input_tokens=1000, cached_tokens=600, output_tokens=200)
    assert units(settings.tariff.cost(model.price, usage, synchronous=False)) == stated[1]


def test_the_commands_of_the_settings_page_exist_with_their_flags() -> None:
    """F3: the commands that set and show money."""
    commands = _commands(_SETTINGS)
    assert {command[0] for command in commands} >= {"keys", "orgs", "projects", "usage"}
    for command in commands:
        _parse(main, command)


@pytest.mark.parametrize("document", [_README, _CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_every_make_target_that_is_shown_exists(document: str) -> None:
    shown = set(re.findall(r"(?:^|`)make ([a-z-]+)", document, re.MULTILINE))
    assert shown
    assert shown <= _TARGETS


def test_the_readme_shows_each_command_and_they_exist_with_their_flags() -> None:
    """F1, F3: no command of the README ends in a usage error."""
    commands = _commands(_README)
    assert {command[0] for command in commands} == {
        *("api", "keys", "migrate", "mock", "run", "serve", "worker"),
    }
    for command in commands:
        _parse(main, command)


def _parse(command: click.Command, arguments: list[str]) -> None:
    """Parse the arguments as click does, without running the command."""
    context = command.make_context("batchline", list(arguments))
    if isinstance(command, click.Group):
        name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert name is not None, arguments
        assert found is not None, arguments
        _parse(found, rest)


def test_the_readme_names_only_settings_that_exist() -> None:
    named = set(re.findall(r"BATCHLINE_[A-Z_]+", _README))
    assert named <= {variable(name) for name in Settings.model_fields} | set(RUN_VARIABLES)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *_PAGES])
def test_every_link_and_path_of_a_document_leads_somewhere(name: str) -> None:
    document = _ROOT / name
    text = document.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    paths = re.findall(r"`((?:src|tests|docs)/[\w./-]+)`", text)
    missing = [link for link in links if not (document.parent / link).exists()]
    missing += [path for path in paths if not (_ROOT / path).exists()]
    assert missing == []


def test_the_glossary_is_sorted_and_its_names_are_in_the_files_beside_them() -> None:
    """A renamed class or function is renamed in the glossary too."""
    glossary = (_ROOT / "docs" / "glossary.md").read_text()
    terms = re.findall(r"^\| ([a-z][a-z -]*) \|", glossary, re.MULTILINE)
    assert len(terms) > 40
    assert terms == sorted(terms)
    named = re.findall(r"((?:`\w+`(?:, | and | of )?)+) in `(src/[\w./]+\.py)`", glossary)
    assert len(named) > 40
    missing = [
        f"{name} in {path}"
        for names, path in named
        for name in re.findall(r"`(\w+)`", names)
        if not name.startswith("BATCHLINE_") and not re.search(rf"\b{name}\b", (_ROOT / path).read_text())
    ]
    assert missing == []


def test_the_readme_fits_on_a_few_screens() -> None:
    assert len(_README.splitlines()) <= 120


@pytest.mark.parametrize(
    "name", ["requirements.lock", "requirements-dev.lock", "requirements-docs.lock", "tests/node/package-lock.json"]
)
def test_lock_files_pin_hashes_and_name_no_registry(name: str) -> None:
    """The person who installs the packages chooses the registry."""
    text = (_ROOT / name).read_text()
    assert "://" not in text
    assert "--hash=sha256:" in text or '"integrity": "sha512-' in text


def test_the_dev_lock_holds_the_runtime_lock() -> None:
    """Tests run with the versions that are shipped."""
    runtime = set(re.findall(r"^[a-z].*==\S+", (_ROOT / "requirements.lock").read_text(), re.MULTILINE))
    dev = set(re.findall(r"^[a-z].*==\S+", (_ROOT / "requirements-dev.lock").read_text(), re.MULTILINE))
    assert runtime
    assert runtime <= dev


def test_the_version_is_in_the_changelog_with_a_date() -> None:
    """It is written in one place of the code, and the changelog tells what it brought."""
    changelog = (_ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})$", changelog, re.MULTILINE)
    assert released[0][0] == __version__
