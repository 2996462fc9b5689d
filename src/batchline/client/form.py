"""An upload's body, read from the disk while it is sent."""

from collections.abc import Callable, Iterator
from pathlib import Path

from batchline.client.errors import InputChanged

_CHUNK = 256 * 1024
_UNSAFE = {ord('"'): "%22", ord("\r"): "%0D", ord("\n"): "%0A"}


class UploadForm:
    """The form of ``POST /v1/files``. It can be gone through again, from the start, when sending broke off."""

    def __init__(self, path: Path, *, boundary: str, sent: Callable[[int], None]) -> None:
        self._path, self._sent = path, sent
        self._size = path.stat().st_size
        self._head, self._tail = _head(path.name, boundary), f"\r\n--{boundary}--\r\n".encode()
        self.headers = {
            "content-type": f"multipart/form-data; boundary={boundary}",
            "content-length": str(len(self._head) + self._size + len(self._tail)),
        }

    def __iter__(self) -> Iterator[bytes]:
        yield self._head
        sent = 0
        try:
            with self._path.open("rb") as file:
                while sent < self._size:
                    chunk = file.read(min(_CHUNK, self._size - sent))
                    if not chunk:
                        raise InputChanged(f"{self._path} became shorter while it was sent")
                    yield chunk
                    sent += len(chunk)
                    self._sent(sent)
        except OSError as failure:
            # Not to be taken for a failure of the connection, which may be worth another try.
            raise InputChanged(f"{self._path} cannot be read any more: {failure.strerror}") from failure
        yield self._tail


def _head(name: str, boundary: str) -> bytes:
    # A file's name may be bytes that are no text; what is left of it is only shown.
    shown = name.translate(_UNSAFE).encode("utf-8", "replace").decode()
    fields = (
        f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="{shown}"\r\n',
        "content-type: application/jsonl\r\n\r\n",
    )
    return "".join(fields).encode()
