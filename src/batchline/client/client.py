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
from msgspec import DecodeError
from msgspec.json import Decoder

from batchline import __version__
from batchline.client.errors import BrokenOff, ClientError, InputChanged, RequestRefused, Unreachable, refusal
from batchline.client.models import RemoteBatch, RemoteWait, batch_decoder, file_decoder, progress_decoder

T = TypeVar("T")

_STALL_SECONDS = 60.0
_SLOW_STALL_SECONDS = 600.0
"""An upload is answered once it is on disk, a create once the whole input is validated, maybe after other inputs."""

_MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""The limit for answers that are not a file."""

_NOT_CONNECTED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL)


class Client:
    """A client for one batch. Every call may raise ClientError."""

    def __init__(self, *, locate: Callable[[], str], headers: Mapping[str, str]) -> None:
        """``locate`` returns the server's URL without ``/v1``. It is called before every request."""
        self._locate = locate
        # An encoded answer could not be resumed with a Range, so none is accepted.
        own_headers = {"accept-encoding": "identity", "user-agent": f"batchline/{__version__}"}
        # The environment is not used: a proxy or a .netrc would see or replace the key.
        self._http = httpx.Client(headers=own_headers | dict(headers), verify=_tls_context(), trust_env=False)

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

    def create(self, file_id: str, *, endpoint: str, idempotency_key: str) -> RemoteBatch:
        """Create a batch, or return the batch that an earlier create with this key made."""
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
        headers = {"idempotency-key": idempotency_key}
        answer = self._call("POST", "/v1/batches", json=body, headers=headers, stall=_SLOW_STALL_SECONDS)
        return _decode(batch_decoder, answer)

    def batch(self, batch_id: str) -> RemoteBatch:
        """Return the current state of a batch."""
        return _decode(batch_decoder, self._call("GET", f"/v1/batches/{quote(batch_id, safe='')}"))

    def cancel(self, batch_id: str) -> None:
        """Cancel a batch."""
        self._call("POST", f"/v1/batches/{quote(batch_id, safe='')}/cancel")

    def download(self, file_id: str, target: BinaryIO, *, on_progress: Callable[[int, int], None]) -> None:
        """Append to ``target`` the bytes of a file that it does not have yet.

        ``on_progress`` gets the number of bytes that ``target`` has and the total. Raise BrokenOff if the connection
        ends early; ``target`` then keeps what arrived, and the next call resumes after it.
        """
        start = target.tell()
        headers = {"range": f"bytes={start}-"} if start else {}
        with self._request("GET", f"/v1/files/{quote(file_id, safe='')}/content", headers=headers) as response:
            if start and response.status_code != 206:
                # The server ignored the range: its answer is the whole file.
                target.seek(0)
                target.truncate()
            total = target.tell() + int(response.headers.get("content-length", 0))
            # Without a chunk size: httpx would hold back, and lose, a last chunk that is not full.
            for chunk in response.iter_raw():
                target.write(chunk)
                on_progress(target.tell(), total)

    def waiting_for(self, batch_id: str) -> RemoteWait | None:
        """Return why lines of a batch wait; None if none do, or if the server does not say."""
        try:
            answer = self._call("GET", f"/v1/batches/{quote(batch_id, safe='')}/progress")
            return _decode(progress_decoder, answer).waiting_for
        except ClientError:
            return None

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
    try:
        return httpx.get(f"{url}/healthz", timeout=timeout, verify=_tls_context(), trust_env=False).is_success
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


@cache
def _tls_context() -> ssl.SSLContext:
    """Trust the certificates of this system, including a company's own, rather than those that come with httpx."""
    return ssl.create_default_context()


def _read(response: httpx.Response) -> bytes:
    data = bytearray()
    for chunk in response.iter_raw():
        data += chunk
        if len(data) > _MAX_ANSWER_BYTES:
            raise BrokenOff(f"the answer is larger than {_MAX_ANSWER_BYTES} bytes")
    return bytes(data)


def _reason(failure: Exception) -> str:
    """Return the operating system's text for a failure if it has one, else the failure's own."""
    cause: BaseException | None = failure
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__  # httpcore's pool clears the cause
    return str(failure).rstrip(".") or type(failure).__name__


def _decode(decoder: Decoder[T], answer: bytes) -> T:
    try:
        return decoder.decode(answer)
    except DecodeError:
        raise RequestRefused(
            200, "the answer is not that of a batchline server; is the URL right?", code=None, headers={}
        ) from None
