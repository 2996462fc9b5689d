"""Signing in and out, and what a session may do."""

import re
from hashlib import sha256
from pathlib import Path

import pytest

from batchline.console.sessions import FailureLimit, OneTimeLinks, csrf_token
from batchline.domain.errors import RateLimited
from batchline.system import SystemRandom
from tests.console.conftest import Console
from tests.support.clocks import SettableClock
from tests.support.console import PAGES, Visitor, visitor
from tests.support.service import chat_lines, running_service


@pytest.mark.rule("F7", "Without a session, every page leads to the sign-in.")
def test_a_visitor_without_a_session_is_sent_to_sign_in(console: Console) -> None:
    with visitor(console.port) as stranger:
        assert stranger.get("/").headers["location"] == "/console/batches"
        for path in (*PAGES, f"/console/batches/{console.batch_id}", f"/console/batches/{console.batch_id}/lines"):
            answer = stranger.get(path)
            assert (answer.status_code, answer.headers["location"].partition("?")[0]) == (303, "/console/sign-in")
            assert console.batch_id not in answer.text


@pytest.mark.rule("F7", "The cookie is HttpOnly and SameSite=Strict.")
def test_a_key_opens_a_session_in_a_cookie_that_scripts_and_other_sites_cannot_use(console: Console) -> None:
    with visitor(console.port) as person:
        answer = person.sign_in(console.key)
        [cookie] = [each for each in answer.headers.get_list("set-cookie") if each.startswith("batchline_session=")]
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
        assert "Secure" not in cookie
        assert console.key not in cookie
        assert person.get("/console/batches").status_code == 200


@pytest.mark.rule("F7", "Behind TLS the cookie is Secure.")
def test_behind_tls_the_cookie_is_secure(console: Console) -> None:
    with visitor(console.port) as person:
        person.http.headers["x-forwarded-proto"] = "https"
        answer = person.get("/console/sign-in")
        assert "Secure" in answer.headers["set-cookie"]


def test_a_wrong_key_opens_nothing(console: Console) -> None:
    with visitor(console.port) as person:
        answer = person.sign_in("bl-" + "0" * 48)
        assert answer.status_code == 403
        assert "no valid key" in answer.text
        assert "batchline_session" not in person.http.cookies


def test_a_person_gets_to_the_page_that_was_asked_for_also_after_a_wrong_key(console: Console) -> None:
    with visitor(console.port) as person:
        answer = person.get(person.get("/console/files").headers["location"])
        for key in ("bl-wrong", console.key):
            fields = dict(re.findall(r'name="(csrf|next)" value="([^"]*)"', answer.text))
            answer = person.http.post("/console/sign-in", data={**fields, "key": key})
        assert answer.headers["location"] == "/console/files"


def test_a_key_that_may_not_read_opens_nothing(console: Console) -> None:
    made = console.service.keys("create", "--json", "--scope", "inference")
    key = re.findall(r"bl-[0-9a-f]{48}", made)[0]
    with visitor(console.port) as person:
        answer = person.sign_in(key)
        assert (answer.status_code, "scope read" in answer.text) == (403, True)


@pytest.mark.rule("F7", "A session ends with its key.")
def test_a_session_ends_with_its_key(console: Console) -> None:
    account = console.service.new_account("default")
    for end in (("rotate",), ("revoke",)):
        with visitor(console.port) as person:
            key = account["api_key"]
            person.sign_in(key)
            assert person.get("/console/batches").status_code == 200
            printed = console.service.keys(*end, account["key_id"])
            assert person.get("/console/batches").status_code == 303
            account["api_key"] = next(iter(re.findall(r"bl-[0-9a-f]{48}", printed)), "")


@pytest.mark.rule("F7", "Signing out ends the session.")
def test_signing_out_ends_the_session_and_not_only_the_cookie(console: Console) -> None:
    with visitor(console.port, console.key) as person:
        cookies = dict(person.http.cookies)
        assert person.post("/console/sign-out").headers["location"] == "/console/sign-in"
        assert "batchline_session" not in person.http.cookies
        person.http.cookies.update(cookies)
        assert person.get("/console/batches").status_code == 303


@pytest.mark.rule("F7", "A form without its token does nothing.")
def test_a_form_without_the_token_of_its_session_does_nothing(console: Console, person: Visitor) -> None:
    with visitor(console.port, console.stranger["api_key"]) as stranger:
        foreign = stranger.csrf()
    own = person.csrf()
    files = len(re.findall("/delete", person.page("/console/files")))
    posts = ["/console/demo", "/console/batches", f"/console/batches/{console.batch_id}/rerun", "/console/sign-out"]
    posts += [f"/console/batches/{console.batch_id}/cancel", "/console/webhooks", "/console/files/file-x/delete"]
    for path in posts:
        for token in ("", "0" * 64, foreign):
            assert person.post(path, csrf=token).status_code == 403, path
        person.http.headers["sec-fetch-site"] = "cross-site"
        assert person.http.post(path, data={"csrf": own}).status_code == 403, path
        del person.http.headers["sec-fetch-site"]
    upload = {"file": ("in.jsonl", b"{}")}
    assert person.http.post("/console/new", data={"csrf": foreign}, files=upload).status_code == 403
    assert len(re.findall("/delete", person.page("/console/files"))) == files


def test_refusals_are_counted_by_their_reason(console: Console, person: Visitor) -> None:
    def counted(reason: str) -> float:
        text = console.service.call("GET", "/metrics").body.decode()
        [value] = re.findall(rf'^batchline_console_refusals_total{{reason="{reason}"}} (\S+)', text, re.MULTILINE)
        return float(value)

    before = {reason: counted(reason) for reason in ("forged_form", "wrong_key", "not_found")}
    person.post("/console/demo", csrf="0" * 64)
    person.get("/console/batches/batch_x")
    with visitor(console.port) as stranger:
        stranger.sign_in("bl-wrong")
    assert {reason: counted(reason) - count for reason, count in before.items()} == dict.fromkeys(before, 1)


def test_the_sign_in_form_needs_its_own_token(console: Console) -> None:
    with visitor(console.port) as person:
        person.get("/console/sign-in")
        answer = person.http.post("/console/sign-in", data={"key": console.key, "csrf": "0" * 64})
        assert answer.status_code == 403
        assert "batchline_session" not in person.http.cookies


def test_the_sign_in_form_needs_the_cookie_that_came_with_it(console: Console) -> None:
    with visitor(console.port) as person:
        answer = person.http.post("/console/sign-in", data={"key": console.key, "csrf": csrf_token("")})
        assert answer.status_code == 403
        assert "batchline_session" not in person.http.cookies


@pytest.mark.rule("F7", "A form has at most 64 KiB: a stranger's is held in memory too.")
def test_a_form_of_a_stranger_takes_little_memory(console: Console) -> None:
    with visitor(console.port) as stranger:
        assert stranger.sign_in("k" * 60 * 1024).status_code == 403
        answer = stranger.sign_in("k" * 64 * 1024)
        assert (answer.status_code, "The form exceeds 65536 bytes" in answer.text) == (413, True)


@pytest.mark.parametrize("to", ["https://example.com/", "//example.com", "/console/../v1", "/console/\\example.com"])
def test_signing_in_never_leads_to_another_site(console: Console, to: str) -> None:
    with visitor(console.port) as person:
        assert person.sign_in(console.key, next=to).headers["location"] == "/console/batches"


def test_a_download_counts_as_one_read(tmp_path: Path) -> None:
    """A14: a key that may make one read in a second may make two at once after a pause."""
    with running_service(tmp_path, "http://127.0.0.1:1/v1", max_key_reads_per_second=1) as service:
        file = service.client().files.create(file=chat_lines(["one"]), purpose="batch")
        with visitor(service.port, service.account["api_key"]) as person:
            reads = [person.get(f"/console/files/{file.id}/content").status_code for _ in range(2)]
    assert reads == [200, 200]


@pytest.mark.rule("F7", "Forms need the scope batch.")
def test_a_read_only_key_sees_pages_without_buttons_and_changes_nothing(console: Console) -> None:
    made = console.service.keys("create", "--json", "--scope", "read")
    key = re.findall(r"bl-[0-9a-f]{48}", made)[0]
    with visitor(console.port, key) as person:
        assert "/rerun" not in person.page("/console/batches")
        token = person.csrf("/console/batches")
        assert person.post("/console/demo", csrf=token).status_code == 403
        assert person.post("/console/sign-out", csrf=token).headers["location"] == "/console/sign-in"


@pytest.mark.rule("F7", "The database holds only the hash of a session.")
@pytest.mark.parametrize("console", ["sqlite"], indirect=True)
def test_the_database_holds_no_secret_of_a_session(console: Console, person: Visitor) -> None:
    """A copy of the database signs nobody in."""
    folder = console.service.data_dir
    secret = person.http.cookies["batchline_session"]
    stored = b"".join(path.read_bytes() for path in folder.iterdir() if path.name.startswith("batchline.sqlite"))
    assert sha256(secret.encode()).digest() in stored
    assert secret.encode() not in stored


@pytest.mark.rule("F7", "The link of serve works once, within an hour.")
def test_a_link_works_once_and_not_for_ever() -> None:
    clock = SettableClock()
    links = OneTimeLinks(random=SystemRandom(), clock=clock)
    first, second = (links.new_path().partition("once=")[2] for _ in range(2))
    assert links.use(first)
    assert not links.use(first)
    clock.advance(3601)
    assert not links.use(second)


@pytest.mark.rule("F7", "Failed attempts to sign in are limited.")
def test_an_address_that_fails_often_has_to_wait() -> None:
    clock = SettableClock()
    limit = FailureLimit(clock=clock)
    for _ in range(20):
        limit.count("one")
    with pytest.raises(RateLimited):
        limit.count("one")
    limit.count("another")
    clock.advance(61)
    limit.count("one")


@pytest.mark.rule("F7", "A valid key signs in although its address has failed too often.")
def test_a_stranger_behind_the_same_proxy_keeps_nobody_out(tmp_path: Path) -> None:
    with running_service(tmp_path, upstream_url="http://127.0.0.1:1/v1") as service:
        with visitor(service.port) as stranger:
            statuses = [stranger.sign_in("bl-" + "0" * 48).status_code for _ in range(21)]
        assert statuses == [403] * 20 + [429]
        with visitor(service.port) as person:
            person.sign_in(service.account["api_key"])
            assert person.get("/console/batches").status_code == 200
