"""The official Python client on the routes that answer at once: SPEC A3, A13, D6, D7, E."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam
from openai.types.responses import ResponseCompletedEvent, ResponseTextDeltaEvent

from tests.support.service import (
    Account,
    Service,
    await_end,
    chat_lines,
    credentials_of,
    results_of,
    running_mock,
    running_service,
    submit,
)

_PROMPT = "say  this\nand that: größe"
_ANSWER = f"scripted answer to: {_PROMPT}"
_MODELS = ["m", "vendor/large:v1"]
_SETTINGS = """
metering = true

[models.m]
input_price = 1

[models."vendor/large:v1"]
name = "large"

[models.hidden]
projects = []
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("inference")
    config: Path = folder / "batchline.toml"
    config.write_text(_SETTINGS)
    with running_mock() as mock, running_service(folder, mock.url, config=config) as running:
        yield running


@pytest.fixture(scope="module")
def client(service: Service) -> openai.OpenAI:
    return service.client()


@pytest.fixture(scope="module")
def penniless(service: Service) -> Account:
    account: Account = json.loads(service.keys("create", "--json", "--org", "penniless"))
    service.command("orgs", "set-balance", "penniless", "0", "--credits", "0")
    return account


def _said(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def _text(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def test_a_chat_is_answered_with_its_usage(client: openai.OpenAI) -> None:
    """E1, D7"""
    completion = client.chat.completions.create(model="m", messages=_said(_PROMPT))
    assert completion.choices[0].message.content == _ANSWER
    assert (completion.model, completion.system_fingerprint) == ("m", None)
    assert completion.usage is not None
    assert completion.usage.total_tokens > 0


def test_a_streamed_chat_is_complete_and_without_usage(client: openai.OpenAI) -> None:
    """E1, D7: the text is complete, and usage that was not asked for is not told."""
    with client.chat.completions.create(model="m", messages=_said(_PROMPT), stream=True) as stream:
        chunks = list(stream)
    assert _text(chunks) == _ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.choices for chunk in chunks)
    assert {(chunk.usage, chunk.system_fingerprint) for chunk in chunks} == {(None, None)}


def test_a_streamed_chat_reports_usage_if_it_is_asked_for(client: openai.OpenAI) -> None:
    """E1: as its own last chunk, the same as of the whole answer."""
    whole = client.chat.completions.create(model="m", messages=_said(_PROMPT))
    with client.chat.completions.create(
        model="m", messages=_said(_PROMPT), stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = stream
    assert _text(chunks) == _ANSWER
    assert (last.choices, last.usage) == ([], whole.usage)
    assert {chunk.usage for chunk in chunks} == {None}
    assert {chunk.system_fingerprint for chunk in (*chunks, last)} == {None}


def test_a_stream_that_breaks_is_an_error_after_its_first_words(client: openai.OpenAI) -> None:
    """E2: nobody takes half an answer for a whole one."""
    prompt = "[[cut]] some words"
    heard: list[ChatCompletionChunk] = []
    with (
        pytest.raises(openai.APIError, match="broke off"),
        client.chat.completions.create(model="m", messages=_said(prompt), stream=True) as stream,
    ):
        heard.extend(stream)
    whole, text = f"scripted answer to: {prompt}", _text(heard)
    assert text
    assert whole.startswith(text)
    assert whole != text


def test_a_response_is_answered_with_its_usage(client: openai.OpenAI) -> None:
    """E2"""
    response = client.responses.create(model="m", input=_PROMPT)
    assert (response.status, response.output_text) == ("completed", _ANSWER)
    assert response.usage is not None
    assert response.usage.total_tokens > 0


def test_a_streamed_response_ends_with_the_whole_one(client: openai.OpenAI) -> None:
    """E2"""
    with client.responses.create(model="m", input=_PROMPT, stream=True) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if isinstance(event, ResponseTextDeltaEvent)) == _ANSWER
    assert isinstance(events[-1], ResponseCompletedEvent)
    assert events[-1].response.output_text == _ANSWER


def test_models_are_listed_and_found_by_their_ids(client: openai.OpenAI) -> None:
    """E3, D6: those of the project, found by their ids, whatever is in them."""
    assert [model.id for model in client.models.list()] == _MODELS
    assert [client.models.retrieve(model).id for model in _MODELS] == _MODELS


_ON_MODEL: dict[str, Callable[[openai.OpenAI, str], Any]] = {
    "chat": lambda client, model: client.chat.completions.create(model=model, messages=_said("one")),
    "stream": lambda client, model: client.chat.completions.create(model=model, messages=_said("one"), stream=True),
    "responses": lambda client, model: client.responses.create(model=model, input="one"),
    "models": lambda client, model: client.models.retrieve(model),
}


@pytest.mark.parametrize("model", ["unknown", "hidden"])
@pytest.mark.parametrize("route", _ON_MODEL)
def test_an_unknown_model_is_not_found(client: openai.OpenAI, route: str, model: str) -> None:
    """D6, E3: one of other projects alike."""
    with pytest.raises(openai.NotFoundError, match=f"The model {model} does not exist") as refused:
        _ON_MODEL[route](client, model)
    assert (refused.value.type, refused.value.param) == ("invalid_request_error", "model")


@pytest.mark.parametrize("streams", [False, True])
def test_an_input_that_is_too_long_says_so(client: openai.OpenAI, streams: bool) -> None:
    """D6, E2: tools look for this code to shorten what they send."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="m", messages=_said("[[error=context_length_exceeded]]"), stream=streams)
    assert (refused.value.code, refused.value.type) == ("context_length_exceeded", "invalid_request_error")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("fault", ["[[status=500]]", "[[status=503]]", "[[drop]]", "[[html]]", "[[redirect]]"])
def test_an_upstream_in_trouble_is_a_bad_gateway(client: openai.OpenAI, fault: str, streams: bool) -> None:
    """E2"""
    with pytest.raises(openai.InternalServerError) as failed:
        client.chat.completions.create(model="m", messages=_said(fault), stream=streams)
    assert (failed.value.status_code, failed.value.type) == (502, "internal_error")


_SPENDING: dict[str, Callable[[openai.OpenAI], Any]] = {
    "chat": lambda client: client.chat.completions.create(model="m", messages=_said("one")),
    "stream": lambda client: client.chat.completions.create(model="m", messages=_said("one"), stream=True),
    "responses": lambda client: client.responses.create(model="m", input="one"),
    "upload": lambda client: client.files.create(file=chat_lines(["one"]), purpose="batch"),
}


@pytest.mark.parametrize("route", _SPENDING)
def test_an_empty_purse_is_told_once(service: Service, penniless: Account, route: str) -> None:
    """A3, A10: a client with its default retries does not ask again."""
    client = service.client(penniless, max_retries=openai.DEFAULT_MAX_RETRIES)
    with pytest.raises(openai.RateLimitError) as refused:
        _SPENDING[route](client)
    assert (refused.value.code, refused.value.type) == ("insufficient_quota", "insufficient_quota")
    assert refused.value.request.headers["x-stainless-retry-count"] == "0"
    assert [model.id for model in client.models.list()] == _MODELS


def test_a_key_is_enough(service: Service) -> None:
    """A13: the client as its documentation has it, with nothing but a key and an address."""
    with openai.OpenAI(base_url=service.base_url, api_key=service.account["api_key"], max_retries=0) as plain:
        completion = plain.chat.completions.create(model="m", messages=_said(_PROMPT))
        assert completion.choices[0].message.content == _ANSWER
        assert [model.id for model in plain.models.list()] == _MODELS
        lines = chat_lines(["one", "two"])
        batch = await_end(plain, submit(plain, lines).id)
        assert set(results_of(plain, batch, lines)) == {"line-0", "line-1"}
    assert service.client().batches.retrieve(batch.id) == batch


def test_a_wrong_bearer_opens_nothing(service: Service) -> None:
    """A13, A1"""
    with (
        openai.OpenAI(base_url=service.base_url, api_key="bl-wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError, match="Missing authentication headers"),
    ):
        stranger.models.list()


def test_the_async_client_makes_all_calls_at_once(service: Service) -> None:
    """E1 to E3: all of it at once on the other client."""

    async def chat(client: openai.AsyncOpenAI, text: str) -> None:
        completion = await client.chat.completions.create(model="m", messages=_said(text))
        assert completion.choices[0].message.content == f"scripted answer to: {text}"

    async def streamed_chat(client: openai.AsyncOpenAI, text: str) -> None:
        async with await client.chat.completions.create(model="m", messages=_said(text), stream=True) as stream:
            assert _text([chunk async for chunk in stream]) == f"scripted answer to: {text}"

    async def response(client: openai.AsyncOpenAI, text: str) -> None:
        answered = await client.responses.create(model="m", input=text)
        assert answered.output_text == f"scripted answer to: {text}"

    async def streamed_response(client: openai.AsyncOpenAI, text: str) -> None:
        async with await client.responses.create(model="m", input=text, stream=True) as stream:
            events = [event async for event in stream]
        assert isinstance(events[-1], ResponseCompletedEvent)
        assert events[-1].response.output_text == f"scripted answer to: {text}"

    async def models(client: openai.AsyncOpenAI, text: str) -> None:
        assert [model.id async for model in client.models.list()] == _MODELS
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve(text)

    async def all_at_once() -> None:
        async with openai.AsyncOpenAI(
            base_url=service.base_url, api_key="unused", default_headers=credentials_of(service.account), max_retries=0
        ) as client:
            calls = (chat, streamed_chat, response, streamed_response, models)
            await asyncio.gather(*(call(client, f"call {n}") for n in range(4) for call in calls))

    asyncio.run(all_at_once())
