"""The official Python client against the real service: every call it makes, and every error it raises."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.service import (
    CHAT,
    Service,
    await_end,
    chat_line,
    chat_lines,
    counts_of,
    credentials_of,
    results_of,
    running_mock,
    running_service,
    submit,
)

_BREAKS = "one\u2028two\u2029three\u0085four"
"""What ``str.splitlines()`` and ``iter_lines()`` take for the end of a line."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Shared: each test has a project of its own where it looks at lists."""
    with running_mock() as mock, running_service(tmp_path_factory.mktemp("sdk"), mock.url) as running:
        yield running


def test_a_thousand_lines_of_which_some_fail(service: Service) -> None:
    """C7, C8, C12, D1, D2: each line is in one file, once; the counts say which."""
    client = service.client()
    lines = chat_lines("[[status=400]]" if n % 20 == 7 else f"question {n}" for n in range(1000))
    uploaded = client.files.create(file=("questions.jsonl", lines), purpose="batch")
    created = client.batches.create(
        input_file_id=uploaded.id, endpoint=CHAT, completion_window="24h", metadata={"from": "python"}
    )
    assert (created.status, counts_of(created)) == ("in_progress", (1000, 0, 0))
    assert (created.output_file_id, created.error_file_id) == (None, None)

    batch = await_end(client, created.id)
    assert (batch.status, counts_of(batch)) == ("completed", (1000, 950, 50))
    assert batch.metadata == {"from": "python"}
    records = results_of(client, batch, lines)
    bodies = [record["response"]["body"] for record in records.values() if record["response"]]
    assert batch.model == bodies[0]["model"]
    assert batch.usage is not None
    assert batch.usage.total_tokens == sum(body["usage"]["total_tokens"] for body in bodies) > 0
    for n in range(1000):
        record = records[f"line-{n}"]
        if n % 20 == 7:
            assert record["error"]["code"] == "invalid_request_error"
        else:
            content = record["response"]["body"]["choices"][0]["message"]["content"]
            assert content == f"scripted answer to: question {n}"


def test_the_life_of_a_file(service: Service) -> None:
    """B1, B5 to B8: upload, look at, list, download, delete; a second delete finds nothing."""
    client = service.client(service.new_account("files"))
    data = chat_lines(["one", "two"])
    uploaded = client.files.create(file=("größe.jsonl", data), purpose="batch")
    assert (uploaded.bytes, uploaded.filename, uploaded.purpose) == (len(data), "größe.jsonl", "batch")
    assert client.files.retrieve(uploaded.id) == uploaded
    assert client.files.list().data == [uploaded]
    assert client.files.content(uploaded.id).content == data

    deleted = client.files.delete(uploaded.id)
    assert (deleted.id, deleted.deleted) == (uploaded.id, True)
    assert client.files.list().data == []
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match=f"File {uploaded.id} not found"):
            gone(uploaded.id)


def test_bytes_without_a_name_are_named_upload(service: Service, tmp_path: Path) -> None:
    """B2, B3: the name is the client's; for plain bytes it sends ``upload``, for a path the path's name."""
    client = service.client()
    path = tmp_path / "from-disk.jsonl"
    path.write_bytes(chat_lines(["one"]))
    assert client.files.create(file=path.read_bytes(), purpose="batch").filename == "upload"
    assert client.files.create(file=path, purpose="batch").filename == "from-disk.jsonl"


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_the_pager_walks_every_file_once(service: Service, order: Any) -> None:
    """B5, C9b: over many pages, in order, while more files come and the cursor's own file is deleted."""
    client = service.client(service.new_account(f"files-{order}"))
    made = [client.files.create(file=chat_lines(["one"]), purpose="batch").id for _ in range(8)]
    seen = []
    for file in client.files.list(limit=3, order=order):
        seen.append(file.id)
        if len(seen) == 3:
            client.files.delete(file.id)
            made.append(client.files.create(file=chat_lines(["late"]), purpose="batch").id)
    assert seen == (made if order == "asc" else made[7::-1])


def test_the_pager_walks_every_batch_once(service: Service) -> None:
    """C9, C9b: newest first, by the last item's id, while more batches come."""
    client = service.client(service.new_account("batches"))
    uploaded = client.files.create(file=chat_lines(["one"]), purpose="batch")

    def create() -> str:
        return client.batches.create(input_file_id=uploaded.id, endpoint=CHAT, completion_window="24h").id

    made = [create() for _ in range(7)]
    seen = []
    for batch in client.batches.list(limit=2):
        seen.append(batch.id)
        if len(seen) == 2:
            create()
    assert seen == made[::-1]


def test_cancel(service: Service) -> None:
    """C10: cancelling at once, cancelled in the end, and the same again when asked twice."""
    client = service.client()
    lines = chat_lines(f"[[delay=0.2]] cancel {n}" for n in range(500))
    created = submit(client, lines)
    cancelling = client.batches.cancel(created.id)
    assert cancelling.status == "cancelling"
    assert cancelling.cancelling_at is not None
    batch = await_end(client, created.id)
    assert (batch.status, batch.cancelling_at) == ("cancelled", cancelling.cancelling_at)
    assert {record["error"]["code"] for record in results_of(client, batch, lines).values() if record["error"]} == {
        "batch_cancelled"
    }
    assert client.batches.cancel(created.id) == batch


def test_missing_and_wrong_credentials_are_refused(service: Service) -> None:
    """A1, A2: the client's own bearer token is no key of the service."""
    with openai.OpenAI(base_url=service.base_url, api_key="unused", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError, match="Missing authentication headers") as missing:
            stranger.files.list()
        assert missing.value.type == "authentication_error"
    for wrong in ({"api_key": "bl-wrong"}, {"project_id": "00000000-0000-4000-8000-000000000000"}):
        with pytest.raises(openai.PermissionDeniedError, match="Invalid credentials"):
            service.client(service.account | wrong).batches.list()


def test_what_another_project_has_is_not_found(service: Service) -> None:
    """A8: its files and batches are as if they did not exist."""
    client, other = service.client(), service.client(service.new_account("other"))
    batch = submit(client, chat_lines(["mine"]))
    assert batch.input_file_id is not None
    for call in (
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.files.retrieve(batch.input_file_id),
        lambda: other.files.content(batch.input_file_id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.NotFoundError, match="Input file not found"):
        other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")


def test_a_conflict_is_not_retried(service: Service) -> None:
    """A10, C10: a client with its default retries asks once, because the answer tells it not to ask again."""
    client = service.client(max_retries=openai.DEFAULT_MAX_RETRIES)
    batch = await_end(client, submit(client, chat_lines(["one"])).id)
    with pytest.raises(openai.ConflictError) as conflict:
        client.batches.cancel(batch.id)
    assert conflict.value.code == "batch_not_cancellable"
    assert conflict.value.response.headers["x-should-retry"] == "false"
    assert client.batches.retrieve(batch.id) == batch
    assert service.log.count(f"/v1/batches/{batch.id}/cancel ") == 1


def test_a_bad_line_is_named(service: Service) -> None:
    """A6, C3: the error carries the line, and the failed batch lists every one."""
    client = service.client()
    lines = chat_line("same", "one") + chat_line("same", "two") + b"{\n"
    uploaded = client.files.create(file=lines, purpose="batch")
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(input_file_id=uploaded.id, endpoint=CHAT, completion_window="24h")
    assert refused.value.body == {
        "message": 'Line 2 duplicates custom_id "same"',
        "type": "invalid_request_error",
        "code": "invalid_request_error",
        "param": None,
        "line": 2,
    }
    failed = client.batches.retrieve(refused.value.response.headers["x-batch-id"])
    assert failed.status == "failed"
    assert failed.errors is not None
    assert [fault.line for fault in failed.errors.data or []] == [2, 3]


def test_iter_lines_sees_the_lines_that_are_there(service: Service) -> None:
    """D1: what other programs take for a line's end is escaped, in answers, in errors and in custom_ids."""
    client = service.client()
    lines = chat_line(f"good {_BREAKS}", _BREAKS) + chat_line(f"bad {_BREAKS}", f"[[status=400]] {_BREAKS}")
    batch = await_end(client, submit(client, lines).id)
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    [good] = map(json.loads, client.files.content(batch.output_file_id).iter_lines())
    [bad] = map(json.loads, client.files.content(batch.error_file_id).iter_lines())
    assert (good["custom_id"], bad["custom_id"]) == (f"good {_BREAKS}", f"bad {_BREAKS}")
    assert good["response"]["body"]["choices"][0]["message"]["content"] == f"scripted answer to: {_BREAKS}"


def test_the_async_client_runs_several_batches_at_once(service: Service) -> None:
    """B1, C7, C9b, C12: the same trip on the other client, several batches at once."""

    async def trip(client: openai.AsyncOpenAI, name: str) -> str:
        uploaded = await client.files.create(file=chat_line(name, name), purpose="batch")
        batch = await client.batches.create(input_file_id=uploaded.id, endpoint=CHAT, completion_window="24h")
        async with asyncio.timeout(60):
            while batch.status != "completed":
                batch = await client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        content = await client.files.content(batch.output_file_id)
        [record] = [json.loads(line) async for line in await content.aiter_lines()]
        assert (record["custom_id"], record["response"]["status_code"]) == (name, 200)
        return batch.id

    account = service.new_account("async")

    async def trips() -> None:
        async with openai.AsyncOpenAI(
            base_url=service.base_url, api_key="unused", default_headers=credentials_of(account), max_retries=0
        ) as client:
            made = await asyncio.gather(*(trip(client, f"trip {n}") for n in range(5)))
            listed = [batch.id async for batch in client.batches.list(limit=2)]
        assert sorted(listed) == sorted(made)

    asyncio.run(trips())
