"""Files, usage, keys and webhooks of a project."""

import json
import re
import shlex
from typing import Any

import pytest

from batchline.console.account import _usage_chart
from batchline.domain.records import ProjectUsage
from tests.console.conftest import Console
from tests.support.console import Visitor, shown, visitor
from tests.support.service import await_end, chat_lines, submit, wait_until
from tests.support.webhook_receivers import running_receiver


def test_files_are_listed_downloaded_and_deleted(console: Console) -> None:
    account = console.service.new_account("filer")
    client = console.service.client(account)
    made = [client.files.create(file=chat_lines([f"one {n}"]), purpose="batch").id for n in range(52)]
    with visitor(console.port, account["api_key"]) as person:
        first = person.page("/console/files")
        older = re.findall(r'href="(\?after=[^"]+)"', first)[0]
        pages = first + person.page(f"/console/files{older}")
        assert re.findall(r"<code>(file-\w+)</code>", pages) == list(reversed(made))
        assert "No files" in person.page("/console/files?purpose=batch_output")
        assert person.post(f"/console/files/{made[0]}/delete").status_code == 303
        assert person.get(f"/console/files/{made[0]}/content").status_code == 404
        assert person.post(f"/console/files/{made[0]}/delete").status_code == 404


def test_usage_is_shown_by_day_and_model(console: Console, person: Visitor) -> None:
    page = person.page("/console/usage")
    assert "<rect" in page
    assert re.search(r"<th scope=\"row\">m</th>", page)


def test_keys_are_those_of_the_project(console: Console, person: Visitor) -> None:
    page = person.page("/console/keys")
    assert console.service.account["key_id"] in page
    assert console.stranger["key_id"] not in page
    assert console.key not in page


def test_the_command_that_makes_a_key_names_the_project_as_one_word(console: Console) -> None:
    name = " ".join(["Anna's", *["long"] * 15, "project"])
    with visitor(console.port, console.service.new_account(name)["api_key"]) as person:
        assert f"--project {shlex.quote(name)} --name" in shown(person.page("/console/keys"))


def test_a_webhook_is_made_shown_once_and_deleted(console: Console, person: Visitor) -> None:
    form = {"url": "https://example.com/hook", "events": ["batch.completed", "batch.failed"]}
    answer = person.post("/console/webhooks", form)
    assert answer.headers["location"] == "/console/webhooks", "loading the page again makes no second webhook"
    [secret] = re.findall(r"whsec_[\w+/=]+", person.page("/console/webhooks"))
    assert not any(secret in cookie for cookie in answer.headers.get_list("set-cookie"))
    page = person.page("/console/webhooks")
    assert secret not in page
    assert "batch.completed, batch.failed" in shown(page)
    [webhook_id] = re.findall(r"/console/webhooks/(wh_\w+)/delete", page)
    with visitor(console.port, console.stranger["api_key"]) as stranger:
        assert webhook_id not in stranger.page("/console/webhooks")
        assert stranger.post(f"/console/webhooks/{webhook_id}/delete").status_code == 404
    assert person.post(f"/console/webhooks/{webhook_id}/delete").status_code == 303
    assert webhook_id not in person.page("/console/webhooks")


def test_the_secret_of_a_webhook_is_shown_to_nobody_who_only_guesses_its_id(console: Console) -> None:
    account = console.service.new_account("guarded")
    with visitor(console.port, account["api_key"]) as person:
        person.post("/console/webhooks", {"url": "https://example.com/hook", "events": ["batch.failed"]})
        [(name, proof)] = [each for each in person.http.cookies.items() if each[0].startswith("batchline_webhook")]
        [webhook_id] = re.findall(r"<code>(wh_\w+)</code>", person.page("/console/webhooks"))
        for value in (webhook_id, proof[:-1], "0" * 64):
            person.http.cookies.set(name, value)
            assert "whsec_" not in person.page("/console/webhooks"), value


def test_a_refused_form_leads_back_and_shows_what_was_entered(console: Console, person: Visitor) -> None:
    answer = person.post("/console/webhooks", {"url": "https://example.com/<b>", "events": []})
    assert answer.status_code == 400
    assert "Choose at least one event" in answer.text
    assert 'href="/console/webhooks">Back to the form' in answer.text
    assert "https://example.com/&lt;b&gt;" in answer.text
    key_id = console.service.account["key_id"]
    answer = person.post(f"/console/keys/{key_id}", {"name": "my key", "scopes": ["read"], "expires": "soon"})
    assert "my key" in shown(answer.text)
    assert 'href="/console/keys">Back to the form' in answer.text
    forged = person.post("/console/webhooks", {"url": "https://forged.example"}, csrf="0" * 64)
    assert "forged.example" not in forged.text


@pytest.mark.rule("G10", "A webhook that a project makes may not name this machine.")
@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/", "http://localhost/", "http://example.com", "ftp://x", "javascript:1"]
)
def test_a_webhook_of_a_project_names_another_machine_and_https(console: Console, person: Visitor, url: str) -> None:
    assert person.post("/console/webhooks", {"url": url, "events": ["batch.completed"]}).status_code == 400
    assert person.post("/console/webhooks", {"url": "https://example.com"}).status_code == 400


def _used(start: int, model: str, requests: int) -> ProjectUsage:
    zero = dict.fromkeys(
        ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "cost", "reused", "saved"), 0
    )
    return ProjectUsage(start=start, model=model, lines=0, requests=requests, **zero)


def test_a_chart_has_a_bar_for_each_day_and_model() -> None:
    bars = _usage_chart([_used(0, "a", 3), _used(0, "b", 1), _used(86_400, "a", 2)], ["a", "b"], since=0)
    assert [(bar.x, bar.y, bar.height, bar.series) for bar in bars] == [
        (0, 40, 120, 0),
        (0, 0, 40, 1),
        (30, 80, 80, 0),
    ]


def test_a_chart_of_thousands_of_models_has_few_bars() -> None:
    """A line may name any model where none are configured, and the event loop draws the chart."""
    models = [f"model-{n}" for n in range(10_000)]
    bars = _usage_chart([_used(0, model, 1) for model in models], models, since=0)
    assert [bar.series for bar in bars] == [0, 1, 2, 3, 4]
    assert bars[-1].label == "1970-01-01: 9,996 requests of others"


def _new_key(console: Console, *options: str) -> tuple[str, str]:
    """Make a key, and return its id and the key itself."""
    made = json.loads(console.service.keys("create", "--json", *options))
    return made["key_id"], made["api_key"]


@pytest.mark.rule("F7", "A key is renamed and limited in the console, and only the administrator extends it.")
def test_a_key_is_renamed_and_limited_and_only_the_administrator_extends_it(console: Console) -> None:
    account = console.service.new_account("limiting")
    key_id, key = _new_key(console, "--project", "limiting", "--scope", "read", "--scope", "inference")
    path = f"/console/keys/{key_id}"
    with visitor(console.port, account["api_key"]) as person, visitor(console.port, console.admin_token) as admin:
        form = {"name": "report <b>", "scopes": ["read"], "expires": "2999-12-31"}
        assert person.post(path, form).headers["location"] == "/console/keys"
        page = person.page("/console/keys")
        assert "report &lt;b&gt;" in page
        assert 'value="2999-12-31"' in page
        for wider in ({"scopes": ["read", "batch"]}, {"expires": ""}, {"expires": "3000-01-01"}):
            assert person.post(path, form | wider).status_code == 400, wider
        wrong: dict[str, Any]
        for wrong in ({"scopes": []}, {"expires": "yesterday"}, {"expires": "1999-01-01"}):
            assert person.post(path, form | wrong).status_code == 400, wrong
        admin.open_project("limiting")
        assert admin.post(path, form | {"scopes": ["read", "batch"], "expires": ""}).status_code == 303
        assert "2999-12-31" not in person.page("/console/keys")
    with visitor(console.port, key) as reader:
        assert reader.get("/console/keys").status_code == 200


@pytest.mark.rule("F7", "A key changes and revokes only keys that may do no more than itself.")
def test_a_key_changes_only_keys_that_may_do_no_more_than_itself(console: Console) -> None:
    account = console.service.new_account("revoking")
    weak_id, weak = _new_key(console, "--project", "revoking", "--scope", "read", "--scope", "batch")
    with visitor(console.port, weak) as person:
        assert person.post(f"/console/keys/{account['key_id']}/revoke").status_code == 403
        assert person.post(f"/console/keys/{console.service.account['key_id']}/revoke").status_code == 404
        assert f"/console/keys/{account['key_id']}/revoke" not in person.page("/console/keys")
    with visitor(console.port, account["api_key"]) as person:
        assert person.post(f"/console/keys/{weak_id}/revoke").status_code == 303
        assert person.post(f"/console/keys/{weak_id}/revoke").status_code == 404
    with visitor(console.port) as stranger:
        assert stranger.sign_in(weak).status_code == 403


@pytest.mark.rule("G10", "An ended delivery can be sent again.")
def test_an_event_is_sent_again(console: Console) -> None:
    account = console.service.new_account("resending")
    with running_receiver() as receiver, visitor(console.port, account["api_key"]) as person:
        console.service.command("webhooks", "create", receiver.url, "--project", "resending")
        client = console.service.client(account)
        await_end(client, submit(client, chat_lines(["one"])).id)
        receiver.wait_for(lambda received: len(received) == 1)
        wait_until(lambda: "/resend" in person.page("/console/webhooks"), what="the end of the delivery")
        [path] = re.findall(r'action="(/console/webhooks/\w+/deliveries/\d+/resend)"', person.page("/console/webhooks"))
        with visitor(console.port, console.stranger["api_key"]) as stranger:
            assert stranger.post(path).status_code == 404
        assert person.post(f"{path.rpartition('/deliveries')[0]}/deliveries/999999/resend").status_code == 400
        for number in ("9" * 20, "9" * 5000, "x", "\u0663"):
            assert person.post(f"{path.rpartition('/deliveries')[0]}/deliveries/{number}/resend").status_code == 404
        assert person.post(path).status_code == 303
        first, again = receiver.wait_for(lambda received: len(received) == 2)
        assert first.headers["webhook-id"] == again.headers["webhook-id"]
