"""The table of lines and the page of one line."""

import json
import re

import pytest

from batchline.console.lines import preview_of, view_of
from batchline.pipeline.line_table import LineState, ShownLine
from tests.console.conftest import Console
from tests.support.console import Visitor, shown, visitor
from tests.support.service import await_end, chat_lines, submit

_LINE = re.compile(r"/lines/(\d+)\"")


@pytest.mark.rule("F7", "Lines are in the order of the input.")
def test_lines_are_in_the_order_of_the_input_and_pages_are_exact(console: Console, person: Visitor) -> None:
    base = f"/console/batches/{console.batch_id}/lines"
    pages = [person.page(f"{base}?page={n}") for n in (1, 2, 3)]
    assert [int(number) for page in pages for number in _LINE.findall(page)] == list(range(1, 63))
    text = shown(pages[0])
    assert "62 lines, page 1 of 3" in text
    assert "question 0" in text


@pytest.mark.parametrize(
    ("query", "lines"),
    [
        ("status=failed", [61, 62]),
        ("code=invalid_request_error", [61, 62]),
        ("code=nothing", []),
        ("status=waiting", []),
        ("search=61", [62]),
        ("line=30", list(range(26, 51))),
        ("line=x", list(range(1, 26))),
        ("page=99999", list(range(51, 63))),
        ("page=-1", list(range(1, 26))),
    ],
)
def test_lines_are_found(console: Console, person: Visitor, query: str, lines: list[int]) -> None:
    page = person.page(f"/console/batches/{console.batch_id}/lines?{query}")
    assert [int(number) for number in _LINE.findall(page)] == lines


def test_a_line_shows_its_request_and_its_answer(console: Console, person: Visitor) -> None:
    text = shown(person.page(f"/console/batches/{console.batch_id}/lines/7"))
    assert "question 6" in text
    assert "scripted answer to: question 6" in text
    failed = shown(person.page(f"/console/batches/{console.batch_id}/lines/61"))
    assert "invalid_request_error" in failed
    for number in ("0", "63", "x", "9" * 30):
        assert person.get(f"/console/batches/{console.batch_id}/lines/{number}").status_code == 404


def test_lines_of_a_running_batch_appear_as_they_are_recorded(console: Console, person: Visitor) -> None:
    client = console.service.client()
    batch_id = submit(client, chat_lines(["one", "[[hang]]", "three"])).id
    base = f"/console/batches/{batch_id}/lines"
    assert _LINE.findall(person.page(base)) == ["1", "2", "3"]
    while _LINE.findall(person.page(f"{base}?status=succeeded")) != ["1", "3"]:
        pass
    assert _LINE.findall(person.page(f"{base}?status=waiting")) == ["2"]
    client.batches.cancel(batch_id)


def test_without_the_input_file_the_answers_are_still_shown(console: Console) -> None:
    account = console.service.new_account("tidy")
    client = console.service.client(account)
    batch = await_end(client, submit(client, chat_lines(["one", "two"])).id)
    with visitor(console.port, account["api_key"]) as person:
        base = f"/console/batches/{batch.id}/lines"
        assert "scripted answer to: two" in shown(person.page(base))
        client.files.delete(batch.input_file_id)
        text = shown(person.page(base))
        assert "The input file was deleted" in text
        assert "scripted answer to: two" in text
        client.files.delete(str(batch.output_file_id))
        assert person.get(f"{base}/1").status_code in {200, 410}


@pytest.mark.parametrize("line", [b"", b"not json", b"[1]", b'{"body":{"messages":7}}', b"\xff\xfe", b"[" * 100_000])
def test_a_line_that_cannot_be_parsed_is_shown_as_it_is(line: bytes) -> None:
    found = view_of(_shown(line, result=line))
    assert found.request.conversation.messages == found.result.conversation.messages == []
    assert found.request.raw.text == found.result.raw.text == line.decode("utf-8", "replace")


def test_parts_of_a_message_are_joined() -> None:
    line = b'{"body":{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url"}]}]}}'
    messages = view_of(_shown(line)).request.conversation.messages
    assert [(each.role, each.text) for each in messages] == [("user", "a\n[image_url]")]


@pytest.mark.parametrize("depth", [60, 600])
def test_a_line_that_is_huge_when_it_is_indented_is_cut(depth: int) -> None:
    """One request for a page must not hold up all others."""
    line = b'{"a":' * depth + b"[" + b",".join([b"0"] * 100_000) + b"]" + b"}" * depth
    found = view_of(_shown(line, result=line))
    assert len(found.request.json.text) <= 200_000
    assert found.request.json.notices
    assert found.result.json.notices


def test_a_list_says_how_large_a_request_is_that_it_does_not_read_whole() -> None:
    line = ShownLine(
        number=1, custom_id="", state=LineState.WAITING, code=None, request=b'{"a', result=None, request_bytes=700_000
    )
    assert preview_of(line).request == "a request of 700.0 KB"
    assert view_of(line).request.raw.notices == ["The first 3 B of 700.0 KB were read."]


def test_a_line_with_a_large_image_is_shown_as_a_chat_and_says_what_is_shortened(console: Console) -> None:
    """A line may have 1 MiB by default."""
    account = console.service.new_account("pictures")
    client = console.service.client(account)
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * 700_000}"}}
    line = _line("with an image") | {
        "body": {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "See:"}, image]}]}
    }
    batch = await_end(client, submit(client, json.dumps(line).encode() + b"\n").id)
    with visitor(console.port, account["api_key"]) as person:
        base = f"/console/batches/{batch.id}/lines"
        assert re.search(r"a request of 700\.\d KB", person.page(base))
        page = person.page(f"{base}/1")
        assert "See:\n[image_url: image/png, 700.0 KB]" in shown(page)
        assert "Long strings are shortened." in page
        assert re.search(r"Cut after 200,000 of 700,\d+ characters", page)
        assert f'href="/console/files/{batch.input_file_id}/content" download>the file' in page


def test_the_line_that_a_person_jumps_to_is_marked(console: Console, person: Visitor) -> None:
    page = person.page(f"/console/batches/{console.batch_id}/lines?line=30")
    assert re.findall(r'<tr id="line-(\d+)" class="wanted"', page) == ["30"]


def _shown(line: bytes, *, result: bytes | None = None) -> ShownLine:
    return ShownLine(number=1, custom_id="", state=LineState.SUCCEEDED, code=None, request=line, result=result)


def _line(custom_id: str) -> dict[str, object]:
    body = {"model": "m", "messages": [{"role": "user", "content": f"not {custom_id}x"}]}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


@pytest.mark.rule("F7", "A line is found by its custom_id in the input files of recent batches, of the project alone.")
def test_a_line_is_found_by_its_custom_id_in_all_batches(console: Console) -> None:
    account = console.service.new_account("finding")
    client = console.service.client(account)
    odd = 'ü/"x\u2028\\'
    inputs = [
        chat_lines(["a", "b"]) + b"\n\n" + json.dumps(_line(odd)).encode() + b"\n",
        b"\xef\xbb\xbf" + json.dumps(_line(odd), ensure_ascii=False).replace("/", "\\/").encode() + b"\n",
        json.dumps(_line(f"{odd}x")).encode() + b"\n",
    ]
    made = [await_end(client, submit(client, data).id) for data in inputs]
    with visitor(console.port, account["api_key"]) as person:
        page = person.get("/console/search", params={"custom_id": odd}).text
        paths = re.findall(r"/console/batches/(batch_\w+)/lines/(\d+)", page)
        assert paths == [(made[1].id, "1"), (made[0].id, "3")]
        assert "These are all batches" in page
        assert "of 3 batches were read" in shown(page)
        client.files.delete(str(made[0].input_file_id))
        page = person.get("/console/search", params={"custom_id": odd}).text
        assert "1 more have no input file" in shown(page)
        older = person.get("/console/search", params={"custom_id": odd, "after": made[1].id})
        assert "No line has this custom_id" in older.text
        assert person.get("/console/search", params={"custom_id": odd, "after": "batch_x"}).status_code == 404
    with visitor(console.port, console.stranger["api_key"]) as stranger:
        assert "No line has" in stranger.get("/console/search", params={"custom_id": odd}).text
        params = {"custom_id": odd, "after": made[1].id}
        assert stranger.get("/console/search", params=params).status_code == 404
