"""Making a batch: the check of its file, and the start."""

import re

import httpx

from tests.console.conftest import Console
from tests.support.console import Visitor, shown, visitor
from tests.support.service import await_end, chat_lines

CHAT = "/v1/chat/completions"


def _check(person: Visitor, data: bytes, **fields: str) -> httpx.Response:
    form = {"csrf": person.csrf(), "endpoint": CHAT, "name": "by hand", **fields}
    return person.http.post("/console/new", data=form, files={"file": ("in <b>.jsonl", data)})


def test_a_file_is_checked_and_then_started(console: Console, person: Visitor) -> None:
    answer = _check(person, chat_lines(["one", "two", "three", "four"]), hold="on")
    assert answer.status_code == 200, answer.text
    text = shown(answer.text)
    assert "in <b>.jsonl is valid" in text
    assert "three" in text
    assert "four" not in text
    fields = dict(re.findall(r'name="(file_id|once|endpoint|name|hold)" value="([^"]*)"', answer.text))
    started = [person.post("/console/batches", fields).headers["location"] for _ in range(2)]
    assert started[0] == started[1], "a form that is sent twice makes one batch"
    await_end(console.service.client(), started[0].rpartition("/")[2])
    assert "4 of 4 lines" in shown(person.page(started[0]))


def test_every_fault_is_shown_with_its_line_and_nothing_is_kept(console: Console) -> None:
    account = console.service.new_account("careless")
    good = chat_lines(["one"])
    with visitor(console.port, account["api_key"]) as person:
        answer = _check(person, good + b"not json\n" + good + b'{"custom_id":"<script>"}\n')
        assert answer.status_code == 400
        text = shown(answer.text)
        for line in ("Line 2", "Line 3", "Line 4"):
            assert line in text
        assert "<script>" not in answer.text.replace('<script type="module"', "")
        assert "No files." in person.page("/console/files")


def test_what_is_no_file_or_no_endpoint_is_refused(console: Console, person: Visitor) -> None:
    assert _check(person, b"").status_code == 400
    assert _check(person, chat_lines(["one"]), endpoint="/v1/other").status_code == 400
    assert person.http.post("/console/new", data={"csrf": person.csrf()}).status_code == 400
