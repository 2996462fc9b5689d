"""Calls the API of a batchline server, one request per method. The caller decides when to retry."""

import io
import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar
from urllib.parse import quote

import httpx
from msgspec import DecodeError, Raw
from msgspec.json import Decoder
from msgspec.structs import replace

from batchline import __version__
from batchline.client.errors import BrokenOff, ClientError, InputChanged, RequestRefused, Unreachable, refusal
from batchline.client.events import ServerEvent, read_events
from batchline.client.models import (
    RemoteBatch,
    RemotePage,
    RemoteUsage,
    batch_decoder,
    file_decoder,
    object_decoder,
    page_decoder,
    progress_decoder,
    usage_decoder,
)
from batchline.domain.surrogates import Hidden
from batchline.domain.wait_text import AnyWait

T = TypeVar("T")

_STALL_SECONDS = 60.0
_SLOW_STALL_SECONDS = 600.0
"""The longest silence of the server while it stores an upload, or validates the input of a create or a check, which
may have to wait for other inputs."""

_MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""The limit for answers that are not a file. The largest is a page of results: 16 MiB and one line."""

_NOT_CONNECTED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL)


class Client:
    """A client of one server. Every call may raise ClientError."""

    def __init__(self, *, locate: Callable[[], str], headers: Mapping[str, str]) -> None:
        """``locate`` returns the server's URL without ``/v1``. It is called before every request."""
        self._locate = locate
        # An encoded answer could not be resumed with a Range, so none is accepted.
        own_headers = {"accept-encoding": "identity", "user-agent": f"batchline/{__version__}"}
        # The environment is not used: a proxy or a .netrc would see or replace the key.
        self._http = httpx.Client(headers=own_headers | dict(headers), verify=tls_context(), trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def upload(self, path: Path, *, on_progress: Callable[[int], None]) -> str:
        """Upload an input file and return its id. ``on_progress`` gets the number of bytes sent so far."""
        # A file name may contain bytes that are not text. The server only displays the name.
        name = path.name.encode("utf-8", "replace").decode()
        with UploadFile(path, on_progress=on_progress) as file:
            form = {"data": {"purpose": "batch"}, "files": {"file": (name, file, "application/jsonl")}}
            answer = self._call("POST", "/v1/files", stall=_SLOW_STALL_SECONDS, **form)
        return _decode(file_decoder, answer).id

    def create(
        self, file_id: str, *, endpoint: str, idempotency_key: str, more: Mapping[str, Any] | None = None
    ) -> RemoteBatch:
        """Create a batch, or return the batch that an earlier create with this key made.

        ``more`` has further fields of the body.
        """
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"} | dict(more or {})
        headers = {"idempotency-key": idempotency_key}
        answer = self._call("POST", "/v1/batches", json=body, headers=headers, stall=_SLOW_STALL_SECONDS)
        return _decode(batch_decoder, answer)

    def check(self, file_id: str, *, endpoint: str) -> Raw:
        """Return what a create would find in a file. Nothing is stored."""
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
        return _raw(self._call("POST", "/v1/batches/check", json=body, stall=_SLOW_STALL_SECONDS))

    def batch(self, batch_id: str) -> RemoteBatch:
        """Return the current state of a batch."""
        return _decode(batch_decoder, self.batch_object(batch_id))

    def batch_object(self, batch_id: str) -> Raw:
        """Return the object of a batch as the server sent it."""
        return _raw(self._call("GET", _batch_path(batch_id)))

    def batches(self, *, after: str | None = None, limit: int, status: str | None = None) -> RemotePage:
        """Return a page of the batches, the newest first."""
        return self._page("/v1/batches", after=after, limit=limit, status=status)

    def progress(self, batch_id: str) -> Raw:
        """Return the progress of a batch as the server sent it."""
        return _raw(self._call("GET", f"{_batch_path(batch_id)}/progress"))

    def cancel(self, batch_id: str) -> Raw:
        """Cancel a batch and return its object."""
        return _raw(self._call("POST", f"{_batch_path(batch_id)}/cancel"))

    def release(self, batch_id: str) -> Raw:
        """Let a held batch go on, and return its object."""
        return _raw(self._call("POST", f"{_batch_path(batch_id)}/release"))

    def rerun(self, batch_id: str, body: Mapping[str, Any], *, idempotency_key: str) -> Raw:
        """Create a batch of the failed lines of another one, and return its object."""
        headers = {"idempotency-key": idempotency_key}
        path = f"{_batch_path(batch_id)}/rerun"
        return _raw(self._call("POST", path, json=dict(body), headers=headers, stall=_SLOW_STALL_SECONDS))

    def results(self, batch_id: str, *, after: str | None, limit: int, status: str | None) -> RemotePage:
        """Return a page of the recorded lines of a batch, in the order in which they were recorded."""
        return self._page(f"{_batch_path(batch_id)}/results", after=after, limit=limit, status=status)

    def follow_results(self, batch_id: str, *, after: str | None, status: str | None) -> Iterator[list[ServerEvent]]:
        """Yield the events of a batch as they come: its recorded lines, its state, and its end.

        Raise BrokenOff if the connection ends before the end of the batch. Go on with ``after`` set to the id of the
        last event.
        """
        headers = {"accept": "text/event-stream"} | ({"last-event-id": after} if after else {})
        params = {"status": status} if status else {}
        path = f"{_batch_path(batch_id)}/results"
        with self._request("GET", path, headers=headers, params=params) as response:
            for events in read_events(response.iter_raw()):
                yield events
                if any(event.kind == "end" for event in events):
                    return
        raise BrokenOff("the connection ended before the batch did")

    def merged(self, batch_id: str) -> Iterator[bytes]:
        """Yield the bytes of the newest result of each line, over a batch and its reruns."""
        with self._request("GET", f"{_batch_path(batch_id)}/merged") as response:
            yield from response.iter_raw()

    def files(self, *, after: str | None = None, limit: int, purpose: str | None = None) -> RemotePage:
        """Return a page of the files, the newest first."""
        return self._page("/v1/files", after=after, limit=limit, purpose=purpose)

    def file_object(self, file_id: str) -> Raw:
        """Return the object of a file as the server sent it."""
        return _raw(self._call("GET", f"/v1/files/{quote(file_id, safe='')}"))

    def delete_file(self, file_id: str) -> Raw:
        """Delete a file."""
        return _raw(self._call("DELETE", f"/v1/files/{quote(file_id, safe='')}"))

    def models(self) -> list[Raw]:
        """Return the models that the project may use."""
        return _decode(page_decoder, self._call("GET", "/v1/models")).data

    def usage(self, *, start_time: int, end_time: int, bucket: str) -> list[RemoteUsage]:
        """Return what the project used over a period, by bucket of time and model."""
        params = {"start_time": start_time, "end_time": end_time, "bucket": bucket}
        return _decode(usage_decoder, self._call("GET", "/v1/usage", params=params)).data

    def download(self, file_id: str, target: BinaryIO, *, on_progress: Callable[[int, int], None]) -> None:
        """Append to ``target`` the bytes of a file that it does not have yet.

        ``on_progress`` gets the number of bytes that ``target`` has and the total. Raise BrokenOff if the connection
        ends early; ``target`` then keeps what arrived, and the next call resumes after it.
        """
        start = target.tell()
        headers = {"range": f"bytes={start}-"} if start else {}
        path = f"/v1/files/{quote(file_id, safe='')}/content"
        try:
            self._download(path, target, headers=headers, on_progress=on_progress)
        except RequestRefused as error:
            # Nothing is left to download if the connection broke behind the last byte.
            if not start or error.status != 416 or error.file_bytes != start:
                raise

    def _download(
        self, path: str, target: BinaryIO, *, headers: Mapping[str, str], on_progress: Callable[[int, int], None]
    ) -> None:
        start = target.tell()
        with self._request("GET", path, headers=headers) as response:
            if start and response.status_code != 206:
                # The server ignored the range: its answer is the whole file.
                target.seek(0)
                target.truncate()
            total = target.tell() + int(response.headers.get("content-length", 0))
            # Without a chunk size: httpx would hold back, and lose, a last chunk that is not full.
            for chunk in response.iter_raw():
                target.write(chunk)
                on_progress(target.tell(), total)

    def waiting_for(self, batch_id: str) -> AnyWait | None:
        """Return why lines of a batch wait; None if none do, or if the server does not say."""
        try:
            return _decode(progress_decoder, self.progress(batch_id)).waiting_for
        except ClientError:
            return None

    def _page(self, path: str, **params: str | int | None) -> RemotePage:
        given = {name: value for name, value in params.items() if value is not None}
        answer = self._call("GET", path, params=given)
        try:
            return page_decoder.decode(answer)
        except (DecodeError, UnicodeDecodeError):
            return _decode_hidden(answer)

    def _call(self, method: str, path: str, **options: Any) -> bytes:
        """Return the body of a successful answer. Raise ClientError."""
        with self._request(method, path, **options) as response:
            return _read(response)

    @contextmanager
    def _request(
        self, method: str, path: str, *, stall: float = _STALL_SECONDS, **options: Any
    ) -> Iterator[httpx.Response]:
        """Send a request and yield its successful answer, with the body still to be read. Raise ClientError."""
        url = self._locate() + path
        try:
            with self._http.stream(method, url, timeout=stall, **options) as response:
                if not response.is_success:
                    headers = response.headers
                    raise refusal(response.status_code, response.reason_phrase, headers, _read(response))
                yield response
        except _NOT_CONNECTED as failure:
            raise Unreachable(_reason(failure)) from failure
        except httpx.TransportError as failure:
            raise BrokenOff(f"the connection broke off: {_reason(failure)}") from failure


class UploadFile(io.FileIO):
    """An input file that is read while it is sent. It ends at the size that it had when it was opened."""

    def __init__(self, path: Path, *, on_progress: Callable[[int], None]) -> None:
        super().__init__(path)
        self._path, self._on_progress = path, on_progress
        self._size = os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to ``size`` bytes. Raise InputChanged if the file became shorter or unreadable."""
        left = self._size - self.tell()
        try:
            chunk = super().read(left if size is None or size < 0 else min(size, left)) or b""
        except OSError as failure:
            # This is not a failure of the connection, so a retry would not help.
            raise InputChanged(f"{self._path} cannot be read any more: {failure.strerror}") from failure
        if left and not chunk:
            raise InputChanged(f"{self._path} became shorter while it was sent")
        if chunk:
            self._on_progress(self.tell())
        return chunk


def is_healthy(url: str, *, timeout: float) -> bool:
    """Return whether the server at this URL answers on ``/healthz``."""
    answer = _health(url, timeout=timeout)
    return answer is not None and answer.is_success


def is_batchline(url: str, *, timeout: float) -> bool:
    """Return whether a server at this URL answers as batchline does."""
    answer = _health(url, timeout=timeout)
    return answer is not None and answer.is_success and answer.headers.get("x-request-id", "").startswith("req_")


def _health(url: str, *, timeout: float) -> httpx.Response | None:
    try:
        return httpx.get(f"{url}/healthz", timeout=timeout, verify=tls_context(), trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None


@cache
def tls_context() -> ssl.SSLContext:
    """Return a context that trusts the certificates of this system, a company's own included, and not httpx's."""
    return ssl.create_default_context()


def _read(response: httpx.Response) -> bytes:
    data = bytearray()
    for chunk in response.iter_raw():
        data += chunk
        if len(data) > _MAX_ANSWER_BYTES:
            raise BrokenOff(f"the answer is larger than {_MAX_ANSWER_BYTES} bytes")
    return bytes(data)


def _reason(failure: Exception) -> str:
    """Return the operating system's text for a failure if it has one, else what happened in plain words."""
    cause: BaseException | None = failure
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__  # httpcore's pool clears the cause
    return next(text for kind, text in _REASONS if isinstance(failure, kind))


_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (httpx.ConnectTimeout, "there was no answer"),
    (httpx.TimeoutException, "the server sent or read nothing for too long"),
    (httpx.RemoteProtocolError, "the server closed it"),
    (httpx.UnsupportedProtocol, "the address is not usable"),
    (httpx.InvalidURL, "the address is not usable"),
    (Exception, "it failed"),
)


def _batch_path(batch_id: str) -> str:
    return f"/v1/batches/{quote(batch_id, safe='')}"


def _raw(answer: bytes) -> Raw:
    """Return an object of the server, after a check that it is one."""
    _decode(object_decoder, answer)
    return Raw(answer)


def _decode_hidden(answer: bytes) -> RemotePage:
    """Return a page with an answer of a model that has a surrogate without a partner, which the decoder refuses."""
    hidden = Hidden.hide(answer)
    if hidden is None:
        return _decode(page_decoder, answer)
    page = _decode(page_decoder, hidden.text)
    return replace(page, data=[Raw(hidden.restore(bytes(raw))) for raw in page.data])


def _decode(decoder: Decoder[T], answer: bytes | Raw) -> T:
    try:
        return decoder.decode(answer)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestRefused(
            200, "the answer is not that of a batchline server; is the URL right?", code=None, headers={}
        ) from None
