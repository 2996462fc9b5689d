"""The pages of the administrator, and that nobody else reaches them."""

import json
import re
from collections.abc import Iterator

import pytest

from tests.console.conftest import Console
from tests.support.console import ADMIN_PAGES, PAGES, Visitor, shown, visitor
from tests.support.service import await_end, chat_lines, submit, wait_until


@pytest.fixture
def admin(console: Console) -> Iterator[Visitor]:
    """Return a browser of the administrator."""
    with visitor(console.port, console.admin_token) as opened:
        yield opened


@pytest.mark.rule("F7", "For everyone but the administrator, the pages of the administrator do not exist.")
def test_nobody_else_reaches_the_pages_of_the_administrator(console: Console, person: Visitor) -> None:
    project_id = console.stranger["project_id"]
    actions = [f"/console/admin/projects/{project_id}/open", "/console/admin/close"]
    token = person.csrf()
    for path in ADMIN_PAGES:
        answer = person.get(path)
        assert answer.status_code == 404, path
        assert console.stranger["project_id"] not in answer.text
        assert path not in person.page("/console/batches")
    for path in actions:
        assert person.post(path, csrf=token).status_code == 404, path
    with visitor(console.port) as nobody:
        for path in ADMIN_PAGES:
            answer = nobody.get(path)
            assert (answer.status_code, answer.headers["location"].partition("?")[0]) == (303, "/console/sign-in")
        for path in actions:
            assert nobody.http.post(path).status_code == 303
        nobody.http.cookies[f"batchline_session_{console.port}"] = "0" * 64
        assert nobody.get("/console/admin").status_code == 303


@pytest.mark.rule("F7", "The administrator's token signs in, and its beginning or nothing does not.")
def test_only_the_whole_token_signs_in(console: Console) -> None:
    for wrong in ("", console.admin_token[:-1], console.admin_token + "x"):
        with visitor(console.port) as nobody:
            assert nobody.sign_in(wrong).status_code == 403, wrong
            assert not nobody.session


@pytest.mark.rule("F7", "Signing out ends the session.")
def test_signing_out_ends_the_session_of_the_administrator(console: Console, admin: Visitor) -> None:
    cookies = dict(admin.http.cookies)
    admin.open_project("stranger")
    assert admin.post("/console/sign-out").headers["location"] == "/console/sign-in"
    admin.http.cookies.update(cookies)
    for path in (*ADMIN_PAGES, "/console/batches"):
        assert admin.get(path).status_code == 303, path


def test_the_administrator_signs_out_also_without_an_open_project(admin: Visitor) -> None:
    token = admin.csrf("/console/admin")
    assert admin.post("/console/sign-out", csrf=token).headers["location"] == "/console/sign-in"
    assert admin.get("/console/admin").status_code == 303


@pytest.mark.rule("F7", "A form without its token does nothing.")
def test_a_form_of_the_administrator_needs_its_token(console: Console, admin: Visitor, person: Visitor) -> None:
    path = f"/console/admin/projects/{console.stranger['project_id']}/open"
    for token in ("", person.csrf()):
        assert admin.post(path, csrf=token).status_code == 403
    admin.http.headers["sec-fetch-site"] = "cross-site"
    assert admin.http.post(path, data={"csrf": "x"}).status_code == 403


@pytest.mark.rule("F7", "The administrator opens one project at a time, by a key that its owners see.")
def test_the_administrator_opens_one_project_at_a_time(console: Console, admin: Visitor) -> None:
    for path in PAGES:
        answer = admin.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/console/admin"), path
    account = console.service.new_account("opened")
    client = console.service.client(account)
    batch_id = await_end(client, submit(client, chat_lines(["one"])).id).id
    admin.open_project("opened")
    assert batch_id in admin.page("/console/batches")
    assert console.batch_id not in admin.page("/console/batches")
    assert admin.get(f"/console/batches/{console.batch_id}").status_code == 404
    admin.open_project("opened")
    with visitor(console.port, account["api_key"]) as person:
        keys = shown(person.page("/console/keys"))
        assert keys.count("console of the administrator") == 1
    assert admin.post("/console/admin/close", csrf=admin.csrf("/console/admin")).headers["location"] == "/console/admin"
    assert admin.get("/console/batches").headers["location"] == "/console/admin"
    assert admin.post("/console/admin/projects/none/open", csrf=admin.csrf("/console/admin")).status_code == 404


@pytest.mark.rule("F7", "The administrator opens a project with no key that its owners named or limited.")
def test_owners_of_a_project_cannot_choose_the_key_of_the_administrator(console: Console, admin: Visitor) -> None:
    name = "console of the administrator"
    options = ["--project", "steering", "--name", name, "--scope", "inference"]
    named = json.loads(console.service.keys("create", "--json", *options))["key_id"]
    owner = console.service.new_account("steering")
    admin.open_project("steering")
    assert admin.get("/console/batches").status_code == 200
    with visitor(console.port, owner["api_key"]) as person:
        keys = set(re.findall(r'action="/console/keys/(key_\w+)"', person.page("/console/keys")))
        [limited] = keys - {named, owner["key_id"]}
        form = {"name": name, "scopes": ["inference"], "expires": ""}
        assert person.post(f"/console/keys/{limited}", form).status_code == 303
    admin.open_project("steering")
    assert admin.get("/console/batches").status_code == 200


@pytest.mark.rule("F7", "A form does nothing in another project than that of its page.")
def test_a_form_of_one_project_does_nothing_in_another_that_was_opened_meanwhile(
    console: Console, admin: Visitor
) -> None:
    first, second = (console.service.new_account(name) for name in ("first-tab", "second-tab"))
    admin.open_project("first-tab")
    token = admin.csrf()
    admin.open_project("second-tab")
    upload = {"file": ("in.jsonl", chat_lines(["one"]))}
    for answer in (
        admin.post("/console/demo", {"model": "m"}, csrf=token),
        admin.post(f"/console/keys/{second['key_id']}/revoke", csrf=token),
        admin.http.post("/console/new", data={"csrf": token, "endpoint": "/v1/chat/completions"}, files=upload),
    ):
        assert answer.status_code == 409
        assert "another one was opened meanwhile. Open its project again" in shown(answer.text)
    for account in (first, second):
        client = console.service.client(account)
        assert [*client.batches.list(), *client.files.list()] == []
    assert admin.post("/console/admin/close", csrf=token).status_code == 303, "it is about no project"


def test_what_runs_and_waits_over_all_projects_is_shown(console: Console, admin: Visitor) -> None:
    accounts = [console.service.new_account(f"running-{n}") for n in range(2)]
    made = [submit(console.service.client(account), chat_lines(["[[hang]]"])) for account in accounts]
    wait_until(lambda: shown(admin.page("/console/admin")).count("1 in flight") >= 2, what="both lines in flight")
    page = admin.page("/console/admin")
    for account, batch in zip(accounts, made, strict=True):
        assert f"row-{batch.id}" in page
        console.service.client(account).batches.cancel(batch.id)
    assert "running-0" in shown(page)
    assert f"row-{console.batch_id}" not in page, "it has ended"
    part = admin.page("/console/admin?table")
    assert "<html" not in part
    assert "running-1" in part
    form = {"next": f"/console/batches/{made[1].id}"}
    path = f"/console/admin/projects/{accounts[1]['project_id']}/open"
    assert admin.post(path, form, csrf=admin.csrf("/console/admin")).headers["location"] == form["next"]
    assert made[1].id in admin.page(form["next"])
    away = admin.post(path, {"next": "https://example.com"}, csrf=admin.csrf("/console/admin"))
    assert away.headers["location"] == "/console/batches"


def test_projects_and_organizations_are_shown_with_their_limits(console: Console, admin: Visitor) -> None:
    console.service.new_account("needle-in-projects")
    page = admin.page("/console/admin/projects?search=NEEDLE-IN")
    assert re.findall(r'aria-label="Open the project ([^"]+)"', page) == ["needle-in-projects"]
    text = shown(page)
    for words in ("1 project", "no limit", "default", "Metering is off"):
        assert words in text
    assert "No project matches" in admin.page("/console/admin/projects?search=nothing-of-that-name")
    assert admin.get("/console/admin/projects?page=99999999999").status_code == 200
    assert admin.get("/console/admin/projects?page=-1").status_code == 200


def test_upstreams_are_shown_with_limit_queue_and_latency(console: Console, admin: Visitor) -> None:
    client = console.service.client()
    await_end(client, submit(client, chat_lines(["one", "two"])).id)
    wait_until(lambda: "Mean time of an attempt, by minute" in admin.page("/console/admin/upstreams"), what="a sample")
    page = admin.page("/console/admin/upstreams")
    assert 'id="upstream-default"' in page
    assert "<rect" in page
    for words in ("In flight", "Rate limit", "Waiting at workers", "Workers"):
        assert words in shown(page)
