"""F3, G8: projects are deleted and given budgets from the command line."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from batchline.cli import main
from tests.support.command_line import Shell, cells
from tests.support.run_process import Tenant
from tests.support.service import (
    Mock,
    await_end,
    chat_lines,
    credentials_of,
    running_mock,
    running_service,
    submit,
    wait_until,
)

_PRICED = """
metering = true
[models.m]
input_price = 0
output_price = 1000000
"""


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "data")


@pytest.mark.rule("F3", "Deleting a project needs a confirmation.")
def test_a_project_is_not_deleted_by_accident(shell: Shell) -> None:
    made = shell.json("keys", "create", "--project", "search")
    code, message = shell.refusal("projects", "delete", "search")
    assert code == 2
    assert "confirm it with --yes" in message
    assert [project["name"] for project in shell.json("projects", "list")] == ["search"]
    assert shell.json("projects", "delete", "search", "--yes") == {"project_id": made["project_id"], "deleted": True}
    assert shell.json("projects", "list") == []
    assert shell.json("keys", "list") == []
    assert "There is no project 'search'" in shell.refusal("projects", "delete", "search", "--yes")[1]


@pytest.mark.rule("F4", "Ctrl-C at a question ends a command with 130.")
def test_ctrl_c_at_a_question_is_130_and_changes_nothing(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.json("keys", "create", "--project", "search")

    def interrupt(_: str) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
        patch.setattr(click.termui, "visible_prompt_func", interrupt)
        with pytest.raises(SystemExit) as ended:
            main(["projects", "delete", "search", "--data-dir", str(shell.folder)])
    assert ended.value.code == 130
    assert [project["name"] for project in shell.json("projects", "list")] == ["search"]


def test_an_organization_is_deleted_after_its_projects_and_its_balance(shell: Shell) -> None:
    made = shell.json("keys", "create", "--org", "acme", "--project", "search")
    shell.json("orgs", "set-balance", "acme", "5")
    assert "acme has 1 project: search. Delete every project first" in shell.refusal("orgs", "delete", "acme")[1]
    shell.text("projects", "delete", "search", "--yes")
    assert "acme has a balance of 5." in shell.refusal("orgs", "delete", "acme")[1]
    shell.json("orgs", "set-balance", "acme", "0")
    assert shell.text("orgs", "delete", "acme") == f"acme ({made['organization_id']}) is deleted\n"
    assert shell.json("orgs", "list") == []


def test_a_running_service_refuses_what_was_deleted_and_deletes_its_files(tmp_path: Path) -> None:
    """F3: while a batch runs, nothing is deleted, and the message names the batch."""
    with running_mock() as mock, running_service(tmp_path, mock.url) as service:
        account, client = service.account, service.client()
        batch = submit(client, chat_lines(["[[hang]] late", "fine"]))
        wait_until(lambda: mock.stats()["in_flight"] == 1, what="the line in flight")
        store = ["--data-dir", str(service.data_dir)]
        for command in (["keys", "delete", account["key_id"]], ["projects", "delete", account["project_id"], "--yes"]):
            result = CliRunner().invoke(main, [*command, *store])
            assert result.exit_code == 1
            assert f"has a batch that has not ended: {batch.id}." in result.stderr
        client.batches.cancel(batch.id)
        # The line in flight ends with its upstream.
        mock.program.end()
        ended = await_end(client, batch.id)
        assert ended.input_file_id is not None
        service.command("projects", "delete", account["project_id"], "--yes")
        answer = service.call("GET", f"/v1/batches/{batch.id}", headers=credentials_of(account))
        assert answer.status == 403
        uploads = service.data_dir / "objects" / "uploads"
        wait_until(lambda: not list(uploads.rglob(f"*{ended.input_file_id}*")), what="deleted files")


def test_a_deleted_key_is_refused_and_its_batches_stay(tenant: Tenant) -> None:
    service, account = tenant.service, tenant.account
    done = await_end(service.client(account), submit(service.client(account), chat_lines(["fine"])).id)
    spare = json.loads(service.keys("create", "--json", "--project", _project_of(tenant)))
    assert spare["project_id"] == account["project_id"]
    assert json.loads(service.keys("delete", account["api_key"], "--json")) == {
        "key_id": account["key_id"],
        "deleted": True,
    }
    assert service.call("GET", "/v1/batches", headers=credentials_of(account)).status == 403
    assert service.client(spare).batches.retrieve(done.id).id == done.id


def _project_of(tenant: Tenant) -> str:
    keys = json.loads(tenant.service.keys("list", "--json"))
    return str(next(key["project"] for key in keys if key["key_id"] == tenant.account["key_id"]))


@pytest.mark.rule("G8", "A budget that is set while a service runs counts within seconds.")
def test_a_budget_stops_a_project_that_runs_and_lets_it_go_on(tmp_path: Path) -> None:
    config = tmp_path / "batchline.toml"
    config.write_text(_PRICED)
    with running_mock() as mock, running_service(tmp_path, mock.url, config=config) as service:
        assert isinstance(mock, Mock)
        service.command("orgs", "set-balance", service.account["organization_id"], "1000")
        changed = json.loads(service.command("projects", "set-budget", "default", "0.5", "--json"))
        assert changed["daily_budget"] == "0.5"
        assert [row[-1] for row in cells(service.command("projects", "list"))] == ["daily_budget", "0.5"]
        client = service.client()
        first = await_end(client, submit(client, chat_lines(f"question {n}" for n in range(40))).id)
        assert first.request_counts is not None
        assert first.request_counts.failed > 0, "the budget is a fraction of what one answer costs"
        service.command("projects", "set-budget", "default", "none")
        again = await_end(client, submit(client, chat_lines(["question"])).id)
        assert again.request_counts is not None
        assert again.request_counts.completed == 1


@pytest.mark.parametrize("amount", ["-1", "many", "1e10", ""])
def test_what_is_no_amount_is_no_budget(shell: Shell, amount: str) -> None:
    shell.json("keys", "create")
    code, message = shell.refusal("projects", "set-budget", "default", amount)
    assert code == 2
    assert "is not an amount" in " ".join(message.split())
    assert shell.json("projects", "list")[0]["daily_budget"] is None
