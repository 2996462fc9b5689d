"""The client of the service whose contract this is, pointed here by its base URL alone: SPEC A1, A2, D6, D7, E."""

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest
import zerogpu  # type: ignore[import-untyped]  # it ships no py.typed
from zerogpu.core.api_error import ApiError  # type: ignore[import-untyped]

from tests.support.service import Service, running_mock, running_service

_PROMPT = "what is asked"
_ANSWER = f"scripted answer to: {_PROMPT}"


class _ResponsesUpstream(BaseHTTPRequestHandler):
    """Answers ``/v1/responses`` in the shape this client reads, which has ``created`` where OpenAI's has
    ``created_at``."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        content = [{"type": "output_text", "text": f"{self.path} {asked['model']}: {asked['input']}"}]
        answer = {
            "id": "resp_1",
            "object": "response",
            "created": 1_800_000_000,
            "model": asked["model"],
            "metadata": asked.get("metadata"),
            "output": [{"type": "message", "role": "assistant", "content": content}],
            "usage": {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7},
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def responses_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _ResponsesUpstream) as server:
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, responses_url: str) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("zerogpu")
    config = folder / "batchline.toml"
    config.write_text(f'[models.m]\n[models.r]\nupstream = "other"\n[upstreams.other]\nurl = "{responses_url}"\n')
    with running_mock() as mock, running_service(folder, mock.url, config=config) as running:
        yield running


def _options(service: Service, **changed: str) -> dict[str, str]:
    known = {name: service.account[name] for name in ("project_id", "api_key")}
    return {"base_url": service.base_url} | known | changed


@pytest.fixture
def client(service: Service) -> Iterator[Any]:
    with httpx.Client() as transport:
        yield zerogpu.ZerogpuApi(**_options(service), httpx_client=transport)


def _said(text: str) -> list[Any]:
    return [zerogpu.ChatMessage(role="user", content=text)]


def test_a_chat_is_answered_with_its_usage(client: Any) -> None:
    """E1, D7"""
    completion = client.chat.create_chat_completion(model="m", messages=_said(_PROMPT))
    assert completion.choices[0]["message"]["content"] == _ANSWER
    assert (completion.object, completion.model) == ("chat.completion", "m")
    assert completion.system_fingerprint is None
    assert completion.usage.total_tokens > 0


@pytest.mark.rule("E2", "Each goes to the upstream that serves its model.")
def test_a_response_comes_from_the_upstream_of_its_model(client: Any) -> None:
    """E2: handed to the upstream that serves the model, and its answer handed back."""
    response = client.responses.create_response(model="r", input=_PROMPT)
    assert response.output[0].content[0].text == f"/v1/responses r: {_PROMPT}"
    assert (response.created, response.usage.total_tokens) == (1_800_000_000, 7)


def test_metadata_reaches_the_model(client: Any) -> None:
    """E2, C5: fields that only the model knows are handed on."""
    response = client.responses.create_response(model="r", input=_PROMPT, metadata={"usecase": "pii"})
    assert response.metadata == {"usecase": "pii"}


def test_the_async_client_gets_the_same_answers(service: Service) -> None:
    """E1, E2"""

    async def calls() -> None:
        async with httpx.AsyncClient() as transport:
            client = zerogpu.AsyncZerogpuApi(**_options(service), httpx_client=transport)
            completion, response = await asyncio.gather(
                client.chat.create_chat_completion(model="m", messages=_said(_PROMPT)),
                client.responses.create_response(model="r", input=_PROMPT),
            )
        assert completion.choices[0]["message"]["content"] == _ANSWER
        assert response.output[0].content[0].text == f"/v1/responses r: {_PROMPT}"

    asyncio.run(calls())


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"api_key": "bl-wrong"}, zerogpu.ForbiddenError, "Invalid credentials"),
        ({"project_id": "00000000-0000-4000-8000-000000000000"}, zerogpu.ForbiddenError, "Invalid credentials"),
        ({"api_key": ""}, zerogpu.UnauthorizedError, "Missing authentication headers"),
    ],
)
def test_missing_and_wrong_credentials_are_refused(
    service: Service, changed: dict[str, str], kind: type[ApiError], message: str
) -> None:
    """A1, A2, A6: as its own exceptions, with the envelope in them."""
    with httpx.Client() as transport:
        stranger = zerogpu.ZerogpuApi(**_options(service, **changed), httpx_client=transport)
        with pytest.raises(kind) as refused:
            stranger.chat.create_chat_completion(model="m", messages=_said(_PROMPT))
    assert (refused.value.body["error"]["message"], refused.value.body["error"]["type"]) == (
        message,
        "authentication_error",
    )


@pytest.mark.parametrize(
    ("model", "prompt", "status", "code"),
    [
        ("unknown", "one", 404, "not_found_error"),
        ("m", "[[error=context_length_exceeded]]", 400, "context_length_exceeded"),
        ("m", "[[status=422]]", 422, "invalid_request_error"),
        ("m", "[[status=500]]", 502, "upstream_error"),
    ],
)
def test_a_refusal_has_its_status_and_code(client: Any, model: str, prompt: str, status: int, code: str) -> None:
    """A6, D6, E2"""
    with pytest.raises(ApiError) as refused:
        client.chat.create_chat_completion(model=model, messages=_said(prompt), request_options={"max_retries": 0})
    assert (refused.value.status_code, refused.value.body["error"]["code"]) == (status, code)
    assert refused.value.headers["x-request-id"].startswith("req_")
