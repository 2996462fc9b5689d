"""Secrets of tenants and of the operator appear nowhere else: A6, A8, F3, F5.

Every prompt, answer, name, key and token contains the same random mark. The service is driven through everything that
can go wrong, and then the tests search for the mark in everything that others can read.
"""

import json
import re
import resource
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

import psutil  # type: ignore[import-untyped]
import pytest
from click.testing import CliRunner

from batchline.cli import main
from tests.support.service import (
    CHAT,
    FORM,
    Account,
    Reply,
    Service,
    await_end,
    call,
    chat_line,
    credentials_of,
    read_reply,
    running_mock,
    running_service,
    upload_form,
    wait_until,
)

_MARK = uuid4().hex
_MAX_REQUEST_BYTES = 10_000
_SETTINGS = """
metering = true
admin_token = "admin{mark}"
upstream_api_key = "upstream{mark}"
max_attempts = 2
retry_base_seconds = 0
request_timeout_seconds = 1
upstream_patience_seconds = 1
max_request_bytes = {max_request_bytes}

[upstreams.parrot]
url = "{parrot}"
api_key = "parrot{mark}"

[upstreams.gone]
url = "http://user:password{mark}@127.0.0.1:9/v1"
api_key = "gone{mark}"

[models.m]
input_price = 1
[models.parrot]
upstream = "parrot"
[models.limited]
upstream = "parrot"
max_tokens = 1
[models.gone]
upstream = "gone"
"""


def _canary(what: str) -> str:
    return f"{what}{_MARK}"


class _Parrot(BaseHTTPRequestHandler):
    """An upstream that answers with the status in the prompt and repeats the request, as some do in their errors.

    For the status 0 it sends bytes that are not HTTP.
    """

    def do_POST(self) -> None:
        request = self.rfile.read(int(self.headers["content-length"])).decode()
        found = re.search(r"status (\d+)", request)
        status = int(found[1]) if found else 404
        if status == 0:
            self.wfile.write(f"{request}\r\n\r\n".encode())
            return
        body = json.dumps({"error": {"message": request}}).encode()
        body = b"data: %b\n\n" % body if status == 200 else body
        self.send_response(status, _canary("phrase"))
        self.send_header("content-type", "text/event-stream" if status == 200 else "application/json")
        self.send_header("x-request-id", _canary("upstreams-id"))
        # A stream is shorter than announced, so it breaks.
        self.send_header("content-length", str(len(body) + 1000 * (status == 200)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@dataclass
class _Drive:
    """Sends requests to the service, and keeps everything that it answers and prints."""

    service: Service
    owner: Account
    bystander: Account
    replies: list[Reply] = field(default_factory=list)
    """Answers to requests with the owner's or with wrong credentials."""
    results: list[bytes] = field(default_factory=list)
    """Output and error files of the owner's batches."""
    bystander_replies: list[Reply] = field(default_factory=list)
    """Answers to another tenant."""
    printed: dict[str, str] = field(default_factory=dict)
    """Output of commands, by name."""
    processes: set[str] = field(default_factory=set)
    metrics: str = ""

    def ask(
        self, method: str, path: str, *, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        headers = credentials_of(self.owner) | dict(headers or {})
        self.replies.append(call(self.service.port, method, path, body=body, headers=headers))
        return self.replies[-1]

    def chat(self, prompt: str, *, model: str = "m", stream: bool = False) -> Reply:
        messages = [{"role": "user", "content": f"{prompt} {_canary('prompt')}"}]
        body = json.dumps({"model": model, "messages": messages, "stream": stream, "user": _canary("user")})
        return self.ask("POST", CHAT, body=body.encode())

    def submit(self, *lines: bytes, account: Account | None = None) -> Reply:
        headers = credentials_of(account or self.owner)
        form = upload_form(b"".join(lines)).replace(b"in.jsonl", _canary("file").encode())
        uploaded = self.ask("POST", "/v1/files", body=form, headers=headers | FORM)
        wanted = {
            "input_file_id": uploaded.json["id"],
            "endpoint": CHAT,
            "metadata": {_canary("key"): _canary("metadata")},
        }
        created = self.ask("POST", "/v1/batches", body=json.dumps(wanted).encode(), headers=headers)
        for member in self.service.program.family():
            with suppress(psutil.Error):  # it may have ended
                self.processes.add(" ".join(member.cmdline()))
        return created

    def send_raw(self, data: bytes) -> None:
        with self.service.connect() as connection:
            connection.sendall(data)
            self.replies.append(read_reply(connection))

    def run(self, name: str, *arguments: str) -> None:
        result = CliRunner().invoke(main, [*arguments, "--data-dir", str(self.service.data_dir)])
        self.printed[name] = result.output


def _line(name: str, prompt: str, *, model: str = "m") -> bytes:
    line = chat_line(f"{name} {_canary('custom-id')}", f"{prompt} {_canary('prompt')}")
    return line.replace(b'"m"', b'"%b"' % model.encode())


_TROUBLE = ("[[status=400]]", "[[status=500]]", "[[cut]]", "[[drop]]", "[[html]]", "[[redirect]]", "[[hang]]")
_PARROTED = ("status 400", "status 401", "status 404", "status 429", "status 500", "status 503", "status 0")


def _run_batches(drive: _Drive) -> None:
    """Run batches with every fault, an upstream that goes down, one that never was up, and a kill of the service."""
    mixed = [_line(prompt, prompt) for prompt in ("good", "better", *_TROUBLE)]
    # On a busy machine an attempt may time out, and its line then ends with another code. Hardly all three of these do.
    refused = ("status 401 again", "status 401 at last")
    parroted = [_line(prompt, prompt, model="parrot") for prompt in (*_PARROTED, *refused)]
    away = [_line(f"{model} {n}", "status 503", model=model) for model in ("parrot", "gone") for n in range(20)]
    ids = [drive.submit(*lines).json["id"] for lines in (mixed, parroted, away)]
    hanging = drive.submit(*(_line(f"{n}", "[[hang]]") for n in range(100))).json["id"]
    drive.ask("POST", f"/v1/batches/{hanging}/cancel")
    drive.service.kill()
    drive.service.restart()
    _call_at_once(drive)
    client = drive.service.client(drive.owner)
    for batch_id in (*ids, hanging):
        batch = await_end(client, batch_id)
        found = [file_id for file_id in (batch.output_file_id, batch.error_file_id) if file_id is not None]
        drive.results += [client.files.content(file_id).content for file_id in found]


def _call_at_once(drive: _Drive) -> None:
    for stream in (False, True):
        for prompt in ("good", *_TROUBLE):
            drive.chat(prompt, stream=stream)
        for prompt in (*_PARROTED, "status 200"):
            drive.chat(prompt, model="parrot", stream=stream)
        for model in ("limited", "gone", _canary("model")):
            drive.chat("status 400", model=model, stream=stream)
    drive.ask("POST", "/summary", body=json.dumps({"text": _canary("text")}).encode())
    drive.ask("POST", "/v1/responses", body=json.dumps({"model": "m", "input": _canary("input")}).encode())


def _leave_a_stream(drive: _Drive) -> None:
    said = [{"role": "user", "content": f"[[pause=0.05]] {_canary('left')}{' word' * 100}"}]
    body = json.dumps({"model": "m", "messages": said, "stream": True}).encode()
    fields = credentials_of(drive.owner) | {"content-type": "application/json"}
    with drive.service.connect() as connection:
        connection.sendall(drive.service.head(CHAT, length=len(body), headers=fields) + body)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")


def _send_invalid_requests(drive: _Drive) -> None:
    """Send invalid input files, malformed bodies, wrong methods, oversized and broken requests."""
    twice = _line("same", "one") * 2
    for lines in (twice, _canary("{").encode(), twice.replace(CHAT.encode(), _canary("/v1/").encode())):
        assert drive.submit(lines).status == 400
    for path in (CHAT, "/v1/responses", "/v1/batches", "/v1/files"):
        drive.ask("POST", path, body=_canary("{").encode())
        drive.ask("POST", path, body=_canary("x" * _MAX_REQUEST_BYTES).encode())
        drive.ask("PUT", f"{path}?query={_canary('query')}", body=_canary("put").encode())
    drive.ask("POST", "/v1/files", body=_canary("--edge\r\n").encode(), headers=FORM)
    drive.ask("POST", CHAT, body=json.dumps({"model": "m", "messages": [{"role": _canary("role")}]}).encode())
    for query in ("limit", "after", "order", "purpose", "status", "created_after", "unknown"):
        drive.ask("GET", f"/v1/files?{query}={_canary('query')}")
        drive.ask("GET", f"/v1/batches?{query}={_canary('query')}")
    drive.ask("GET", f"/v1/nowhere?{_canary('query')}")
    head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\nx-api-key: {_canary('header')}\r\n"
    for broken in (f"broken {_canary('header')}", f"content-length: {_canary('length')}"):
        drive.send_raw(f"{head}{broken}\r\n\r\n".encode())
    drive.send_raw(f"{_canary('method')} / HTTP/1.1\r\n\r\n".encode())


def _send_wrong_credentials(drive: _Drive) -> None:
    """Send wrong keys in every header."""
    wrong = _canary("wrong-key")
    for name in ("x-api-key", "x-project-id", "authorization", "idempotency-key", "range", "content-type", "cookie"):
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/batches"), ("POST", CHAT)):
            drive.ask(method, path, body=b"{}" if method == "POST" else None, headers={name: wrong})
    for path in ("/metrics", "/readyz"):
        relayed = {"x-forwarded-for": wrong, "authorization": f"Bearer {wrong}"}
        drive.ask("GET", path, headers=relayed)


def _lose_the_disk(drive: _Drive) -> None:
    """Let no process of the service write a file, then allow it again."""
    pids = [member.pid for member in drive.service.program.family()]
    soft, hard = resource.prlimit(pids[0], resource.RLIMIT_FSIZE)
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    form = upload_form(_line("one", "one")).replace(b"in.jsonl", _canary("file").encode())
    assert drive.ask("POST", "/v1/files", body=form, headers=FORM).status >= 500
    drive.chat("good")
    with suppress(IncompleteRead):
        # The stream cannot be charged.
        drive.chat("good", stream=True)
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
    wait_until(lambda: drive.ask("GET", "/readyz").status == 200, what="the disk is back")


def _lose_key_and_quota(drive: _Drive, short_lived: Account) -> None:
    """Revoke a key while its batch runs, and take an organization's money away."""
    batch_id = drive.submit(*(_line(f"{n}", "[[delay=0.5]]") for n in range(300)), account=short_lived).json["id"]
    drive.run("keys revoke", "keys", "revoke", short_lived["api_key"])
    batch = await_end(drive.service.client(drive.owner), batch_id)
    assert batch.error_file_id is not None
    assert drive.ask("GET", "/v1/files", headers=credentials_of(short_lived)).status == 403
    drive.run("orgs set-balance", "orgs", "set-balance", "default", "0", "--credits", "0")
    assert drive.chat("good").status == drive.chat("good", stream=True).status == 429


def _look_as_others(drive: _Drive) -> None:
    """Collect what another tenant and the operator can see."""
    for path in ("/v1/files", "/v1/batches", "/v1/models", "/v1/files/x", "/v1/batches/x", "/nowhere", "/readyz"):
        headers = credentials_of(drive.bystander)
        drive.bystander_replies.append(call(drive.service.port, "GET", path, headers=headers))
    drive.metrics = call(drive.service.port, "GET", "/metrics", headers={}).body.decode()
    for command in ("keys list", "orgs list", "projects list", "usage"):
        drive.run(command, *command.split())
        drive.run(f"{command} --json", *command.split(), "--json")
    drive.run("usage --by batch", "usage", "--by", "batch")
    drive.run("keys revoke wrong", "keys", "revoke", _canary("wrong-key"))


@pytest.fixture(scope="module")
def parrot() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Parrot) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory, parrot: str) -> _Drive:
    """Return the finished drive: the service has ended, and its log and folder are complete."""
    folder = tmp_path_factory.mktemp("secrets")
    config: Path = folder / "batchline.toml"
    config.write_text(_SETTINGS.format(mark=_MARK, parrot=parrot, max_request_bytes=_MAX_REQUEST_BYTES))
    with running_mock() as mock, running_service(folder, mock.url, config=config) as service:
        bystander = json.loads(service.keys("create", "--json", "--org", "another"))
        driven = _Drive(service, owner=service.account, bystander=bystander)
        _run_batches(driven)
        _leave_a_stream(driven)
        _send_invalid_requests(driven)
        _send_wrong_credentials(driven)
        _lose_the_disk(driven)
        _lose_key_and_quota(driven, service.new_account("default"))
        _look_as_others(driven)
    return driven


def _marked(text: str) -> list[str]:
    """Return every place with the mark, with the text before it."""
    return sorted(set(re.findall(rf".{{0,80}}{_MARK}", text)))


def test_everything_happened(drive: _Drive) -> None:
    """Without this, the other tests would prove nothing."""
    assert {reply.status for reply in drive.replies} >= {200, 400, 401, 403, 404, 405, 413, 429, 500, 502, 503, 504}
    for message in (
        "upstream unavailable",
        "upstream still unavailable",
        "upstream stream broke",
        "batchline listens",
        "storage unavailable",
    ):
        assert message in drive.service.log, message
    codes = {
        json.loads(line)["error"]["code"]
        for result in drive.results
        for line in result.splitlines()
        if b'"error":{' in line
    }
    assert codes >= {"invalid_request_error", "internal_error", "authentication_error", "batch_cancelled"}


def test_the_mark_is_where_it_belongs(drive: _Drive) -> None:
    """C5, D1: the owner's results carry prompts, answers and names, so the search can find them."""
    assert all(_marked(result.decode()) for result in drive.results)
    assert any(reply.status == 200 and _marked(reply.body.decode()) for reply in drive.replies)


def test_the_log_repeats_nothing(drive: _Drive) -> None:
    """F5: stdout and stderr, before and after a kill."""
    assert _marked(drive.service.log) == []


def test_metrics_repeat_nothing(drive: _Drive) -> None:
    """F5"""
    assert "batchline_" in drive.metrics
    assert _marked(drive.metrics) == []


@pytest.mark.rule("A6", "An error of the upstream is returned without the upstream's text.")
def test_a_fault_of_the_service_repeats_nothing(drive: _Drive) -> None:
    """A6: a 5xx repeats neither the request nor the upstream's answer."""
    for reply in drive.replies:
        if reply.status >= 500:
            assert _marked(f"{reply.headers}{reply.body.decode()}") == []


def test_answers_to_another_tenant_contain_nothing(drive: _Drive) -> None:
    """A8"""
    for reply in drive.bystander_replies:
        assert _marked(f"{reply.headers}{reply.body.decode()}") == []


def test_commands_print_nothing(drive: _Drive) -> None:
    """F3"""
    assert {name: found for name, printed in drive.printed.items() if (found := _marked(printed))} == {}


def test_processes_show_nothing(drive: _Drive) -> None:
    """F2: settings of the file do not appear on a command line, where every user can read them."""
    assert any("serve" in process for process in drive.processes)
    assert _marked("\n".join(drive.processes)) == []


def _secrets(drive: _Drive) -> dict[str, str]:
    """Return the inner part of each secret, since the hint of a key may be shown."""
    keys = {name: account["api_key"][10:30] for name, account in (("owner", drive.owner), ("other", drive.bystander))}
    return keys | {name: _canary(name) for name in ("admin", "upstream", "parrot", "gone", "password", "wrong-key")}


def test_keys_are_kept_only_as_hashes(drive: _Drive) -> None:
    """F3: nothing in the data folder holds a key, neither a tenant's nor the upstream's nor the administrator's."""
    files = [path for path in drive.service.data_dir.rglob("*") if path.is_file()]
    assert {"batchline.sqlite", "batchline.sqlite-wal"} <= {path.name for path in files}
    held = {path.name: path.read_bytes() for path in files}
    assert any(_MARK.encode() in data for data in held.values())
    for name, secret in _secrets(drive).items():
        assert [path for path, data in held.items() if secret.encode() in data] == [], name


def test_keys_appear_in_no_output(drive: _Drive) -> None:
    """F3, A6: in no answer, no result, no log, no metric and no listing."""
    texts = [f"{reply.headers}{reply.body.decode()}" for reply in (*drive.replies, *drive.bystander_replies)]
    texts += [drive.service.log, drive.metrics, *drive.printed.values(), *drive.processes]
    texts += [result.decode() for result in drive.results]
    for name, secret in _secrets(drive).items():
        assert [text for text in texts if secret in text] == [], name
