"""Lists of files: B5."""

from urllib.parse import quote
from uuid import uuid4

import pytest

from tests.support.api_server import Api


def test_an_empty_list(api: Api) -> None:
    """B5"""
    account = api.new_account(f"empty-{uuid4()}")
    reply = api.call("GET", "/v1/files", account=account)
    assert reply.json == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


@pytest.mark.rule("B5", "Pages hold every file once, in order.")
@pytest.mark.parametrize("order", ["asc", "desc", None])
@pytest.mark.parametrize("limit", [1, 2, 5, 7])
def test_pages_hold_every_file_once_and_in_order(api: Api, order: str | None, limit: int) -> None:
    """B5: most of these are of the same second."""
    account = api.new_account(f"pages-{uuid4()}")
    made = [api.upload(account=account).json for _ in range(5)]
    expected = made if order == "asc" else made[::-1]
    seen: list[object] = []
    query = f"limit={limit}" + (f"&order={order}" if order else "")
    after = ""
    while True:
        page = api.call("GET", f"/v1/files?{query}{after}", account=account).json
        seen += page["data"]
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        assert page["has_more"] == (len(seen) < 5)
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert seen == expected


def test_a_page_is_not_moved_by_files_that_come_later(api: Api) -> None:
    """B5"""
    account = api.new_account(f"moving-{uuid4()}")
    old = [api.upload(account=account).json["id"] for _ in range(3)]
    first = api.call("GET", "/v1/files?limit=1", account=account).json["last_id"]
    api.upload(account=account)
    rest = api.call("GET", f"/v1/files?after={first}", account=account).json
    assert [file["id"] for file in rest["data"]] == [old[1], old[0]]


@pytest.mark.rule("B5", "A deleted file still is a cursor, an unknown one is 400.")
def test_a_deleted_file_is_still_a_cursor_and_an_unknown_one_is_not(api: Api) -> None:
    """B5"""
    account = api.new_account(f"cursor-{uuid4()}")
    old = [api.upload(account=account).json["id"] for _ in range(3)]
    api.call("DELETE", f"/v1/files/{old[1]}", account=account)
    page = api.call("GET", f"/v1/files?after={old[1]}", account=account).json
    assert [file["id"] for file in page["data"]] == [old[0]]
    for unknown in ("file-nothing", ""):
        reply = api.call("GET", f"/v1/files?after={unknown}", account=account)
        assert reply.status == 400
        assert reply.error["param"] == "after"


@pytest.mark.rule("B5", "A limit that is no positive integer is 400.")
@pytest.mark.parametrize("limit", ["0", "-1", "ten", "1.0", "", "1_0", "%2B5", "٣", "0x10"])
def test_a_limit_that_is_no_positive_integer_is_400(api: Api, limit: str) -> None:
    """B5"""
    reply = api.call("GET", f"/v1/files?limit={quote(limit, safe='%')}")
    assert reply.status == 400
    assert (reply.error["code"], reply.error["param"]) == ("invalid_limit", "limit")


@pytest.mark.parametrize("limit", ["10000", "10001", "9" * 5000])
def test_a_limit_over_the_largest_is_the_largest(api: Api, limit: str) -> None:
    """B5"""
    assert api.call("GET", f"/v1/files?limit={limit}").status == 200


def test_lists_can_be_of_one_purpose(api: Api) -> None:
    """B5"""
    account = api.new_account(f"purpose-{uuid4()}")
    file_id = api.upload(account=account).json["id"]
    data = {
        purpose: api.call("GET", f"/v1/files?purpose={purpose}", account=account).json["data"]
        for purpose in ("batch", "batch_output", "fine-tune", "user_data")
    }
    assert [file["id"] for file in data.pop("batch")] == [file_id]
    assert data == {"batch_output": [], "fine-tune": [], "user_data": []}


@pytest.mark.parametrize(("name", "value"), [("purpose", "tuning"), ("purpose", ""), ("order", "up"), ("order", "")])
def test_unknown_words_in_a_query_are_400(api: Api, name: str, value: str) -> None:
    """B5"""
    reply = api.call("GET", f"/v1/files?{name}={value}")
    assert reply.status == 400
    assert reply.error["param"] == name
