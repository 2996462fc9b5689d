"""Sending events (G10): what is sent, where to, and what comes of it."""

import asyncio
import socket
import ssl
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from batchline.domain.webhooks import Message, SendResult
from batchline.webhooks.sender import HttpSender
from tests.support.scripted_server import answering, reply
from tests.support.webhook_receivers import running_receiver

pytestmark = pytest.mark.anyio

PATIENCE = 10.0


def message(url: str, *, by_operator: bool = True) -> Message:
    return Message(url=url, by_operator=by_operator, headers={"webhook-id": "evt_1"}, body=b'{"id":"evt_1"}')


async def send(url: str, *, by_operator: bool = True, **options: Any) -> SendResult:
    sender = HttpSender(**{"allows_private": False} | options)
    return await sender.send(message(url, by_operator=by_operator))


async def test_an_event_arrives_with_its_headers_and_body() -> None:
    with running_receiver() as receiver:
        assert await send(receiver.url + "?a=b") == SendResult(status=200)
        (received,) = receiver.received
    assert received.body == b'{"id":"evt_1"}'
    assert received.headers["webhook-id"] == "evt_1"
    assert received.headers["host"] == receiver.url.split("/")[2]
    assert received.headers["user-agent"].startswith("batchline/")


@pytest.mark.rule("G10", "Redirects are not followed.")
async def test_a_redirect_is_not_followed() -> None:
    with running_receiver() as receiver, running_receiver() as target:
        receiver.status, receiver.headers = 307, {"location": target.url}
        assert await send(receiver.url) == SendResult(status=307)
        assert target.received == []


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_receiver() as receiver:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        assert (await send(receiver.url)).delivered


@pytest.mark.rule("G10", "A webhook of a project does not reach this machine, by address or by name.")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_webhook_of_a_project_does_not_reach_this_machine(host: str) -> None:
    with running_receiver() as receiver:
        result = await send(receiver.url.replace("127.0.0.1", host), by_operator=False)
        assert result.status is None
        assert "is this machine" in (result.detail or "")
        assert receiver.received == []


@pytest.mark.rule("G10", "An address is checked when the name is resolved and when the connection is made.")
async def test_a_name_that_resolves_to_a_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _resolve_to(monkeypatch, "8.8.8.8", "10.0.0.7")
    result = await send("https://hook.example.org/", by_operator=False)
    assert "10.0.0.7 is a private address" in (result.detail or "")


async def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that resolves to another address the second time changes nothing: it is resolved once."""
    with running_receiver() as receiver:
        asked = _resolve_to(monkeypatch, "127.0.0.1")
        assert (await send(receiver.url.replace("127.0.0.1", "localhost"))).delivered
    assert asked == ["localhost"]


async def test_the_peer_of_the_connection_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    real = HttpSender._check

    def check(self: HttpSender, address: str, *args: Any, **options: Any) -> None:
        checked.append(address)
        real(self, address, *args, **options)

    monkeypatch.setattr(HttpSender, "_check", check)
    with running_receiver() as receiver:
        assert (await send(receiver.url)).delivered
    assert checked == ["127.0.0.1", "127.0.0.1"]


@pytest.mark.rule("G10", "A receiver that does not answer in time did not get the event.")
async def test_a_receiver_that_does_not_answer_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        result = await send(f"http://127.0.0.1:{silent.getsockname()[1]}/", timeout_seconds=0.05)
    assert (result.status, result.detail) == (None, "no answer within 0.05 s")


async def test_a_receiver_that_is_down_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    result = await send(f"http://127.0.0.1:{port}/")
    assert "the connection failed" in (result.detail or "")
    assert "the name cannot be resolved" in ((await send("https://nothing.invalid/")).detail or "")


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 ", b"SSH-2.0-x\r\n", b"HTTP/1.1 999 x\r\n\r\n", b"x" * 20_000, b"HTTP/1.1 103 x\r\n\r\n" * 9],
)
async def test_an_answer_that_is_not_http_is_a_failure(answer: bytes) -> None:
    with answering(answer) as server:
        result = await send(server.url + "/")
    assert result.status is None
    assert "the connection failed" in (result.detail or "")


async def test_an_interim_answer_comes_before_the_final_one() -> None:
    with answering(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + reply(204)) as server:
        assert await send(server.url + "/") == SendResult(status=204)


async def test_a_certificate_that_is_not_trusted_is_refused(tmp_path: Path) -> None:
    """The name of the URL must be that of the certificate, although the connection goes to an address."""
    _make_certificate(tmp_path)
    trusting = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    with running_receiver() as receiver:
        served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        served.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
        receiver._server.socket = served.wrap_socket(receiver._server.socket, server_side=True)
        port = receiver.url.split(":")[2].split("/")[0]
        assert (await send(f"https://localhost:{port}/", tls=trusting)).delivered
        refused = await send(f"https://localhost:{port}/")
        assert "TLS failed" in (refused.detail or "")
        other = await send(f"https://127.0.0.1:{port}/", tls=trusting)
        assert "TLS failed" in (other.detail or "")


async def test_a_slow_name_server_of_a_receiver_holds_up_no_other_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered = Event(), Event()

    def getaddrinfo(*_args: Any, **_options: Any) -> Any:
        asked.set()
        answered.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(send("https://slow.example.org/"))
        with ThreadPoolExecutor(1) as other:
            await loop.run_in_executor(other, asked.wait)
        try:
            async with asyncio.timeout(PATIENCE):
                await asyncio.to_thread(int)
        finally:
            answered.set()
    assert "cannot be resolved" in (sending.result().detail or "")


def _resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Let every name resolve to these addresses, and return the names that are asked for."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, *args: Any, **options: Any) -> Any:
        if host in addresses:
            return real(host, port, *args, **options)
        asked.append(host)
        return [found for address in addresses for found in real(address, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


def _make_certificate(folder: Path) -> None:
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*command.split(), *names], cwd=folder, check=True, capture_output=True)
