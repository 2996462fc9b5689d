"""Every page: what it may load, what it shows of strangers' text, and that another project sees nothing of it."""

import json
import re
from collections.abc import Callable, Iterator

import pytest

from batchline.domain.errors import Damaged
from tests.console.conftest import Console
from tests.support.api_server import Api, Faulty
from tests.support.console import ADMIN_PAGES, PAGES, Visitor, shown, visitor
from tests.support.service import await_end, chat_lines, submit

SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(1)>"
BIDI, ANSI, NUL = "a\u202egpj.exe", "\x1b[31mred\x1b[0m", "n\x00l"
LONG_WORD = "w" * 1_000_000
HOSTILE = f"{SCRIPT}{BIDI}{ANSI}{NUL}\u2066\u200b\"'"


def pages_of(console: Console) -> Iterator[str]:
    """Yield the path of every page."""
    yield from PAGES
    one = f"/console/batches/{console.batch_id}"
    yield from (
        one,
        f"{one}/lines",
        f"{one}/lines/1",
        f"{one}/lines/61",
        "/console/batches?search=nothing",
        "/console/x",
    )


@pytest.mark.rule("F7", "Pages load and run only their own files.")
def test_no_page_may_load_or_run_anything_but_its_own_files(console: Console, person: Visitor) -> None:
    with visitor(console.port, console.admin_token) as admin:
        answers = {path: admin.get(path) for path in ADMIN_PAGES}
    answers |= {path: person.get(path) for path in ("/console/sign-in", *pages_of(console))}
    for path, answer in answers.items():
        policy = answer.headers.get("content-security-policy", "")
        if answer.status_code == 303:
            continue
        assert "default-src 'none'" in policy, path
        assert "unsafe" not in policy, path
        assert "frame-ancestors 'none'" in policy, path
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert (
            re.findall(r"<script(?! type=\"module\" src=\"/console/assets/console.js\"></script>)", answer.text) == []
        )
        assert re.findall(r"<[^>]*\s(style|on\w+)=", answer.text) == []
        assert re.findall(r"(?:src|href|action)=\"(?:https?:)?//", answer.text) == []


def test_the_first_page_is_small(person: Visitor) -> None:
    """Page, stylesheet, script and icon together are under 100 KB."""
    paths = ["/console/batches", *(f"/console/assets/{name}" for name in ("console.css", "console.js", "icon.svg"))]
    assert sum(len(person.get(path).content) for path in paths) < 100_000


def test_an_unknown_asset_does_not_exist(person: Visitor) -> None:
    assert person.get("/console/assets/../pages.py").status_code == 404
    assert person.get("/console/assets/base.html").status_code == 404


@pytest.mark.rule("F7", "What another project has does not exist.")
def test_what_another_project_has_does_not_exist(console: Console) -> None:
    """A8: every page and every action answers as for an id that names nothing."""
    absent = console.batch_id[:-4] + "0000"
    client = console.service.client()
    file_id = str(client.batches.retrieve(console.batch_id).input_file_id)
    with visitor(console.port, console.stranger["api_key"]) as stranger:
        for path in PAGES:
            assert console.batch_id not in stranger.page(path)
        token = stranger.csrf()
        for suffix in ("", "/lines", "/lines/1", "/merged", "/events"):
            found, missing = (stranger.get(f"/console/batches/{each}{suffix}") for each in (console.batch_id, absent))
            assert found.status_code == missing.status_code == 404, suffix
            assert found.text.replace(console.batch_id, "ID") == missing.text.replace(absent, "ID")
            assert found.headers["content-type"].startswith("text/html"), suffix
        for action in ("cancel", "release", "rerun"):
            form = {"all": "on"}
            assert stranger.post(f"/console/batches/{console.batch_id}/{action}", form, csrf=token).status_code == 404
        assert stranger.get(f"/console/files/{file_id}/content").status_code == 404
        assert stranger.post(f"/console/files/{file_id}/delete", csrf=token).status_code == 404
        form = {"file_id": file_id, "endpoint": "/v1/chat/completions"}
        assert stranger.post("/console/batches", form, csrf=token).status_code == 404
        assert f"row-{console.batch_id}" not in stranger.page(f"/console/batches?search={console.batch_id}")


@pytest.fixture(scope="session")
def hostile(console: Console) -> str:
    """Return a batch whose every text is hostile: name, file name, custom_ids, prompts, model and error messages."""
    client = console.service.client()
    lines = [
        {
            "custom_id": f"{HOSTILE}{n}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": HOSTILE[:200], "messages": [{"role": "user", "content": prompt}]},
        }
        for n, prompt in enumerate((HOSTILE, LONG_WORD, f"{HOSTILE}[[status=400]]"))
    ]
    data = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    file = client.files.create(file=(f"{SCRIPT}{BIDI}.jsonl", data), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"name": HOSTILE, SCRIPT: BIDI},
    )
    return await_end(client, made.id).id


@pytest.mark.rule("F7", "Text of others does nothing.")
def test_the_text_of_strangers_is_inert_on_every_page(console: Console, person: Visitor, hostile: str) -> None:
    one = f"/console/batches/{hostile}"
    paths = ["/console/batches", one, f"{one}/lines", *(f"{one}/lines/{n}" for n in (1, 2, 3)), "/console/files"]
    pages = {path: person.page(path) for path in (*paths, "/console/usage")}
    search = person.get("/console/search", params={"custom_id": f"{HOSTILE}0"})
    pages["search"] = search.text
    for path, page in pages.items():
        assert "<script>alert" not in page, path
        assert "<img" not in page, path
        assert not set(page) & set("\u202e\u2066\u200b\x1b\x00"), path
        assert len(page) < 2_000_000, path
    assert "⟦U+202E⟧" in shown(person.page(one))
    assert "␛[31mred" in shown(person.page(f"{one}/lines/1"))


def test_a_storage_that_is_gone_is_an_error_page_and_not_json(console: Console, person: Visitor) -> None:
    answer = person.get("/console/batches/batch_00000000000000000000000000")
    assert answer.status_code == 404
    assert answer.headers["content-type"].startswith("text/html")
    assert "Batch not found" in answer.text


def test_an_address_that_names_no_page_is_an_error_page_and_not_json(console: Console, person: Visitor) -> None:
    answer = person.get("/console/x/y")
    assert answer.status_code == 404
    assert answer.headers["content-type"].startswith("text/html")
    assert "There is no page /console/x/y" in answer.text
    with visitor(console.port) as nobody:
        assert nobody.get("/console/x").headers["location"] == "/console/sign-in?next=/console/x"


@pytest.mark.parametrize("error", [Damaged("key"), RuntimeError("a bug")])
def test_what_breaks_a_page_or_a_download_is_an_error_page_and_not_json(
    serve: Callable[..., Api], error: Exception
) -> None:
    api = serve(wrap_store=lambda store: Faulty(store, lineage=error, batches=error))
    with visitor(api.port, api.account.key) as person:
        for path in ("/console/batches", "/console/batches/batch_x/merged"):
            answer = person.get(path)
            assert answer.status_code == 500, path
            assert answer.headers["content-type"].startswith("text/html"), path
            assert "Something went wrong" in answer.text
            assert "a bug" not in answer.text


def test_results_that_cannot_be_merged_yet_are_an_error_page_and_not_json(console: Console) -> None:
    account = console.service.new_account("hasty")
    client = console.service.client(account)
    batch_id = submit(client, chat_lines(["[[hang]]"])).id
    with visitor(console.port, account["api_key"]) as person:
        answer = person.get(f"/console/batches/{batch_id}/merged")
        assert (answer.status_code, "has not ended" in answer.text) == (409, True)
        assert answer.headers["content-type"].startswith("text/html")
    client.batches.cancel(batch_id)
