"""The bytes of a file: B3, B7."""

from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchline.api.content import headers_of, span_of
from batchline.domain.errors import RangeNotSatisfiable
from batchline.domain.records import File
from tests.support.api_server import Api, field, file_part

DATA = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def path(api: Api) -> str:
    return f"/v1/files/{api.upload(DATA).json['id']}/content"


@pytest.mark.rule("B7", "A download has its type, its name and its length.")
def test_a_download_is_the_whole_file_with_its_headers(api: Api, path: str) -> None:
    """B7"""
    reply = api.call("GET", path)
    assert (reply.status, reply.body) == (200, DATA)
    assert reply.headers["content-type"] == "application/jsonl"
    assert reply.headers["content-length"] == str(len(DATA))
    assert reply.headers["content-disposition"] == 'attachment; filename="in.jsonl"'
    assert reply.headers["accept-ranges"] == "bytes"
    assert "transfer-encoding" not in reply.headers


def test_head_tells_the_size_and_sends_nothing(api: Api, path: str) -> None:
    """B7"""
    reply = api.call("HEAD", path, headers={"range": "bytes=0-1"})
    assert (reply.status, reply.body) == (200, b"")
    assert reply.headers["content-length"] == str(len(DATA))


def test_a_large_download_arrives_whole(api: Api) -> None:
    """B7: over many chunks."""
    data = DATA * 300
    file_id = api.upload(data).json["id"]
    assert api.call("GET", f"/v1/files/{file_id}/content").body == data


@pytest.mark.rule("B7", "Range is honoured.")
@pytest.mark.parametrize(
    ("wanted", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-19", 10, 20),
        ("bytes=10000-", 10000, 10240),
        ("bytes=-5", 10235, 10240),
        ("bytes=-99999", 0, 10240),
        ("bytes=5-99999999999999999999999", 5, 10240),
        ("BYTES=1-2", 1, 3),
    ],
)
def test_a_range_is_that_part_of_the_file(api: Api, path: str, wanted: str, start: int, end: int) -> None:
    """B7"""
    reply = api.call("GET", path, headers={"range": wanted})
    assert (reply.status, reply.body) == (206, DATA[start:end])
    assert reply.headers["content-range"] == f"bytes {start}-{end - 1}/{len(DATA)}"
    assert reply.headers["content-length"] == str(end - start)


@pytest.mark.parametrize(
    "wanted", ["bytes=0-1,4-5", "bytes=", "bytes=-", "bytes=5-4", "lines=1-2", "bytes=a-b", "bytes=1-2-3", "nonsense"]
)
def test_ranges_that_are_none_or_several_get_the_whole_file(api: Api, path: str, wanted: str) -> None:
    """B7"""
    reply = api.call("GET", path, headers={"range": wanted})
    assert (reply.status, reply.body) == (200, DATA)


@pytest.mark.parametrize("wanted", ["bytes=10240-", "bytes=99999-999999", "bytes=-0", f"bytes={'9' * 5000}-"])
def test_a_range_outside_of_the_file_is_416(api: Api, path: str, wanted: str) -> None:
    """B7"""
    reply = api.call("GET", path, headers={"range": wanted})
    assert reply.status == 416
    assert reply.headers["content-range"] == "bytes */10240"
    assert reply.error["code"] == "range_not_satisfiable"


def test_a_range_of_some_other_version_gets_the_whole_file(api: Api, path: str) -> None:
    """B7"""
    reply = api.call("GET", path, headers={"range": "bytes=0-1", "if-range": '"other"'})
    assert (reply.status, reply.body) == (200, DATA)


@given(first=st.integers(0, 40), last=st.integers(0, 40), size=st.integers(0, 30))
def test_every_range_is_a_slice(first: int, last: int, size: int) -> None:
    """B7"""
    data = bytes(range(size))
    for header, expected in (
        (f"bytes={first}-{last}", data[first : last + 1]),
        (f"bytes={first}-", data[first:]),
        (f"bytes=-{last}", data[-last:] if last else b""),
    ):
        try:
            span = span_of(header, size)
        except RangeNotSatisfiable:
            assert expected == b""
            continue
        if header == f"bytes={first}-{last}" and last < first:
            assert not span.partial
        else:
            assert data[span.start : span.start + span.length] == expected != b""


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300))
def test_no_filename_can_break_the_header(name: str) -> None:
    """B3: one header of printable ASCII, whose name contains no path, for every name that a client may give."""
    header = headers_of(file_named(name), span_of(None, 1))["content-disposition"]
    assert header.isascii()
    assert header.isprintable()
    assert header.startswith('attachment; filename="')
    plain, _, extended = header.removeprefix('attachment; filename="').partition('"')
    for seen in (plain, unquote(extended.removeprefix("; filename*=UTF-8''")) or plain):
        assert not set(seen) & set("/\\")
        assert seen.strip(". ")


@pytest.mark.rule("B3", "A filename cannot break a header.")
@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("plain name.jsonl", 'attachment; filename="plain name.jsonl"'),
        ("naïve.jsonl", "attachment; filename=\"na_ve.jsonl\"; filename*=UTF-8''na%C3%AFve.jsonl"),
        ('a"b\r\nx: y', "attachment; filename=\"a_b__x_ y\"; filename*=UTF-8''a%22b%0D%0Ax%3A%20y"),
        ("../up/in.jsonl", 'attachment; filename=".._up_in.jsonl"'),
        ("..", 'attachment; filename="file-1.jsonl"'),
        ("n" * 300 + ".jsonl", f'attachment; filename="{"n" * 249}.jsonl"'),
        ("n." + "s" * 300, f'attachment; filename="n.{"s" * 253}"'),
        ("é" * 300, f"attachment; filename=\"{'_' * 127}\"; filename*=UTF-8''{'%C3%A9' * 127}"),
    ],
)
def test_filenames_are_encoded_by_the_book(name: str, header: str) -> None:
    """B3, B7: RFC 6266"""
    assert headers_of(file_named(name), span_of(None, 1))["content-disposition"] == header


def test_a_hostile_name_travels_all_the_way(api: Api) -> None:
    """B3, B7"""
    part = file_part(b"x", disposition='form-data; name="file"; filename="..\\\\\\"; evil=\\"1"')
    file = api.send_form(field("purpose", "batch"), part).json
    assert file["filename"] == '..\\"; evil="1'
    reply = api.call("GET", f"/v1/files/{file['id']}/content")
    assert reply.body == b"x"
    assert reply.headers["content-disposition"].startswith('attachment; filename=".._')


def file_named(name: str) -> File:
    return File(
        id="file-1",
        project_id="p",
        filename=name,
        purpose="batch",
        bytes=1,
        created_at=1,
        expires_at=2,
        is_error=False,
        object_key="uploads/file-1",
    )
