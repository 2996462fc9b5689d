"""F3: keys are made, listed, revoked and rotated from the command line, and stored hashed."""

import json
import os
import re
import uuid
from pathlib import Path

import pytest

from batchline.app.startup import folder_lock, write_lock
from batchline.domain import ids
from batchline.domain.records import Owner
from tests.support.command_line import Shell, cells
from tests.support.service import Service, running_mock, running_service, wait_until


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "data")


@pytest.mark.rule("F3", "A created key opens its project.")
def test_a_created_key_opens_its_project(shell: Shell) -> None:
    """F3, A2: what create prints is what authenticates."""
    made = shell.json("keys", "create")
    assert re.fullmatch(r"bl-[0-9a-f]{48}", made["api_key"])
    assert re.fullmatch(r"key_[0-9a-f]{24}", made["key_id"])
    assert uuid.UUID(made["project_id"]).version == 4
    assert uuid.UUID(made["organization_id"]).version == 4
    assert shell.owner(made["api_key"], made["project_id"]) == Owner(
        key_id=made["key_id"], project_id=made["project_id"], organization_id=made["organization_id"]
    )
    assert shell.owner(made["api_key"], str(uuid.uuid4())) is None


def test_create_as_text_is_aligned_and_warns_beside_the_output(shell: Shell) -> None:
    """The secret is shown only once."""
    result = shell.call("keys", "create")
    fields = result.stdout.partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in fields] == ["api_key", "project_id", "organization_id", "key_id"]
    assert len({line.rindex(" ") for line in fields}) == 1
    assert "shown only once" in result.stderr


@pytest.mark.rule("A13", "keys create prints ready lines for the shell and for Python.")
def test_create_prints_ready_lines(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A13: a base URL and a key are all that an OpenAI client needs."""
    monkeypatch.setenv("BATCHLINE_PORT", "8123")
    shown = shell.call("keys", "create").stdout
    key, url = shown.split()[1], "http://127.0.0.1:8123/v1"
    assert f"export OPENAI_BASE_URL={url} OPENAI_API_KEY={key}\n" in shown
    assert f'OpenAI(base_url="{url}", api_key="{key}")\n' in shown
    monkeypatch.setenv("BATCHLINE_HOST", "::1")
    assert 'base_url="http://[::1]:8123/v1"' in shell.call("keys", "create").stdout
    monkeypatch.setenv("BATCHLINE_BASE_URL", "https://batch.example.org/v1")
    assert 'base_url="https://batch.example.org/v1"' in shell.call("keys", "create").stdout
    monkeypatch.setenv("BATCHLINE_BEARER", "off")
    assert "OpenAI" not in shell.call("keys", "create").stdout


def test_the_ready_lines_name_the_service_that_runs_on_the_folder(shell: Shell) -> None:
    """It may listen on another port than the settings of this command say."""
    shell.call("keys", "create")
    with folder_lock(shell.folder) as lock:
        write_lock(lock, os.getpid(), "http://127.0.0.1:9123")
        assert 'base_url="http://127.0.0.1:9123/v1"' in shell.call("keys", "create").stdout


def test_projects_are_made_by_name_once(shell: Shell) -> None:
    """F3: the same name is the same project, in one organization."""
    first, again = shell.json("keys", "create"), shell.json("keys", "create")
    other = shell.json("keys", "create", "--project", "other")
    assert first["project_id"] == again["project_id"] != other["project_id"]
    assert first["organization_id"] == again["organization_id"] == other["organization_id"]
    assert first["api_key"] != again["api_key"]


@pytest.mark.rule("F3", "A project's name is its organization's own.")
def test_organizations_are_made_by_name_and_share_no_project(shell: Shell) -> None:
    """F3: a project's name is its organization's own."""
    first = shell.json("keys", "create", "--org", "acme", "--project", "search")
    again = shell.json("keys", "create", "--org", "acme", "--project", "ads")
    other = shell.json("keys", "create", "--org", "globex", "--project", "search")
    assert first["organization_id"] == again["organization_id"] != other["organization_id"]
    assert len({made["project_id"] for made in (first, again, other)}) == 3
    listed = {row["key_id"]: (row["organization"], row["project"]) for row in shell.json("keys", "list")}
    assert listed == {
        first["key_id"]: ("acme", "search"),
        again["key_id"]: ("acme", "ads"),
        other["key_id"]: ("globex", "search"),
    }


def test_projects_are_listed_with_their_organization(shell: Shell) -> None:
    made = shell.json("keys", "create", "--org", "acme", "--project", "search")
    [row] = shell.json("projects", "list")
    assert row == {
        "name": "search",
        "project_id": made["project_id"],
        "organization": "acme",
        "organization_id": made["organization_id"],
        "created_at": row["created_at"],
        "daily_budget": None,
    }
    head, line = cells(shell.text("projects", "list"))
    assert dict(zip(head, line, strict=True)).items() >= {"name": "search", "project_id": made["project_id"]}.items()


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "\x1b[31mred"])
@pytest.mark.parametrize("option", ["--project", "--org"])
def test_a_name_that_would_garble_a_terminal_is_refused(shell: Shell, option: str, name: str) -> None:
    assert shell.call("keys", "create", option, name).exit_code == 2


def test_list_tells_keys_apart_and_never_shows_one(shell: Shell) -> None:
    first, second = shell.json("keys", "create"), shell.json("keys", "create", "--project", "other")
    listed = shell.json("keys", "list")
    assert {row["key_id"]: row["project"] for row in listed} == {first["key_id"]: "default", second["key_id"]: "other"}
    secret = first["api_key"]
    assert f"{secret[:7]}...{secret[-4:]}" in [row["hint"] for row in listed]
    text = shell.call("keys", "list").stdout
    assert first["key_id"] in text
    for made in (first, second):
        assert made["api_key"] not in text + json.dumps(listed)


@pytest.mark.rule("F3", "keys list tells when a key was last used.")
def test_list_tells_when_a_key_was_last_used(shell: Shell) -> None:
    """So that keys nobody needs any more can be found."""
    used, unused = shell.json("keys", "create"), shell.json("keys", "create")
    shell.in_store(lambda store: store.touch_keys({used["key_id"]: 1_793_491_200}))
    assert {row["key_id"]: row["last_used_at"] for row in shell.json("keys", "list")} == {
        used["key_id"]: 1_793_491_200,
        unused["key_id"]: None,
    }
    head, *lines = cells(shell.text("keys", "list"))
    last_used = {line[0]: line[head.index("last_used_at")] for line in lines}
    assert last_used == {used["key_id"]: "2026-11-01T00:00:00Z", unused["key_id"]: "never"}


@pytest.mark.rule("F3", "A key can have a name, scopes and an expiry.")
def test_a_key_can_have_a_name_scopes_and_an_expiry(shell: Shell) -> None:
    """F3: create shows them, and so does list."""
    plain = shell.json("keys", "create")
    options = ("--name", "nightly", "--expires-in", "30d", "--scope", "read", "--scope", "batch")
    made = shell.json("keys", "create", *options)
    assert (made["name"], made["scopes"]) == ("nightly", "batch,read")
    assert not {"name", "scopes", "expires_at"} & plain.keys()
    rows = {row["key_id"]: row for row in shell.json("keys", "list")}
    row = rows[made["key_id"]]
    assert (row["name"], row["scopes"]) == ("nightly", "batch,read")
    assert row["expires_at"] == row["created_at"] + 30 * 86_400
    assert (rows[plain["key_id"]]["scopes"], rows[plain["key_id"]]["expires_at"]) == ("batch,inference,read", None)
    head, *lines = cells(shell.text("keys", "list"))
    shown = {line[0]: dict(zip(head, line, strict=True)) for line in lines}
    assert shown[made["key_id"]]["name"] == "nightly"
    assert shown[plain["key_id"]].items() >= {"name": "-", "expires_at": "never"}.items()
    owner = shell.owner(made["api_key"], made["project_id"])
    assert owner is not None
    assert (owner.may("read"), owner.may("batch"), owner.may("inference")) == (True, True, False)


@pytest.mark.parametrize(
    "option",
    [
        ("--expires-in", "0d"),
        ("--expires-in", "soon"),
        ("--expires-in", "36501d"),
        ("--expires-in", "999999999d"),
        ("--scope", "admin"),
    ],
)
def test_an_expiry_or_a_scope_that_does_not_exist_is_refused(shell: Shell, option: tuple[str, str]) -> None:
    assert shell.call("keys", "create", *option).exit_code == 2


@pytest.mark.rule("F3", "Keys are stored hashed.")
def test_no_file_of_the_data_folder_holds_a_secret(shell: Shell) -> None:
    """F3: keys are stored hashed, also right after they were made or rotated."""
    made = shell.json("keys", "create")
    rotated = shell.json("keys", "rotate", made["key_id"])
    stored = b"".join(path.read_bytes() for path in shell.folder.rglob("*") if path.is_file())
    assert ids.key_digest(rotated["api_key"]) in stored
    for secret in (made["api_key"], rotated["api_key"]):
        assert secret.encode() not in stored
        assert bytes.fromhex(secret.removeprefix("bl-")) not in stored


@pytest.mark.rule("F3", "A revoked key opens nothing.")
@pytest.mark.parametrize("field", ["key_id", "api_key"])
def test_a_revoked_key_opens_nothing(shell: Shell, field: str) -> None:
    """A2, F3: by id or by the key itself; its neighbour in the project lives on."""
    made, neighbour = shell.json("keys", "create"), shell.json("keys", "create")
    result = shell.call("keys", "revoke", made[field])
    assert (result.exit_code, result.stdout) == (0, f"{made['key_id']} is revoked\n")
    assert shell.owner(made["api_key"], made["project_id"]) is None
    assert shell.owner(neighbour["api_key"], neighbour["project_id"]) is not None
    revoked = {row["key_id"]: row["revoked_at"] for row in shell.json("keys", "list")}
    assert revoked[made["key_id"]] is not None
    assert revoked[neighbour["key_id"]] is None


@pytest.mark.rule("F3", "A rotated key is the same key with another secret.")
@pytest.mark.parametrize("field", ["key_id", "api_key"])
def test_a_rotated_key_keeps_its_id_and_changes_its_secret(shell: Shell, field: str) -> None:
    """F3: new secret, same key, so batches that run under it go on."""
    made = shell.json("keys", "create", "--project", "other")
    rotated = shell.json("keys", "rotate", made[field])
    assert rotated == made | {"api_key": rotated["api_key"]}
    assert rotated["api_key"] != made["api_key"]
    assert shell.owner(made["api_key"], made["project_id"]) is None
    found = shell.owner(rotated["api_key"], made["project_id"])
    assert found is not None
    assert found.key_id == made["key_id"]


def test_a_revoked_key_cannot_come_back_by_rotation(shell: Shell) -> None:
    made = shell.json("keys", "create")
    shell.call("keys", "revoke", made["key_id"])
    result = shell.call("keys", "rotate", made["key_id"])
    assert result.exit_code == 1
    assert "is revoked" in result.stderr
    assert "bl-" not in result.output


def test_revoking_twice_keeps_the_first_date(shell: Shell) -> None:
    made = shell.json("keys", "create")
    shell.in_store(lambda store: store.revoke_key(made["key_id"], at=1_793_491_200))
    assert shell.json("keys", "revoke", made["key_id"])["revoked_at"] == 1_793_491_200
    assert [row["revoked_at"] for row in shell.json("keys", "list")] == [1_793_491_200]


@pytest.mark.parametrize("verb", ["revoke", "rotate"])
def test_an_unknown_key_is_told_and_not_repeated(shell: Shell, verb: str) -> None:
    """It may be a live secret of another folder."""
    shell.json("keys", "create")
    stranger = ids.api_key(bytes(24))
    result = shell.call("keys", verb, stranger)
    assert result.exit_code == 1
    assert "There is no such key. KEY is the key_id from: batchline keys list" in " ".join(result.stderr.split())
    assert stranger not in result.output


@pytest.mark.parametrize("verb", ["revoke", "rotate", "rename", "delete"])
def test_the_help_says_what_key_is(shell: Shell, verb: str) -> None:
    """A person gives the name, which is in the same list."""
    assert "KEY is the key_id from `batchline keys list`" in " ".join(shell.text("keys", verb, "--help").split())


def test_a_key_is_found_by_all_of_its_secret_and_not_by_its_hint(shell: Shell) -> None:
    """Somebody who read a hint in a list must not end another's key with it."""
    made = shell.json("keys", "create")
    secret = made["api_key"]
    lookalike = secret[:7] + "0" * (len(secret) - 11) + secret[-4:]
    assert shell.call("keys", "revoke", lookalike).exit_code == 1
    assert shell.owner(secret, made["project_id"]) is not None


def test_keys_take_effect_on_a_running_service(tmp_path: Path) -> None:
    """F3: made, rotated and revoked beside it, without a restart."""
    with running_mock() as mock, running_service(tmp_path, mock.url) as service:
        made = json.loads(service.keys("create", "--json"))
        assert _opens(service, made) == 200
        rotated = json.loads(service.keys("rotate", made["key_id"], "--json"))
        assert _opens(service, rotated) == 200
        # The contract gives a running service 5 s to hear of it; never hearing is the failure, not the seconds.
        wait_until(lambda: _opens(service, made) == 403, what="the old secret is refused")
        service.keys("revoke", made["key_id"])
        wait_until(lambda: _opens(service, rotated) == 403, what="the revoked key is refused")
        assert _opens(service, service.account) == 200


def _opens(service: Service, account: dict[str, str]) -> int:
    """What the service answers to this key."""
    headers = {"x-api-key": account["api_key"], "x-project-id": account["project_id"]}
    return service.call("GET", "/v1/files", headers=headers).status


@pytest.mark.parametrize(
    "command", [("keys", "list"), ("orgs", "list"), ("projects", "list"), ("usage",)], ids=" ".join
)
def test_a_command_that_reads_creates_nothing(tmp_path: Path, command: tuple[str, ...]) -> None:
    """F3: a typo in --data-dir is an error, and leaves no empty service behind."""
    folder = tmp_path / "typo"
    code, told = Shell(folder).refusal(*command)
    assert code == 1
    assert f"There is no data of a service in {folder}." in told
    assert "--data-dir" in told
    assert not folder.exists()


def test_a_command_that_creates_says_where(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "data")
    assert f"A new data folder is made: {tmp_path / 'data'}" in shell.call("keys", "create").stderr
    assert "A new data folder" not in shell.call("keys", "create").stderr


def test_a_service_with_another_folder_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F3: it would answer 403 to the new key."""
    other = Shell(tmp_path / "other")
    with running_mock() as mock, running_service(tmp_path, mock.url) as service:
        monkeypatch.setenv("BATCHLINE_PORT", str(service.port))
        url = f"http://127.0.0.1:{service.port}"
        assert f"The service at {url} uses another folder." in other.call("keys", "list").stderr
        assert (
            f"the service at {url} uses another data folder than {other.folder}" in other.call("keys", "create").stderr
        )
        assert "another data folder" not in Shell(service.data_dir).call("keys", "create").stderr


@pytest.mark.rule("F3", "Keys, projects and organizations can be renamed.")
def test_keys_projects_and_organizations_are_renamed(shell: Shell) -> None:
    """F3: their ids stay, and the key goes on to open its project."""
    made = shell.json("keys", "create", "--project", "search", "--org", "acme")
    shell.json("keys", "create", "--project", "ads", "--org", "acme")
    shell.json("keys", "create", "--org", "globex")
    assert shell.json("keys", "rename", made["key_id"], "nightly")["name"] == "nightly"
    assert shell.json("projects", "rename", "search", "find")["project_id"] == made["project_id"]
    assert shell.json("orgs", "rename", "acme", "roadrunner")["organization_id"] == made["organization_id"]
    row = next(row for row in shell.json("keys", "list") if row["key_id"] == made["key_id"])
    assert (row["name"], row["project"], row["organization"]) == ("nightly", "find", "roadrunner")
    assert shell.owner(made["api_key"], made["project_id"]) is not None
    assert "Another project of roadrunner is called 'ads'" in shell.refusal("projects", "rename", "find", "ads")[1]
    assert "Another organization is called 'globex'" in shell.refusal("orgs", "rename", "roadrunner", "globex")[1]
    assert shell.refusal("orgs", "rename", "roadrunner", "a\x1bb")[0] == 2
