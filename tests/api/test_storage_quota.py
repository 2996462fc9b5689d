"""A project and an organization store no more than their quotas: B2."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from batchline.cli.loading import load_settings
from batchline.domain.errors import StorageFull
from batchline.domain.records import Owner
from batchline.pipeline.storage_quota import StorageQuota
from batchline.ports import Files
from tests.support.api_server import CHAT, FORM, LINE, Api, field, file_part, form, read_reply, wait_until


class _FixedFiles:
    """Files of a store in which nothing is stored yet."""

    async def stored_bytes(self, project_id: str) -> int:
        return 0

    async def stored_bytes_of_organization(self, organization_id: str) -> int:
        return 0


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


def test_an_upload_without_a_length_leaves_room_for_others(serve: Callable[..., Api]) -> None:
    """B2: openai-node sends no length. What has not arrived refuses no other upload and no create."""
    api = serve(project_storage_bytes=4 * 1024 * 1024)
    head = api.head("POST /v1/files", f"content-type: {FORM['content-type']}", "transfer-encoding: chunked")
    with api.connect() as sock:
        sock.sendall(head + b"%x\r\n%b\r\n" % (5000, BODY[:5000]))
        wait_until(lambda: api.uploading() == 1)
        file = api.upload(LINE)
        assert file.status == 200
        assert api.create(input_file_id=file.json["id"], endpoint=CHAT).status == 200
        sock.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY) - 5000, BODY[5000:]))
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


@pytest.mark.rule("B2", "An upload over the storage quota of its organization is 413 in all of its projects.")
def test_the_projects_of_an_organization_share_its_quota(serve: Callable[..., Api]) -> None:
    api = serve(organization_storage_bytes=2 * len(BODY))
    sibling, other = api.new_account("sibling", organization="first"), api.new_account("other")
    first = api.upload(LINE * 100)
    assert api.upload(LINE * 100, account=sibling).status == 200
    for account in (api.account, sibling):
        refused = api.upload(LINE * 100, account=account)
        assert (refused.status, refused.error["code"]) == (413, "storage_quota_exceeded")
        assert "this organization" in refused.error["message"]
    assert api.upload(LINE * 100, account=other).status == 200
    assert api.call("DELETE", f"/v1/files/{first.json['id']}").status == 200
    assert api.upload(LINE * 100, account=sibling).status == 200
    sample = api.services.metrics.registry.get_sample_value
    assert sample("batchline_refusals_total", {"bound": "organization_storage"}) == 2


@pytest.mark.rule("B2", "The settings file gives single projects and organizations limits of their own.")
@pytest.mark.anyio
async def test_a_project_and_an_organization_can_have_limits_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "batchline.toml"
    file.write_text(
        "project_storage_bytes = 10\norganization_storage_bytes = 30\n"
        "[projects.AAAA-1]\nstorage_bytes = 20\n[organizations.bbbb-1]\nstorage_bytes = 15\n"
    )
    files = cast(Files, _FixedFiles())
    quota = StorageQuota(load_settings(config=str(file)).storage_limits, files=files)
    room = {}
    for project, organization in (("x", "y"), ("aaaa-1", "y"), ("aaaa-1", "bbbb-1")):
        owner = Owner(key_id="k", project_id=project, organization_id=organization)
        async with quota.reserve(owner, None) as reserved:
            with pytest.raises(StorageFull) as refused:
                await reserved.cover(reserved.bytes + 1)
            room[project, organization] = reserved.bytes, refused.value.bound
    assert room == {
        ("x", "y"): (10, "project_storage"),
        ("aaaa-1", "y"): (20, "project_storage"),
        ("aaaa-1", "bbbb-1"): (15, "organization_storage"),
    }
