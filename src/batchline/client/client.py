"""The calls that one batch takes, each one request: when to try again is for the caller to say."""

import re
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import quote

from msgspec import DecodeError
from msgspec.json import Decoder
from msgspec.json import encode as encode_json

from batchline.client.errors import BrokenOff, ClientError, RequestRefused
from batchline.client.form import UploadForm
from batchline.client.http import Http
from batchline.client.models import RemoteBatch, RemoteFile, batch_decoder, file_decoder

T = TypeVar("T")

_SLOW_SECONDS = 600.0
"""An upload is answered once it is on the disk, a create once all of it was checked, maybe behind others'."""

_CHUNK = 256 * 1024
_PAUSED = re.compile(r'^batchline_upstream_paused\{(?=.*\breason="([^"]*)").*\} 1(?:\.0)?$', re.MULTILINE)


class Client:
    """Every call may raise ClientError."""

    def __init__(self, http: Http) -> None:
        self._http = http

    def upload(self, path: Path, *, boundary: str, sent: Callable[[int], None]) -> str:
        """The id of the new file. ``sent`` hears how many bytes are on their way."""
        form = UploadForm(path, boundary=boundary, sent=sent)
        file: RemoteFile = _decoded(
            file_decoder, self._http.call("POST", "/v1/files", body=form, headers=form.headers, stall=_SLOW_SECONDS)
        )
        return file.id

    def create(self, file_id: str, *, endpoint: str, idempotency_key: str) -> RemoteBatch:
        wanted = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
        headers = {"content-type": "application/json", "idempotency-key": idempotency_key}
        answer = self._http.call("POST", "/v1/batches", body=encode_json(wanted), headers=headers, stall=_SLOW_SECONDS)
        return _decoded(batch_decoder, answer)

    def batch(self, batch_id: str) -> RemoteBatch:
        return _decoded(batch_decoder, self._http.call("GET", f"/v1/batches/{quote(batch_id, safe='')}"))

    def cancel(self, batch_id: str) -> None:
        self._http.call("POST", f"/v1/batches/{quote(batch_id, safe='')}/cancel")

    def fetch(self, file_id: str, into: BinaryIO, *, got: Callable[[int, int], None]) -> None:
        """Write a file's bytes, or those that are still missing from what was written before.

        ``got`` hears how many bytes of how many are there. Raises BrokenOff when some are still missing.
        """
        start = into.tell()
        headers = {"range": f"bytes={start}-"} if start else {}
        with self._http.open("GET", f"/v1/files/{quote(file_id, safe='')}/content", headers=headers) as response:
            if start and response.status != 206:
                into.seek(0)
                into.truncate()
            total = into.tell() + int(response.headers.get("content-length", 0))
            for chunk in iter(lambda: _read(response), b""):
                into.write(chunk)
                got(into.tell(), total)
        if into.tell() < total:
            raise BrokenOff("the download broke off")

    def pause_reason(self) -> str | None:
        """Why the server's upstream is taken to be gone, if it is and if the server tells us."""
        try:
            told = self._http.call("GET", "/metrics")
        except ClientError:
            return None
        paused = _PAUSED.search(told.decode(errors="replace"))
        return paused[1] if paused else None


def _read(response: HTTPResponse) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, HTTPException) as failure:
        raise BrokenOff("the download broke off") from failure


def _decoded(decoder: Decoder[T], answer: bytes) -> T:
    try:
        return decoder.decode(answer)
    except DecodeError:
        raise RequestRefused(
            200, "the answer is not that of a batchline server; is the URL right?", code=None, headers={}
        ) from None
