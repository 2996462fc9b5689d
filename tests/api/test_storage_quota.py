"""A project and an organization store no more than their quotas: B2."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

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


class _SlowSums:
    """Wraps a store. A read of a stored sum yields to the loop before and after, so that uploads end meanwhile."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.before = self.after = _give_way

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def stored_bytes(self, project_id: str) -> int:
        return await self._read(self._store.stored_bytes(project_id))

    async def stored_bytes_of_organization(self, organization_id: str) -> int:
        return await self._read(self._store.stored_bytes_of_organization(organization_id))

    async def _read(self, read: Awaitable[int]) -> int:
        await self.before()
        used = await read
        await self.after()
        return used


async def _give_way() -> None:
    """Let all other tasks of the loop run for a few turns."""
    for _ in range(20):
        await asyncio.sleep(0)


async def _store(api: Api, size: int, *, on_reserved: Callable[[], Awaitable[Any]] = _give_way) -> bool:
    """Upload a file of so many bytes, and return whether there was room for it."""
    owner = Owner(key_id="k", project_id=api.account.project_id, organization_id=api.account.organization_id)
    try:
        async with (
            api.services.storage_quota.reserve(owner, size),
            api.services.upload.begin(owner.project_id) as incoming,
        ):
            await on_reserved()
            await incoming.write(b"x" * size)
            await incoming.finish(filename="in.jsonl", expires_after=None)
    except StorageFull:
        return False
    return True


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


@pytest.mark.rule("B2", "Uploads that end while others begin never exceed a storage quota together.")
@pytest.mark.parametrize("scope", ["project", "organization"])
def test_uploads_in_parallel_stay_within_the_quota(serve: Callable[..., Api], scope: str) -> None:
    api = serve(wrap_store=_SlowSums, **{f"{scope}_storage_bytes": 1000})

    async def upload_all() -> list[bool]:
        slots = asyncio.Semaphore(10)

        async def upload() -> bool:
            async with slots:
                return await _store(api, 90)

        return await asyncio.gather(*(upload() for _ in range(60)))

    stored = api.await_(upload_all())
    assert api.ask("SELECT sum(bytes) FROM files WHERE state = 'stored'") == 90 * sum(stored)
    assert 0 < 90 * sum(stored) <= 1000


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(("limit", "fits"), [(199, False), (200, True)])
@pytest.mark.parametrize("limits", [("project",), ("organization",), ("project", "organization")])
def test_an_upload_that_ends_while_the_sum_is_read_counts_once(
    serve: Callable[..., Api], limits: tuple[str, ...], limit: int, fits: bool, moment: str
) -> None:
    """B2: whether or not the sum that is read includes the upload."""
    api = serve(wrap_store=_SlowSums, **{f"{scope}_storage_bytes": limit for scope in limits})
    store = cast(_SlowSums, api.store)

    async def upload_two() -> list[bool]:
        reserved, reading = asyncio.Event(), asyncio.Event()

        async def wait_for_read() -> None:
            reserved.set()
            await reading.wait()

        async def end_first() -> None:
            setattr(store, moment, _give_way)
            reading.set()
            assert await first

        first = asyncio.create_task(_store(api, 100, on_reserved=wait_for_read))
        await reserved.wait()
        setattr(store, moment, end_first)
        return [await _store(api, 100), await first]

    assert api.await_(upload_two()) == [fits, True]


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
