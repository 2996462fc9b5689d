"""A project stores no more than its quota: B2."""

import sqlite3
from collections.abc import Callable
from contextlib import closing

import pytest

from tests.support.api_server import CHAT, FORM, LINE, Api, field, file_part, form, read_reply, wait_until

BODY = form(field("purpose", "batch"), file_part(LINE * 100))


@pytest.mark.rule("B2", "An upload over the storage quota of its project is 413, and deleting a file makes room.")
def test_an_upload_over_the_quota_is_refused_until_a_file_is_deleted(serve: Callable[..., Api]) -> None:
    api = serve(project_storage_bytes=2 * len(BODY))
    other = api.new_account("other")
    first = api.upload(LINE * 100)
    assert first.status == 200
    assert api.upload(LINE * 100).status == 200
    refused = api.upload(LINE * 100)
    assert (refused.status, refused.error["code"]) == (413, "storage_quota_exceeded")
    assert refused.headers["x-should-retry"] == "false"
    assert api.upload(LINE * 100, account=other).status == 200
    assert api.call("DELETE", f"/v1/files/{first.json['id']}").status == 200
    assert api.upload(LINE * 100).status == 200
    sample = api.services.metrics.registry.get_sample_value
    assert sample("batchline_refusals_total", {"bound": "project_storage"}) == 1


def test_an_upload_without_a_length_ends_where_the_quota_does(serve: Callable[..., Api]) -> None:
    """B2"""
    api = serve(project_storage_bytes=len(BODY) // 2)
    with api.connect() as sock:
        head = api.head("POST /v1/files", f"content-type: {FORM['content-type']}", "transfer-encoding: chunked")
        sock.sendall(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        refused = read_reply(sock)
    assert (refused.status, refused.error["code"]) == (413, "storage_quota_exceeded")
    wait_until(lambda: api.uploading() == 0)
    assert api.upload(LINE).status == 200


def test_uploads_that_are_under_way_count(serve: Callable[..., Api]) -> None:
    """B2: many at once get no further than one after the other."""
    api = serve(project_storage_bytes=len(BODY) + 100)
    head = api.head("POST /v1/files", f"content-type: {FORM['content-type']}", f"content-length: {len(BODY)}")
    with api.connect() as sock:
        sock.sendall(head + BODY[:5000])
        wait_until(lambda: api.uploading() == 1)
        assert api.upload(LINE).error["code"] == "storage_quota_exceeded"
        sock.sendall(BODY[5000:])
        assert read_reply(sock).status == 200


def test_a_full_project_creates_no_batch(serve: Callable[..., Api]) -> None:
    """B2: a batch keeps a copy of its input, and its results."""
    api = serve(project_storage_bytes=len(BODY))
    create = {"input_file_id": api.upload().json["id"], "endpoint": CHAT}
    first = api.create({"idempotency-key": "k"}, **create)
    assert first.status == 200
    with closing(sqlite3.connect(api.folder / "test.sqlite")) as database, database:
        database.execute("UPDATE files SET bytes = ?", (len(BODY),))
    refused = api.create(**create)
    assert (refused.status, refused.error["code"]) == (413, "storage_quota_exceeded")
    assert api.create({"idempotency-key": "k"}, **create).body == first.body
