"""Uploads when storage fails, and their lease: B2, and every object has a row first."""

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from batchline.domain.errors import LeaseLost, ObjectsDown, StoreDown
from tests.support.api_server import FORM, Api, Counting, Faulty, Wrap, field, file_part, form, read_reply, wait_until

BODY = form(field("purpose", "batch"), file_part(b"x" * 100_000))


def half_an_upload(api: Api) -> AbstractContextManager[socket.socket]:
    @contextmanager
    def begun() -> Any:
        head = api.head("POST /v1/files", f"content-type: {FORM['content-type']}", f"content-length: {len(BODY)}")
        with api.connect() as sock:
            sock.sendall(head + BODY[:50_000])
            yield sock

    return begun()


def failing(**faults: Exception) -> Wrap:
    return lambda part: Faulty(part, **faults)


@pytest.mark.rule("B2", "A store that fails is 500 storage_error.")
@pytest.mark.parametrize(
    "broken",
    [
        {"wrap_store": failing(begin_upload=StoreDown("gone"))},
        {"wrap_store": failing(finish_upload=StoreDown("gone"))},
        {"wrap_store": failing(finish_upload=LeaseLost("given up"))},
        {"wrap_objects": failing(create=ObjectsDown("gone"))},
    ],
    ids=["begin", "finish", "lease", "create"],
)
def test_storage_that_fails_is_500_storage_error_and_nothing_stays(
    serve: Callable[..., Api], broken: dict[str, Wrap]
) -> None:
    """B2"""
    api = serve(**broken)
    reply = api.upload()
    assert reply.status == 500
    assert (reply.error["type"], reply.error["code"]) == ("internal_error", "storage_error")
    assert "gone" not in reply.error["message"]
    assert api.stored() == []
    assert api.uploading() == 0
    assert api.call("GET", "/v1/files").json["data"] == []


def test_a_disk_that_refuses_is_500_storage_error_until_it_is_mended(serve: Callable[..., Api]) -> None:
    """B2: the folder for half-written files is no folder."""
    api = serve()
    blocked = api.folder / "objects" / "tmp"
    blocked.parent.mkdir()
    blocked.write_bytes(b"")
    assert api.upload().error["code"] == "storage_error"
    assert api.uploading() == 0
    blocked.unlink()
    assert api.upload().status == 200


def test_a_file_that_became_visible_after_all_keeps_its_bytes(serve: Callable[..., Api]) -> None:
    """B2: when the answer to the last step is lost, the object must not be taken from under the file."""

    class Unheard(Faulty):
        async def finish_upload(self, *given: Any, **named: Any) -> None:
            await self._part.finish_upload(*given, **named)
            raise StoreDown("the answer was lost")

    api = serve(wrap_store=Unheard)
    assert api.upload(b"kept").status == 500
    (file,) = api.call("GET", "/v1/files").json["data"]
    assert api.call("GET", f"/v1/files/{file['id']}/content").body == b"kept"


def test_what_cannot_be_taken_back_is_left_to_the_sweep(serve: Callable[..., Api]) -> None:
    """B2: the row still stands for it, so it will be found."""
    api = serve(wrap_store=failing(finish_upload=StoreDown("gone"), abandon_upload=StoreDown("gone")))
    assert api.upload().error["code"] == "storage_error"
    assert api.uploading() == 1


def test_the_row_comes_before_the_bytes(serve: Callable[..., Api]) -> None:
    """B2: every object on the disk has a row, so that a crash leaves nothing unknown."""
    order: list[str] = []

    class Watched(Counting):
        def __getattr__(self, name: str) -> Any:
            if name in {"begin_upload", "create", "finish_upload"}:
                order.append(name)
            return getattr(self._part, name)

    api = serve(wrap_store=Watched, wrap_objects=Watched)
    assert api.upload().status == 200
    assert order == ["begin_upload", "create", "finish_upload"]


def test_the_lease_of_a_slow_upload_is_renewed(serve: Callable[..., Api]) -> None:
    """B2: also while its client is silent."""
    counting: list[Counting] = []

    def count(store: object) -> Counting:
        counting.append(Counting(store))
        return counting[0]

    api = serve(lease_seconds=0.1, wrap_store=count)
    with half_an_upload(api) as sock:
        wait_until(lambda: counting[0].calls.count("renew_upload") > 3)
        sock.sendall(BODY[50_000:])
        assert read_reply(sock).json["bytes"] == 100_000


def test_an_upload_whose_lease_is_lost_ends_at_once(serve: Callable[..., Api]) -> None:
    """B2: its row may stand for nothing any more, so its bytes must go."""
    api = serve(lease_seconds=0.1, wrap_store=failing(renew_upload=LeaseLost("taken for dead")))
    with half_an_upload(api) as sock:
        assert read_reply(sock).error["code"] == "storage_error"
    wait_until(lambda: api.stored() == [])


def test_a_store_that_is_away_for_a_moment_costs_no_upload(serve: Callable[..., Api]) -> None:
    """B2"""
    faulty: list[Faulty] = []

    def break_it(store: object) -> Faulty:
        faulty.append(Faulty(Counting(store), renew_upload=StoreDown("restarting")))
        return faulty[0]

    api = serve(lease_seconds=0.1, wrap_store=break_it)
    with half_an_upload(api) as sock:
        wait_until(lambda: api.uploading() == 1)
        faulty[0].faults.clear()
        wait_until(lambda: "renew_upload" in faulty[0]._part.calls)
        sock.sendall(BODY[50_000:])
        assert read_reply(sock).status == 200


def test_a_delete_holds_although_its_object_cannot_be_removed_now(serve: Callable[..., Api]) -> None:
    """B8"""
    api = serve(wrap_objects=failing(delete=ObjectsDown("gone")))
    file_id = api.upload().json["id"]
    assert api.call("DELETE", f"/v1/files/{file_id}").json["deleted"] is True
    assert api.call("GET", f"/v1/files/{file_id}").status == 404


def test_a_file_whose_object_is_missing_is_404_on_download(serve: Callable[..., Api]) -> None:
    """B6, B7"""
    api = serve()
    file_id = api.upload().json["id"]
    (api.folder / "objects" / "uploads" / file_id).unlink()
    reply = api.call("GET", f"/v1/files/{file_id}/content")
    assert (reply.status, reply.error["code"]) == (404, "file_not_found")


def test_a_download_that_breaks_in_the_middle_is_cut_off_not_completed(serve: Callable[..., Api]) -> None:
    """B7: a client can see that bytes are missing."""
    api = serve()
    file_id = api.upload(b"x" * 3_000_000).json["id"]
    path = api.folder / "objects" / "uploads" / file_id
    path.write_bytes(b"x" * 1_000_000)
    with api.connect() as sock:
        sock.sendall(api.head(f"GET /v1/files/{file_id}/content"))
        received = b""
        while chunk := sock.recv(65536):
            received += chunk
        head, _, body = received.partition(b"\r\n\r\n")
        assert b"content-length: 3000000" in head
        assert len(body) <= 1_000_000
