"""Files: B1 to B6, B8 to B10."""

import json
from collections.abc import Callable

import pytest

from tests.support.api_server import BOUNDARY, CHAT, FORM, LINE, Api, field, file_part, form, wait_until

PURPOSE = field("purpose", "batch")


@pytest.mark.rule("A9", "Times are integer Unix seconds.")
def test_an_upload_is_answered_with_the_file_object(api: Api) -> None:
    """B1, A9: exactly these fields, with the bytes measured here."""
    reply = api.upload(LINE * 3)
    assert reply.status == 200
    file = reply.json
    created = file.pop("created_at")
    assert isinstance(created, int)
    assert file.pop("id").startswith("file-")
    assert file == {
        "object": "file",
        "bytes": len(LINE) * 3,
        "filename": "in.jsonl",
        "purpose": "batch",
        "status": "processed",
        "expires_at": created + 30 * 86_400,
    }


@pytest.mark.rule("B1", "Bytes are stored as they came, with the fields in either order.")
@pytest.mark.parametrize("data", [b"\x00\xff not even text \r\n--", b"\r\n", b"--" + BOUNDARY.encode(), b"x" * 300_000])
@pytest.mark.parametrize("purpose_first", [True, False])
def test_bytes_are_stored_as_they_came_in_either_order(api: Api, data: bytes, purpose_first: bool) -> None:
    """B1"""
    parts = [PURPOSE, file_part(data)]
    reply = api.send_form(*(parts if purpose_first else parts[::-1]))
    assert reply.status == 200
    assert reply.json["bytes"] == len(data)
    assert api.call("GET", f"/v1/files/{reply.json['id']}/content").body == data


def test_a_chunked_upload_without_a_length_is_fine(api: Api) -> None:
    """B1, B2: as openai-node sends it, cut at every possible place."""
    body = form(file_part(LINE), PURPOSE)
    with api.connect() as sock:
        sock.sendall(api.head("POST /v1/files", f"content-type: {FORM['content-type']}", "transfer-encoding: chunked"))
        sock.sendall(b"".join(b"1\r\n" + body[at : at + 1] + b"\r\n" for at in range(len(body))) + b"0\r\n\r\n")
        assert b'"bytes":%d' % len(LINE) in sock.recv(65536)


@pytest.mark.rule("B1", "An upload is never held in memory whole.")
def test_an_upload_goes_to_the_disk_while_it_comes_in(serve: Callable[..., Api]) -> None:
    """B1: never in memory whole."""
    api = serve()
    half = b"x" * 4_000_000
    body = form(PURPOSE, file_part(half + half))
    middle = body.index(b"x" * 100) + len(half)

    def on_disk() -> int:
        return sum((api.folder / path).stat().st_size for path in api.stored())

    with api.connect() as sock:
        head = api.head("POST /v1/files", f"content-type: {FORM['content-type']}", f"content-length: {len(body)}")
        sock.sendall(head + body[:middle])
        wait_until(lambda: on_disk() > len(half) - 200_000)
        assert api.uploading() == 1
        sock.sendall(body[middle:])
        assert b'"bytes":8000000' in sock.recv(65536)
    assert api.uploading() == 0


@pytest.mark.rule("B2", "What is no form is invalid_content_type.")
@pytest.mark.parametrize(
    ("content_type", "code"),
    [
        ("application/json", "invalid_content_type"),
        ("multipart/mixed; boundary=x", "invalid_content_type"),
        ("", "invalid_content_type"),
        ("multipart/form-data", "invalid_multipart"),
        (f"multipart/form-data; boundary={'b' * 300}", "invalid_multipart"),
    ],
)
def test_what_is_no_form_is_refused(api: Api, content_type: str, code: str) -> None:
    """B2"""
    reply = api.call("POST", "/v1/files", body=form(PURPOSE), headers={"content-type": content_type})
    assert reply.status == 400
    assert reply.error["code"] == code
    assert reply.error["type"] == "invalid_request_error"


def many_fields(count: int) -> bytes:
    return form(*(field(f"f{n}", "v") for n in range(count)), PURPOSE, file_part(LINE))


@pytest.mark.rule("B2", "A form that is cut off is invalid_multipart.")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no multipart at all",
        form(PURPOSE, file_part(LINE))[:-4],
        form(PURPOSE, file_part(LINE)).replace(f"--{BOUNDARY}--".encode(), b""),
        form(PURPOSE, b"content-disposition form-data\r\n\r\nx"),
        form(PURPOSE, b"content-disposition: form-data\r\n\r\nx"),
        form(PURPOSE, b"x-header: " + b"y" * 10_000 + b"\r\n\r\nx"),
        form(PURPOSE, file_part(LINE), file_part(LINE)),
        form(field("note", "y" * 70_000), PURPOSE, file_part(LINE)),
        many_fields(40),
    ],
    ids=["empty", "text", "no end", "no last", "bad header", "no name", "long header", "two", "long field", "many"],
)
def test_a_form_that_cannot_be_read_is_invalid_multipart(api: Api, body: bytes) -> None:
    """B2"""
    before = api.stored()
    reply = api.call("POST", "/v1/files", body=body, headers=FORM)
    assert reply.status == 400
    assert reply.error["code"] == "invalid_multipart"
    assert api.stored() == before
    assert api.uploading() == 0


def test_fields_nobody_knows_are_ignored(api: Api) -> None:
    """B1"""
    reply = api.call("POST", "/v1/files", body=many_fields(10), headers=FORM)
    assert reply.status == 200


@pytest.mark.rule("B2", "Any purpose but batch is invalid_purpose.")
@pytest.mark.rule("B2", "A form without a file is missing_file, an empty one empty_file.")
@pytest.mark.parametrize(
    ("parts", "code", "param"),
    [
        ([field("purpose", "fine-tune"), file_part(LINE)], "invalid_purpose", "purpose"),
        ([file_part(LINE), field("purpose", "batch_output")], "invalid_purpose", "purpose"),
        ([file_part(LINE), field("purpose", "")], "invalid_purpose", "purpose"),
        ([file_part(LINE)], "invalid_purpose", "purpose"),
        ([PURPOSE], "missing_file", "file"),
        ([PURPOSE, field("data", "x")], "missing_file", "file"),
        ([PURPOSE, file_part(b"")], "empty_file", "file"),
        ([file_part(b""), PURPOSE], "empty_file", "file"),
    ],
)
def test_a_form_without_its_parts_is_refused_and_leaves_nothing(
    api: Api, parts: list[bytes], code: str, param: str
) -> None:
    """B2"""
    before = api.stored()
    reply = api.send_form(*parts)
    assert reply.status == 400
    assert (reply.error["code"], reply.error["param"]) == (code, param)
    assert api.stored() == before
    assert api.uploading() == 0


@pytest.mark.rule("B2", "The largest file fits, one byte more is 413.")
def test_the_largest_file_fits_and_one_byte_more_does_not(shared: Callable[..., Api]) -> None:
    """B2"""
    api = shared(max_file_bytes=1000)
    assert api.upload(b"x" * 1000).status == 200
    before = api.stored()
    reply = api.upload(b"x" * 1001)
    assert reply.status == 413
    assert (reply.error["code"], reply.error["type"]) == ("file_too_large", "invalid_request_error")
    assert api.stored() == before
    assert api.uploading() == 0


@pytest.mark.rule("B2", "413 is answered as soon as it is known.")
def test_too_large_is_known_from_the_length_before_a_byte_came(shared: Callable[..., Api]) -> None:
    """B2"""
    api = shared(max_file_bytes=1000)
    with api.connect() as sock:
        sock.sendall(api.head("POST /v1/files", f"content-type: {FORM['content-type']}", f"content-length: {2**21}"))
        assert sock.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_too_large_is_answered_while_the_body_still_comes(serve: Callable[..., Api]) -> None:
    """B2: no length is given, so the bytes are counted."""
    api = serve(max_file_bytes=100_000)
    data = form(PURPOSE, file_part(b"x" * 200_000))[:-40]
    with api.connect() as sock:
        sock.sendall(
            api.head("POST /v1/files", f"content-type: {FORM['content-type']}", "transfer-encoding: chunked")
            + b"%x\r\n" % len(data)
            + data
            + b"\r\n"
        )
        assert sock.recv(65536).startswith(b"HTTP/1.1 413 ")
    wait_until(lambda: api.uploading() == 0)
    assert api.stored() == []


def test_fields_cannot_smuggle_in_what_a_file_may_not(serve: Callable[..., Api]) -> None:
    """B2: the body as a whole is bounded too."""
    api = serve(max_file_bytes=1000)
    body = form(PURPOSE, file_part(b"x")) + b"e" * (2**20 + 1000)
    with api.connect() as sock:
        sock.sendall(
            api.head("POST /v1/files", f"content-type: {FORM['content-type']}", "transfer-encoding: chunked")
            + b"%x\r\n" % len(body)
            + body
            + b"\r\n"
        )
        assert sock.recv(65536).startswith(b"HTTP/1.1 413 ")
    wait_until(lambda: api.uploading() == 0)
    assert api.stored() == []


@pytest.mark.rule("B2", "Nothing of a broken upload stays on disk.")
def test_a_client_that_leaves_leaves_nothing(serve: Callable[..., Api]) -> None:
    """B2"""
    api = serve()
    with api.connect() as sock:
        head = api.head("POST /v1/files", f"content-type: {FORM['content-type']}", "content-length: 9999999")
        sock.sendall(head + form(PURPOSE, file_part(b"x" * 500_000))[:400_000])
        wait_until(lambda: api.stored() != [])
    wait_until(lambda: api.uploading() == 0 and api.stored() == [])
    assert api.call("GET", "/v1/files").json["data"] == []


NAMES = [
    "in.jsonl",
    "naïve – 名前.jsonl",
    "../../etc/passwd",
    "C:\\dir\\in.jsonl",
    "<script>alert(1)</script>",
    "a;b=c.jsonl",
    "100%22.jsonl",
    "-rf",
    "..",
]


@pytest.mark.rule("B3", "A filename is kept as the client sent it.")
@pytest.mark.parametrize("name", NAMES)
def test_a_filename_is_kept_as_it_was_sent(api: Api, name: str) -> None:
    """B3"""
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    reply = api.send_form(PURPOSE, file_part(LINE, disposition=f'form-data; name="file"; filename="{escaped}"'))
    assert reply.json["filename"] == name
    assert api.call("GET", f"/v1/files/{reply.json['id']}").json["filename"] == name


@pytest.mark.parametrize(
    ("disposition", "name"),
    [
        ('form-data; name="file"; filename="say \\"hi\\".jsonl"', 'say "hi".jsonl'),
        ("form-data; name=file; filename=bare.jsonl", "bare.jsonl"),
        ("form-data; filename*=UTF-8''na%C3%AFve.jsonl; name=\"file\"", "naïve.jsonl"),
        ('form-data; name="file"; filename="bell\x07nul\x00.jsonl"', "bell�nul�.jsonl"),
        (f'form-data; name="file"; filename="{"n" * 8000}"', "n" * 8000),
        (f'form-data; name="file"; filename="{"漢" * 2600}"', "漢" * 2600),
        ('FORM-DATA; NAME="file"; FILENAME="loud.jsonl"', "loud.jsonl"),
    ],
)
def test_filenames_as_clients_write_them(api: Api, disposition: str, name: str) -> None:
    """B3"""
    reply = api.send_form(PURPOSE, file_part(LINE, disposition=disposition))
    assert reply.json["filename"] == name


@pytest.mark.rule("B3", "A filename that is too long to be kept is refused, not cut.")
def test_a_filename_that_is_too_long_is_refused(api: Api) -> None:
    reply = api.send_form(PURPOSE, file_part(LINE, disposition=f'form-data; name="file"; filename="{"n" * 9000}"'))
    assert (reply.status, reply.error["code"]) == (400, "invalid_multipart")


@pytest.mark.parametrize("disposition", ['form-data; name="file"', 'form-data; name="file"; filename=""'])
def test_a_file_without_a_name_is_named_after_its_id(api: Api, disposition: str) -> None:
    """B3"""
    file = api.send_form(PURPOSE, file_part(LINE, disposition=disposition)).json
    assert file["filename"] == f"{file['id']}.jsonl"


@pytest.mark.rule("B4", "expires_after is honoured, within its bounds.")
def test_expires_after_is_honoured(api: Api) -> None:
    """B4"""
    for seconds in (3600, 2_592_000):
        fields = field("expires_after[anchor]", "created_at"), field("expires_after[seconds]", str(seconds))
        file = api.send_form(PURPOSE, *fields, file_part(LINE)).json
        assert file["expires_at"] - file["created_at"] == seconds


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"expires_after[seconds]": "3600"}, "expires_after[anchor]"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "expires_after[anchor]"),
        ({"expires_after[anchor]": "created_at"}, "expires_after[seconds]"),
        *(
            ({"expires_after[anchor]": "created_at", "expires_after[seconds]": wrong}, "expires_after[seconds]")
            for wrong in ("3599", "2592001", "1e4", "-3600", "", "9" * 5000, "٣٦٠٠")
        ),
    ],
)
def test_a_lifetime_that_cannot_be_is_refused(api: Api, fields: dict[str, str], param: str) -> None:
    """B4"""
    before = api.stored()
    reply = api.send_form(PURPOSE, file_part(LINE), *(field(name, value) for name, value in fields.items()))
    assert reply.status == 400
    assert reply.error["param"] == param
    assert api.stored() == before


def test_an_expired_file_is_gone_on_every_route(serve: Callable[..., Api]) -> None:
    """B4, B6"""
    api = serve(file_retention_seconds=1000)
    file_id = api.upload().json["id"]
    api.clock.ahead = 500
    assert api.call("GET", f"/v1/files/{file_id}").status == 200
    api.clock.ahead = 1001
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        reply = api.call(method, f"/v1/files/{file_id}{path}")
        assert (reply.status, reply.error["code"]) == (404, "file_not_found")
    assert api.call("GET", "/v1/files").json["data"] == []
    assert api.create(input_file_id=file_id, endpoint=CHAT).status == 404


@pytest.mark.rule("B6", "A file that is not there is 404 file_not_found.")
def test_an_unknown_file_is_404(api: Api) -> None:
    """B6"""
    for path in ("", "/content"):
        reply = api.call("GET", f"/v1/files/file-nothing{path}")
        assert reply.status == 404
        assert reply.error == {
            "message": "File file-nothing not found",
            "type": "invalid_request_error",
            "code": "file_not_found",
            "param": None,
        }


@pytest.mark.parametrize("file_id", ["%00", "%FF", "a%0d%0ab", "file-' OR 1=1", "%F0%9F%98%80", "x" * 5000])
def test_ids_that_are_none_are_404_too(api: Api, file_id: str) -> None:
    """B6, A6"""
    reply = api.call("GET", f"/v1/files/{file_id.replace(' ', '%20')}")
    assert reply.status == 404
    assert reply.error["code"] == "file_not_found"


@pytest.mark.rule("A12", "An empty id is 400.")
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/files/"), ("DELETE", "/v1/files/"), ("GET", "/v1/files//content")]
)
def test_an_empty_file_id_is_400(api: Api, method: str, path: str) -> None:
    """A12"""
    reply = api.call(method, path)
    assert reply.status == 400
    assert reply.error["param"] == "file_id"


@pytest.mark.rule("B8", "A deleted file's object leaves storage at once.")
def test_a_deleted_file_is_gone_at_once_and_only_once(serve: Callable[..., Api]) -> None:
    """B8"""
    api = serve()
    file_id = api.upload().json["id"]
    reply = api.call("DELETE", f"/v1/files/{file_id}")
    assert reply.status == 200
    assert reply.json == {"id": file_id, "object": "file", "deleted": True}
    assert api.stored() == []
    assert api.call("DELETE", f"/v1/files/{file_id}").error["code"] == "file_not_found"
    assert api.call("GET", f"/v1/files/{file_id}/content").status == 404


def test_deleting_the_input_changes_nothing_for_its_batch(api: Api) -> None:
    """B9"""
    file_id = api.upload().json["id"]
    batch = api.create(input_file_id=file_id, endpoint=CHAT).json
    assert api.call("DELETE", f"/v1/files/{file_id}").status == 200
    assert api.call("GET", f"/v1/batches/{batch['id']}").json == batch


@pytest.mark.rule("B10", "The prefix file_ names the same file on every route.")
def test_the_legacy_prefix_names_the_same_file_everywhere(api: Api) -> None:
    """B10"""
    file_id = api.upload().json["id"]
    legacy = file_id.replace("file-", "file_", 1)
    assert api.call("GET", f"/v1/files/{legacy}").json["id"] == file_id
    assert api.call("GET", f"/v1/files/{legacy}/content").body == LINE
    assert api.call("GET", f"/v1/files?after={legacy}").status == 200
    assert api.create(input_file_id=legacy, endpoint=CHAT).json["input_file_id"] == file_id
    assert api.call("DELETE", f"/v1/files/{legacy}").json["id"] == file_id


def test_json_answers_are_json(api: Api) -> None:
    reply = api.upload()
    assert reply.headers["content-type"] == "application/json"
    assert json.loads(reply.body)
