"""The form of an upload: the Content-Type, a line end, and the body."""

from types import ModuleType
from typing import NamedTuple

from batchline.api import files, form_upload, multipart
from batchline.api.multipart import MAX_FIELD_BYTES, Form
from batchline.domain.errors import InvalidRequest
from tests.fuzz.targets.cuts import pieces_of

_MAX_FIELDS = 32


class _Upload(NamedTuple):
    """What an upload would store; only the code if it is refused."""

    error: str | None
    filename: str | None = None
    content: bytes = b""
    expires_after: int | None = None


class MultipartTarget:
    """A form must be read in the same way however it is cut, and everything else is an error of the envelope."""

    name = "multipart"
    # Not form_upload: all but its check of the end, which is run here too, stores what was read.
    modules: tuple[ModuleType, ...] = (multipart,)
    seeds: tuple[bytes, ...] = ()
    dictionary: tuple[bytes, ...] = (
        *(
            b"\r\n",
            b"\r\n\r\n",
            b"--",
            b"--b",
            b"\r\n--b\r\n",
            b"\r\n--b--\r\n",
            b"; boundary=b",
            b"multipart/form-data",
        ),
        *(
            b"Content-Disposition: form-data; ",
            b'name="file"',
            b'name="purpose"',
            b'filename="a"',
            b"filename*=UTF-8''%C3",
        ),
        *(b'name="expires_after[anchor]"', b'name="expires_after[seconds]"', b"created_at", b"3600", b"batch"),
        *(b'"', b"\\", b";", b"=", b":", b"\x00", b"\xff", b"\x85", b"'"),
    )

    def run(self, data: bytes) -> None:
        content_type, _, body = data.partition(b"\n")
        text = content_type.decode("latin-1").strip()
        whole = _upload(text, [body])
        cut = _upload(text, list(pieces_of(body)))
        # A form that is refused may be refused for another of its faults if it comes in pieces.
        assert (whole == cut) or (whole.error and cut.error), (whole, cut)

    def close(self) -> None:
        """Nothing is left."""


def _upload(content_type: str, pieces: list[bytes]) -> _Upload:
    try:
        form = Form(content_type)
        content = b"".join(part for piece in pieces for part in form.feed(piece))
        form_upload._check_end(form, files._check_purpose)
        expires_after = files._expires_after(form)
    except InvalidRequest as error:
        return _Upload(error.code)
    assert len(form.fields) <= _MAX_FIELDS
    assert all(len(value) <= MAX_FIELD_BYTES for value in form.fields.values())
    assert form.filename is None or form.filename.isprintable() or not _has_control(form.filename)
    assert len(content) <= sum(map(len, pieces))
    return _Upload(None, form.filename, content, expires_after)


def _has_control(name: str) -> bool:
    return any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in name)
