"""Making a batch: the check of its file, and the start."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.console.conftest import Console
from tests.support.console import Visitor, shown, visitor
from tests.support.service import FORM, await_end, chat_lines, running_service, wait_until

CHAT = "/v1/chat/completions"


def _check(person: Visitor, data: bytes, *, filename: str = "in <b>.jsonl", **fields: str) -> httpx.Response:
    form = {"csrf": person.csrf(), "endpoint": CHAT, "name": "by hand", **fields}
    return person.http.post("/console/new", data=form, files={"file": (filename, data)})


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


def test_a_batch_of_the_console_holds_no_more_than_one_of_the_api(console: Console, person: Visitor) -> None:
    """C1, A11: its name, its endpoint and the key of its form are bounded, because every list repeats what it holds."""
    client = console.service.client()
    file = client.files.create(file=chat_lines(["one"]), purpose="batch")
    form = {"file_id": file.id, "endpoint": CHAT, "name": "n" * 10_000}
    assert person.post("/console/batches", form | {"endpoint": "/v1/other"}).status_code == 400
    assert person.post("/console/batches", form | {"once": "o" * 256}).status_code == 400
    location = person.post("/console/batches", form).headers["location"]
    assert client.batches.retrieve(location.rpartition("/")[2]).metadata == {"name": "n" * 200}


@pytest.mark.parametrize(
    ("settings", "status"),
    [({"project_storage_bytes": 1000}, 413), ({"metering": True, "free_credits": 0}, 429)],
)
def test_a_demo_that_is_refused_leaves_no_file(settings: dict[str, Any], status: int, tmp_path: Path) -> None:
    """B2, F3: it needs room and money, as any other batch does."""
    with (
        running_service(tmp_path, "http://127.0.0.1:1/v1", **settings) as service,
        visitor(service.port, service.account["api_key"]) as person,
    ):
        assert person.post("/console/demo", {"model": "m"}).status_code == status
        assert "No files." in person.page("/console/files")


def test_creates_count_together_with_uploads(tmp_path: Path) -> None:
    """A14: also that of the demo."""
    with (
        running_service(tmp_path, "http://127.0.0.1:1/v1", max_project_requests=1) as service,
        visitor(service.port, service.account["api_key"]) as person,
        service.connect() as upload,
    ):
        cookie = {"cookie": f"batchline_session={person.session}"}
        upload.sendall(service.head("/console/new", length=1000, headers=FORM | cookie) + b"--edge")
        wait_until(lambda: _check(person, b"").status_code == 429, what="the upload")
        for path in ("/console/demo", "/console/batches", "/console/batches/batch_x/rerun"):
            form = {"endpoint": CHAT, "model": "m", "all": "on"}
            assert person.post(path, form).status_code == 429, path


TABLE = b"word,n\none,1\n<b>two,2\nthree,3\nfour,4\n"


@pytest.mark.rule("F7", "A table becomes requests by a template, and the first three are shown before anything runs.")
def test_the_rows_of_a_table_become_requests(console: Console) -> None:
    account = console.service.new_account("tables")
    with visitor(console.port, account["api_key"]) as person:
        fields = {"prompt": "Say {word} & {n}", "system": "Be {{brief}}", "model": "m"}
        answer = _check(person, TABLE, filename="rows.csv", **fields)
        assert answer.status_code == 200, answer.text
        text = shown(answer.text)
        assert "rows.csv is valid" in text
        for words in ("Say one & 1", "Say <b>two & 2", "Say three & 3", "Be {brief}"):
            assert words in text
        assert "Say four" not in text
        assert len(re.findall(r"<code>file-\w+</code>", person.page("/console/files"))) == 1, "the table is not kept"
        form = dict(re.findall(r'name="(file_id|once|endpoint|name)" value="([^"]*)"', answer.text))
        started = person.post("/console/batches", form).headers["location"]
        await_end(console.service.client(account), started.rpartition("/")[2])
        assert "4 of 4 lines" in shown(person.page(started))
        assert "row-4" in person.page(f"{started}/lines")


@pytest.mark.rule("F7", "Every fault of a table is shown with its line, and nothing of it is kept.")
def test_every_fault_of_a_table_is_shown_and_nothing_is_kept(console: Console) -> None:
    account = console.service.new_account("tables-with-faults")
    with visitor(console.port, account["api_key"]) as person:
        for data, fields, words in (
            (b"a,b\n1\n2,3\n4,5,6\n", {"prompt": "{a}"}, ["Line 2", "1 value for 2", "Line 4", "3 values for 2"]),
            (TABLE, {"prompt": "{wrd}"}, ["no column 'wrd'; it has: word, n"]),
            (TABLE, {"prompt": " "}, ["the text is empty"]),
            (TABLE, {"prompt": "{word", "system": "kept <i>"}, ["a brace has no partner", "kept <i>"]),
            (TABLE, {"prompt": "{word}", "model": ""}, ["Name the model"]),
            (b"word\n\xff\n", {"prompt": "{word}"}, ["not UTF-8"]),
            (b"word\n", {"prompt": "{word}"}, ["has no rows"]),
        ):
            answer = _check(person, data, filename="rows.csv", **({"model": "m"} | fields))
            assert answer.status_code == 400
            for each in words:
                assert each in shown(answer.text), each
        assert "No files." in person.page("/console/files")
