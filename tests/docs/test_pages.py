"""The pages of the site: every snippet works as it stands, every link and anchor leads somewhere."""

import ast
import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
import yaml

from batchline.api.openapi.document import describe
from batchline.cli import main
from batchline.cli.loading import load_settings
from tests.docs.test_docs import _commands, _parse
from tests.support.certificates import self_signed
from tests.support.service import running_mock, running_service

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs"
_ALL = sorted(_DOCS.rglob("*.md"))
_PAGES = [page for page in _ALL if page.parent != _DOCS]
"""The pages that lie in the folders of their kind."""
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_KNOWN = {"caddyfile", "csv", "json", "nginx", "python", "sh", "sql", "toml", "yaml"}
_NGINX_PARTS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
_DRAWINGS = {"architecture.md", "cli.md"}
"""The pages whose blocks without a language are drawings, or lines for files of a shell."""


def _blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in _FENCE.findall(page.read_text()) if found == language]


def _name(page: Path) -> str:
    return str(page.relative_to(_DOCS))


def _slugs(page: Path) -> set[str]:
    """Return the anchors of a page: named ones, and those of its headings."""
    text = _FENCE.sub("", page.read_text())
    headings = [
        re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", found) for found in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    ]
    slugs = {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", _ALL, ids=_name)
def test_every_link_and_anchor_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", page.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or linked.suffix != ".md" or anchor in _slugs(linked), target


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = yaml.safe_load((_ROOT / "mkdocs.yml").read_text())["nav"]
    named = re.findall(r"[\w/-]+\.md", str(navigation))
    assert sorted(named) == [_name(page) for page in _ALL]


@pytest.mark.parametrize("page", _ALL, ids=_name)
def test_snippets_are_of_a_kind_that_is_checked_and_commands_exist_with_their_flags(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call of batchline is parsed as click does, beside the files that it names.

    Sentences of the pages about the design and of the reference name commands without what these need. Of those the
    options are looked for.
    """
    text = page.read_text()
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r"\b[\w-]+\.(?:csv|jsonl|toml)\b", text):
        (tmp_path / name).touch()
    assert {language for language, _ in _FENCE.findall(text)} <= _KNOWN | ({""} if _name(page) in _DRAWINGS else set())
    names_whole_commands = page in _PAGES
    for command in _commands(text) if names_whole_commands else _commands("\n".join(_blocks(page, "sh"))):
        _parse(main, command)
    for command in _commands(text):
        assert _unknown_options(command) == [], command


def _unknown_options(arguments: list[str]) -> list[str]:
    found: click.Command = main
    for word in arguments:
        inner = found.get_command(click.Context(found), word) if isinstance(found, click.Group) else None
        found = found if inner is None else inner
    known = {"--help", "--version", *(name for part in found.params for name in (*part.opts, *part.secondary_opts))}
    return [word for word in arguments if word.startswith("--") and word.partition("=")[0] not in known]


@pytest.mark.parametrize(
    ("page", "text"), [(page, text) for page in _ALL for text in _blocks(page, "toml")], ids=lambda value: ""
)
def test_the_settings_files_that_are_shown_can_be_used(tmp_path: Path, page: Path, text: str) -> None:
    path = tmp_path / "batchline.toml"
    path.write_text(text)
    load_settings(config=str(path))


@pytest.mark.parametrize("page", _ALL, ids=_name)
def test_settings_and_programs_that_are_shown_can_be_read(page: Path) -> None:
    assert all(isinstance(yaml.safe_load(text), dict) for text in _blocks(page, "yaml"))
    assert all(isinstance(json.loads(text), dict) for text in _blocks(page, "json"))
    for program in _blocks(page, "python"):
        ast.parse(program)


def test_the_programs_run_as_they_stand(tmp_path: Path) -> None:
    """With a key and a port filled in. A scripted upstream answers."""
    programs = [text for page in _PAGES for text in _blocks(page, "python") if not _foreign(text)]
    assert len(programs) >= 2
    with running_mock() as mock, running_service(tmp_path, mock.url) as service:
        for program in programs:
            filled = program.replace("http://127.0.0.1:8000/v1", service.base_url)
            filled = filled.replace("API_KEY", service.account["api_key"])
            ran = subprocess.run([sys.executable, "-c", filled], capture_output=True, text=True, check=False)
            assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", _PAGES, ids=_name)
def test_a_program_that_needs_a_package_of_others_says_with_which_version_it_was_tried(page: Path) -> None:
    """Such packages are not installed here. A page about one says what was run by hand, and when it was not."""
    if page.parent.name == "works-with" and page.name != "index.md":
        tried = re.search(r"^(?:Tried with .* \d+\.\d+|Not tried)", page.read_text(), re.MULTILINE)
        assert tried, "the page does not say what was tried"
        assert _name(page).removeprefix("works-with/") in (page.parent / "index.md").read_text()
    else:
        assert not any(_foreign(text) for text in _blocks(page, "python"))


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_accepts_the_settings_of_the_page_about_tls(tmp_path: Path) -> None:
    [site] = _blocks(_DOCS / "how-to" / "tls.md", "nginx")
    certificate = self_signed(tmp_path)
    site = site.replace("/etc/ssl/batch.example.com.pem", str(certificate))
    site = site.replace("/etc/ssl/batch.example.com.key", str(certificate.with_suffix(".key")))
    # An ordinary user may neither listen on this port nor create nginx' own folders.
    site = site.replace("listen 443 ssl", f"listen unix:{tmp_path}/listen ssl")
    folders = " ".join(f"{part}_temp_path {tmp_path}/{part};" for part in _NGINX_PARTS)
    (tmp_path / "nginx.conf").write_text(f"pid {tmp_path}/pid; events {{}} http {{ access_log off; {folders} {site} }}")
    _accepts("nginx", "-t", "-e", "stderr", "-c", str(tmp_path / "nginx.conf"))


@pytest.mark.skipif(shutil.which("caddy") is None, reason="caddy is not installed")
def test_caddy_accepts_the_settings_of_the_page_about_tls(tmp_path: Path) -> None:
    [site] = _blocks(_DOCS / "how-to" / "tls.md", "caddyfile")
    (tmp_path / "Caddyfile").write_text(site)
    _accepts("caddy", "validate", "--adapter", "caddyfile", "--config", str(tmp_path / "Caddyfile"))


def _accepts(*command: str) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def _foreign(program: str) -> set[str]:
    """Return the packages that a program imports and that are not installed."""
    return {name for name in _imported(ast.parse(program)) if find_spec(name) is None}


def _imported(program: ast.Module) -> Iterator[str]:
    for node in ast.walk(program):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def test_the_tutorial_about_tables_runs_as_it_stands(tmp_path: Path) -> None:
    page = _DOCS / "tutorial" / "csv.md"
    [table], [command] = _blocks(page, "csv"), _blocks(page, "sh")
    (tmp_path / "cities.csv").write_text(table)
    batchline = Path(sys.executable).with_name("batchline")
    with running_mock() as mock:
        arguments = [*shlex.split(command)[1:], "--upstream-url", mock.url]
        ran = subprocess.run([batchline, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    with (tmp_path / "answers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["city"], row["answer"]) for row in rows] == [
        ("Lyon", "scripted answer to: Name one sight of Lyon in France."),
        ("Kyoto", "scripted answer to: Name one sight of Kyoto in Japan."),
    ]


def test_every_error_code_of_the_api_has_its_row() -> None:
    page = (_DOCS / "reference" / "errors.md").read_text()
    codes = set(re.findall(r"'code': {'enum': \[([^\]]+)\]", str(describe(bearer=True))))
    named = {code for listed in codes for code in re.findall(r"'(\w+)'", listed)}
    assert len(named) > 20
    assert {code for code in named if f"`{code}`" not in page} == set()


def test_the_codes_of_lines_each_have_one_row_and_no_others() -> None:
    page = (_DOCS / "reference" / "errors.md").read_text().partition("## Errors of lines")[2]
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    described = describe(bearer=True)["components"]["schemas"]["LineError"]["properties"]["code"]["description"]
    assert rows == re.findall(r"- `(\w+)`", described)


def test_the_calls_of_the_api_are_those_that_it_describes() -> None:
    page = (_DOCS / "reference" / "api.md").read_text()
    listed = set()
    for row in re.findall(r"^\| (`(?:GET|POST|DELETE) [^|]*) \|", page, re.MULTILINE):
        method = ""
        for named, path in re.findall(r"`(?:([A-Z]+) )?(/[^`]*)`", row):
            method = named or method
            listed.add((method, _with_any_id(path)))
    described = describe(bearer=True)["paths"]
    assert listed == {(method.upper(), _with_any_id(path)) for path, calls in described.items() for method in calls}


def _with_any_id(path: str) -> str:
    return re.sub(r"\{\w+\}", "{id}", path)


def test_the_verbs_of_the_commands_are_all_on_their_page() -> None:
    page = (_DOCS / "cli.md").read_text()
    assert all(f"batchline {verb}" in page for verb in main.list_commands(click.Context(main)))
