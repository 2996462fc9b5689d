"""Signing in and out, and what a session may do."""

import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlencode

import pytest

from batchline.console import sessions
from batchline.console.sessions import OneTimeLinks, csrf_token
from batchline.domain.ids import key_digest
from batchline.system import SystemRandom
from tests.console.conftest import ADMIN_TOKEN, Console
from tests.support.api_server import CHAT, FORM, Api, Reply, field, file_part, form, read_reply, wait_until
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
        [cookie] = [each for each in answer.headers.get_list("set-cookie") if each.startswith("batchline_session_")]
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
        assert not person.session


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
        assert not person.session
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
        assert not person.session


def test_the_sign_in_form_needs_the_cookie_that_came_with_it(console: Console) -> None:
    with visitor(console.port) as person:
        answer = person.http.post("/console/sign-in", data={"key": console.key, "csrf": csrf_token("")})
        assert answer.status_code == 403
        assert not person.session


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
    secret = person.session
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


@pytest.mark.rule("F7", "A valid key signs in although its address has failed too often.")
def test_a_stranger_behind_the_same_proxy_keeps_nobody_out(tmp_path: Path) -> None:
    with running_service(tmp_path, upstream_url="http://127.0.0.1:1/v1") as service:
        with visitor(service.port) as stranger:
            statuses = [stranger.sign_in("bl-" + "0" * 48).status_code for _ in range(21)]
        assert statuses == [403] * 20 + [429]
        with visitor(service.port) as person:
            person.sign_in(service.account["api_key"])
            assert person.get("/console/batches").status_code == 200


@pytest.mark.rule("F7", "From an address that failed too often, the administrator's token is not even compared.")
def test_the_token_of_the_administrator_cannot_be_guessed_quickly(serve: Callable[..., Api]) -> None:
    api = serve()
    with visitor(api.port) as stranger:
        for _ in range(20):
            assert stranger.sign_in("guess").status_code == 403
        answer = stranger.sign_in(ADMIN_TOKEN)
        assert (answer.status_code, stranger.session) == (429, "")
        assert "Try again in" in answer.text
        stranger.sign_in(api.account.key)
        assert stranger.get("/console/batches").status_code == 200


def _running_batch(api: Api) -> str:
    created = api.create(
        api.account.headers,
        input_file_id=api.upload().json["id"],
        endpoint=CHAT,
        completion_window="24h",
    )
    return str(created.json["id"])


def _rotate(api: Api, _tab: Visitor) -> None:
    api.await_(api.store.rotate_key(api.account.key_id, digest=key_digest("bl-new"), hint="bl-new"))


def _wait_for_the_night(api: Api, _tab: Visitor) -> None:
    api.clock.ahead = 12 * 3600


def _sign_out(_api: Api, tab: Visitor) -> None:
    tab.post("/console/sign-out")


def _close_project(_api: Api, tab: Visitor) -> None:
    tab.post("/console/admin/close")


def _open_another_project(api: Api, tab: Visitor) -> None:
    tab.open_project_by_id(api.new_account("other").project_id)


Change = Callable[[Api, Visitor], None]
_OF_ANYONE = [_sign_out, _rotate, _wait_for_the_night]
_OF_ADMIN = [_sign_out, _close_project, _open_another_project, _wait_for_the_night]


@pytest.mark.rule("F7", "A live page ends with its session, and when another project is opened.")
@pytest.mark.parametrize(
    ("is_admin", "end"), [*((False, end) for end in _OF_ANYONE), *((True, end) for end in _OF_ADMIN)]
)
def test_a_live_page_ends_with_its_session(
    serve: Callable[..., Api], monkeypatch: pytest.MonkeyPatch, is_admin: bool, end: Change
) -> None:
    monkeypatch.setattr(sessions, "_SESSION_CHECK_SECONDS", 0.01)
    api = serve()
    batch_id = _running_batch(api)
    with visitor(api.port) as person:
        person.sign_in(ADMIN_TOKEN if is_admin else api.account.key)
        if is_admin:
            person.open_project_by_id(api.account.project_id)
        with person.http.stream("GET", f"/console/batches/{batch_id}/events") as stream:
            parts = stream.iter_text()
            assert "event: live" in next(parts)
            end(api, person)
            assert "".join(parts).endswith("event: end\ndata: {}\n\n")


def _hold_form_back(api: Api, person: Visitor, path: str, body: bytes, headers: dict[str, str], then: Change) -> Reply:
    """Send a form, and call ``then`` before its last byte."""
    sent = {"host": "test", "cookie": f"batchline_session={person.session}", "content-length": str(len(body))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in (sent | headers).items())
    api.used.clear()
    with api.connect() as sock:
        sock.sendall(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body[:-1])
        wait_until(lambda: bool(api.used))
        then(api, person)
        sock.sendall(body[-1:])
        return read_reply(sock)


def _forms(batch_id: str, csrf: str) -> dict[str, tuple[bytes, dict[str, str]]]:
    """Return a form that cancels a batch, and one that uploads a file, by their paths."""
    upload = form(field("csrf", csrf), field("endpoint", CHAT), file_part(chat_lines(["one"])))
    plain = {"content-type": "application/x-www-form-urlencoded"}
    return {
        f"/console/batches/{batch_id}/cancel": (urlencode({"csrf": csrf}).encode(), plain),
        "/console/new": (upload, dict(FORM)),
    }


@pytest.mark.rule("F7", "A form that arrives after the end of its session does nothing.")
@pytest.mark.parametrize("end", _OF_ANYONE)
@pytest.mark.parametrize("number", [0, 1])
def test_a_form_that_is_held_back_does_not_outlive_its_session(
    serve: Callable[..., Api], monkeypatch: pytest.MonkeyPatch, end: Change, number: int
) -> None:
    monkeypatch.setattr(sessions, "_TRUSTED_SECONDS", 0)
    api = serve()
    batch_id = _running_batch(api)
    with visitor(api.port, api.account.key) as person:
        path, (body, headers) = list(_forms(batch_id, person.csrf()).items())[number]
        reply = _hold_form_back(api, person, path, body, headers, end)
    assert (reply.status, reply.headers["location"]) == (303, "/console/sign-in")
    assert api.ask("SELECT status FROM batches") == "in_progress"
    assert api.ask("SELECT count(*) FROM files WHERE state = 'stored'") == 1


@pytest.mark.rule("F7", "A form does nothing in another project than that of its page.")
@pytest.mark.parametrize("number", [0, 1])
def test_a_form_that_is_held_back_does_nothing_in_another_project(
    serve: Callable[..., Api], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(sessions, "_TRUSTED_SECONDS", 0)
    api = serve()
    batch_id = _running_batch(api)
    with visitor(api.port) as person:
        person.sign_in(ADMIN_TOKEN)
        person.open_project_by_id(api.account.project_id)
        path, (body, headers) = list(_forms(batch_id, person.csrf()).items())[number]
        reply = _hold_form_back(api, person, path, body, headers, _open_another_project)
    assert (reply.status, b"another one was opened meanwhile" in reply.body) == (409, True)
    assert api.ask("SELECT status FROM batches") == "in_progress"
    assert api.ask("SELECT count(*) FROM files WHERE state = 'stored'") == 1
