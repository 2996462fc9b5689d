"""The list of batches, one batch, and what a person can do to it."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from batchline.domain.embedded_model import EMBEDDED_MODEL
from tests.console.conftest import BROKEN, Console
from tests.support.api_server import Api, Faulty
from tests.support.console import Visitor, shown, visitor
from tests.support.service import CHAT, await_end, chat_lines, submit

_ROW = re.compile(r'id="row-(batch_\w+)"')


def _named(console: Console, name: str, prompts: list[str]) -> str:
    client = console.service.client()
    file = client.files.create(file=chat_lines(prompts), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"name": name}
    ).id


def test_a_new_project_sees_how_to_begin_and_can_run_the_demo(console: Console) -> None:
    account = console.service.new_account("newcomer")
    with visitor(console.port, account["api_key"]) as person:
        page = person.page("/console/batches")
        assert "Your first batch" in page
        assert '<input id="model" name="model"' in page, "the model is at an upstream"
        assert person.post("/console/demo").status_code == 400
        form = {"model": "m", "once": _once(page)}
        batch, again = (person.post("/console/demo", form).headers["location"] for _ in range(2))
        assert batch == again, "a form that is sent twice makes one batch"
        await_end(console.service.client(account), batch.rpartition("/")[2])
        assert len(person.page("/console/files").split("demo.jsonl")) == 2
        assert "8 of 8 lines" in shown(person.page(batch))
        assert "Demo: capitals" in person.page("/console/batches")


def _once(page: str) -> str:
    [once] = set(re.findall(r'name="once" value="([0-9a-f]+)"', page))
    return str(once)


def test_the_demo_runs_on_the_embedded_model_if_there_is_one(serve: Callable[..., Api]) -> None:
    api = serve(mocked=False)
    with visitor(api.port, api.account.key) as person:
        page = person.page("/console/batches")
        assert "the small model that is built in" in page
        assert 'name="model"' not in page
        assert person.post("/console/demo").status_code == 303
    assert api.ask("SELECT model FROM shards") == EMBEDDED_MODEL


def test_the_demo_never_chooses_a_model_that_costs_money_or_classifies(serve: Callable[..., Api]) -> None:
    models = {
        "iab": {"upstream": "classifier", "kind": "classification"},
        "paid": {"output_price": 1, "name": EMBEDDED_MODEL},
        "other": {"upstream": "far"},
    }
    api = serve(mocked=False, models=models, upstreams={"far": {"url": "http://127.0.0.1:1/v1"}})
    with visitor(api.port, api.account.key) as person:
        page = person.page("/console/batches")
        assert re.findall(r'<option value="(\w+)"></option>', page) == ["paid", "other"]
        assert person.post("/console/demo").status_code == 400
        assert person.post("/console/demo", {"model": "paid"}).status_code == 303


def test_pages_are_exact_and_filters_find(console: Console) -> None:
    account = console.service.new_account("pager")
    client = console.service.client(account)
    made = [submit(client, chat_lines([f"one {n}"])).id for n in range(28)]
    for batch_id in made:
        await_end(client, batch_id)
    with visitor(console.port, account["api_key"]) as person:
        first = person.page("/console/batches")
        older = re.findall(r'href="(/console/batches\?after=[^"]+)"', first)[0]
        seen = _ROW.findall(first) + _ROW.findall(person.page(older))
        assert seen == list(reversed(made))
        for query, count in (
            (f"search={made[3]}", 1),
            (f"search={made[3].lower()}", 1),
            ("status=completed", 25),
            ("status=failed", 0),
            ("model=m", 25),
            ("model=other", 0),
            ("age=hour", 25),
            ("status=nonsense", 25),
        ):
            assert len(_ROW.findall(person.page(f"/console/batches?{query}"))) == count, query
        assert person.get("/console/batches?after=batch_none").status_code == 400


def test_a_batch_is_found_by_its_name(console: Console, person: Visitor) -> None:
    batch_id = _named(console, "Invoices of May", ["one"])
    await_end(console.service.client(), batch_id)
    assert _ROW.findall(person.page("/console/batches?search=invoices+of")) == [batch_id]
    for path in (
        f"/console/batches/{batch_id}",
        f"/console/batches/{batch_id}/lines",
        "/console/search?custom_id=line-0",
    ):
        assert "Invoices of May" in person.page(path), path


def test_a_page_shows_counts_errors_and_what_to_do(console: Console, person: Visitor) -> None:
    text = shown(person.page(f"/console/batches/{console.batch_id}"))
    assert "62 of 62 lines" in text
    assert "2 failed" in text
    assert "invalid_request_error" in text
    assert "with a patch of the rerun" in text
    for step in ("created", "in progress", "finalizing", "completed"):
        assert step in text


def test_downloads_are_those_of_the_api(console: Console, person: Visitor) -> None:
    page = person.page(f"/console/batches/{console.batch_id}")
    client = console.service.client()
    batch = client.batches.retrieve(console.batch_id)
    for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        assert f"/console/files/{file_id}/content" in page
        answer = person.get(f"/console/files/{file_id}/content")
        assert answer.content == client.files.content(str(file_id)).content
        assert answer.headers["content-disposition"].startswith("attachment")
    merged = person.get(f"/console/batches/{console.batch_id}/merged")
    assert len(merged.text.splitlines()) == 62


def test_failed_lines_run_again_with_a_patch(console: Console, person: Visitor) -> None:
    patch = json.dumps({"messages": [{"role": "user", "content": "mended"}]})
    form = {"codes": ["invalid_request_error"], "patch": patch, "name": "second try"}
    answer = person.post(f"/console/batches/{console.batch_id}/rerun", form)
    assert answer.status_code == 303, answer.text
    child = answer.headers["location"]
    await_end(console.service.client(), child.rpartition("/")[2])
    assert "2 of 2 lines" in shown(person.page(child))
    assert "second try" in person.page(child)
    assert child in person.page(f"/console/batches/{console.batch_id}")
    refused = person.post(f"/console/batches/{console.batch_id}/rerun", {"all": "on", "patch": "[1]"})
    assert (refused.status_code, "[1]" in refused.text) == (400, True)
    assert f'href="/console/batches/{console.batch_id}">Back to the form' in refused.text


def test_no_line_runs_again_if_no_code_is_ticked(console: Console, person: Visitor) -> None:
    """It would cost what nobody asked for."""
    before = console.service.client().batches.list(limit=1).data[0].id
    answer = person.post(f"/console/batches/{console.batch_id}/rerun", {"name": "nothing"})
    assert (answer.status_code, "Tick at least one code" in answer.text) == (400, True)
    assert console.service.client().batches.list(limit=1).data[0].id == before


def test_a_table_of_batches_names_its_project_with_rows_and_without(console: Console, person: Visitor) -> None:
    """A page that is updated by itself notices by it that another project was opened."""
    named = f'data-project="{console.service.account["project_id"]}"'
    assert named in person.page("/console/batches?table")
    assert named in person.page("/console/batches?table&search=nothing+has+this+name")


@pytest.mark.rule("F7", "A form that is sent twice makes one batch.")
def test_a_form_that_is_sent_twice_runs_failed_lines_once(console: Console) -> None:
    account = console.service.new_account("double-clicker")
    client = console.service.client(account)
    batch_id = await_end(client, submit(client, chat_lines([BROKEN])).id).id
    path = f"/console/batches/{batch_id}"
    with visitor(console.port, account["api_key"]) as person:
        page = person.page(path)
        forms: list[dict[str, Any]] = [
            {"codes": ["invalid_request_error"], "name": "one", "once": _once(page)},
            {"codes": ["invalid_request_error"], "name": "two", "once": _once(page)},
            {"all": "on", "once": _once(person.page("/console/batches"))},
        ]
        made = [[person.post(f"{path}/rerun", form).headers["location"] for _ in range(2)] for form in forms]
        assert [len(set(each)) for each in made] == [1, 1, 1]
        assert len({each[0] for each in made}) == 3, "another choice on the same page is another batch"
        for [location, _] in made:
            await_end(client, location.rpartition("/")[2])


def test_a_running_batch_is_followed_and_cancelled(console: Console, person: Visitor) -> None:
    batch_id = submit(console.service.client(), chat_lines(["quick", "[[hang]]"])).id
    page = person.page(f"/console/batches/{batch_id}")
    assert f'data-events="/console/batches/{batch_id}/events"' in page
    with person.http.stream("GET", f"/console/batches/{batch_id}/events") as stream:
        events = _events(stream)
        assert "of 2 lines" in shown(next(events))
        assert person.post(f"/console/batches/{batch_id}/cancel").headers["location"].endswith(batch_id)
        assert any("cancel" in event for event in events)
    again = person.post(f"/console/batches/{console.batch_id}/cancel")
    assert (again.status_code, "Cannot cancel" in again.text) == (409, True)


def _events(stream: httpx.Response) -> Iterator[str]:
    for line in stream.iter_lines():
        if line.startswith("data: ") and line != "data: {}":
            yield json.loads(line.removeprefix("data: "))


def test_the_live_page_of_an_ended_batch_ends(console: Console, person: Visitor) -> None:
    answer = person.get(f"/console/batches/{console.batch_id}/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("event: end\ndata: {}\n\n")


@pytest.mark.parametrize("prompt", [BROKEN])
def test_a_held_batch_says_why_and_is_released(console: Console, person: Visitor, prompt: str) -> None:
    client = console.service.client()
    file = client.files.create(file=chat_lines([prompt] * 100), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "batchline": {"hold": True}}
    batch_id = client.post("/batches", body=body, cast_to=dict[str, object])["id"]
    with person.http.stream("GET", f"/console/batches/{batch_id}/events") as stream:
        assert any("Release it or cancel it" in event for event in _events(stream))
    assert "Release" in person.page(f"/console/batches/{batch_id}")
    assert person.post(f"/console/batches/{batch_id}/release").status_code == 303
    await_end(client, str(batch_id))


def _running_batch(api: Api) -> str:
    body = {"input_file_id": api.upload().json["id"], "endpoint": CHAT, "completion_window": "24h"}
    return str(api.post("/v1/batches", body).json["id"])


def test_the_live_page_of_a_running_batch_only_closes_when_the_service_shuts_down(serve: Callable[..., Api]) -> None:
    """The browser connects again by itself. After an ``end`` it would load a page that nobody serves."""
    api = serve()
    batch_id = _running_batch(api)
    with (
        visitor(api.port, api.account.key) as person,
        person.http.stream("GET", f"/console/batches/{batch_id}/events") as stream,
    ):
        parts = stream.iter_text()
        assert "event: live" in next(parts)
        api.stop()
        assert "event: end" not in "".join(parts)


def test_a_batch_that_is_deleted_while_it_is_listed_takes_no_page_down(serve: Callable[..., Api]) -> None:
    """Its progress is read after the list."""

    class Vanishing(Faulty):
        async def snapshot(self, *_: object) -> None:
            return None

    api = serve(wrap_store=Vanishing)
    batch_id = _running_batch(api)
    with visitor(api.port, api.account.key) as person:
        assert _ROW.findall(person.page("/console/batches")) == [batch_id]
