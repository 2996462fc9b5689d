"""``batchline webhooks`` (G10): the secret is shown once, and a test event arrives."""

import json
import re
from pathlib import Path

import pytest

from tests.support.command_line import Shell, cells
from tests.support.webhook_receivers import running_receiver


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    found = Shell(tmp_path / "data")
    found.json("keys", "create")
    return found


def refusal(shell: Shell, *arguments: str) -> str:
    return shell.refusal(*arguments)[1]


@pytest.mark.rule("G10", "create prints the id and, once, the secret.")
def test_the_secret_is_shown_once(shell: Shell) -> None:
    made = shell.json("webhooks", "create", "https://example.org/hook", "--events", "batch.failed, batch.completed")
    assert re.fullmatch(r"wh_[0-9a-f]{24}", made["id"])
    assert re.fullmatch(r"whsec_[A-Za-z0-9+/]{43}=", made["secret"])
    assert made["events"] == "batch.completed,batch.failed"
    listed = shell.call("webhooks", "list", "--json").stdout
    assert made["secret"] not in listed
    (webhook,) = json.loads(listed)
    assert webhook["id"] == made["id"]
    assert (webhook["events"], webhook["disabled_at"]) == (["batch.completed", "batch.failed"], None)
    assert made["id"] in cells(shell.call("webhooks", "list").stdout)[1]


def test_text_is_aligned_and_warns_beside_the_output(shell: Shell) -> None:
    shown = shell.call("webhooks", "create", "https://example.org/hook")
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["id", "secret", "url", "events", "project_id"]
    assert "not shown again" in shown.stderr


def test_a_new_secret_takes_the_place_of_the_former(shell: Shell) -> None:
    made = shell.json("webhooks", "create", "https://example.org/hook")
    rotated = shell.json("webhooks", "rotate", made["id"])
    assert rotated["id"] == made["id"]
    assert rotated["secret"] != made["secret"]


def test_a_deleted_webhook_is_gone(shell: Shell) -> None:
    made = shell.json("webhooks", "create", "https://example.org/hook")
    shell.call("webhooks", "delete", made["id"])
    assert shell.json("webhooks", "list") == []
    for verb in ("delete", "rotate", "deliveries", "test"):
        assert "There is no webhook" in refusal(shell, "webhooks", verb, made["id"])


def test_what_is_no_url_or_no_event_is_refused(shell: Shell) -> None:
    assert "Plain http is allowed only to this machine" in refusal(
        shell, "webhooks", "create", "http://example.org/hook"
    )
    assert "there is no event 'batch.done'" in refusal(
        shell, "webhooks", "create", "https://example.org/", "--events", "batch.done"
    )
    assert "There is no project" in refusal(shell, "webhooks", "create", "https://example.org/", "--project", "none")


def test_a_test_event_arrives_and_its_answer_is_shown(shell: Shell) -> None:
    with running_receiver() as receiver:
        made = shell.json("webhooks", "create", receiver.url)
        assert "answered 200" in shell.call("webhooks", "test", made["id"]).stdout
        (received,) = receiver.received
        assert (received.event["type"], received.event["data"]) == ("webhook.test", {"id": made["id"]})
        assert received.headers["webhook-id"] == received.event["id"]
        receiver.status = 500
        assert "the receiver answered 500" in refusal(shell, "webhooks", "test", made["id"])
    assert "Not delivered: the connection failed" in refusal(shell, "webhooks", "test", made["id"])
    assert shell.json("webhooks", "deliveries", made["id"]) == []
