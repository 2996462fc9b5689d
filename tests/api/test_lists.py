"""Lists are bounded in size and number, because they are held in memory until their clients have read them (A4)."""

import asyncio
from uuid import uuid4

import pytest
from starlette.types import Message

from batchline.api import files
from batchline.api.lists import Lists
from batchline.domain.errors import RateLimited
from batchline.domain.records import Owner
from tests.support.api_server import Api, field, file_part


class _Client:
    """A client that reads the end of its answer when it is told to."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.has_body, self.reads = asyncio.Event(), asyncio.Event()

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.has_body.set()
        elif message["type"] == "http.response.body":
            await self.reads.wait()

    async def receive(self) -> Message:
        return {"type": "http.disconnect"}


async def _read() -> object:
    return {"object": "list", "data": []}


@pytest.mark.anyio
@pytest.mark.rule("A4", "A list that its client has not read yet takes one of the lists of its project.")
async def test_a_list_that_is_not_read_takes_a_place_of_its_project() -> None:
    lists = Lists(limit=1)
    owner, other = (Owner(key_id="k", project_id=name, organization_id="o") for name in ("p", "q"))
    slow, quick = _Client(), _Client()
    quick.reads.set()
    sending = asyncio.ensure_future(lists.answer(owner, _read)({"state": {}}, slow.receive, slow.send))
    await slow.has_body.wait()
    with pytest.raises(RateLimited):
        await lists.answer(owner, _read)({"state": {}}, quick.receive, quick.send)
    await lists.answer(other, _read)({"state": {}}, quick.receive, quick.send)
    assert b"".join(message.get("body", b"") for message in quick.sent) == b'{"object":"list","data":[]}'
    slow.reads.set()
    await sending
    await lists.answer(owner, _read)({"state": {}}, quick.receive, quick.send)


@pytest.mark.rule("B5", "A page with long names has fewer files, and the next one goes on.")
@pytest.mark.parametrize("order", ["asc", "desc"])
def test_a_page_with_long_names_is_short_and_the_next_one_goes_on(
    api: Api, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_STEP_ROWS", 2)
    monkeypatch.setattr(files, "_MAX_PAGE_CHARACTERS", 3000)
    account = api.new_account(f"long-{uuid4()}")
    part = file_part(b"{}", disposition=f'form-data; name="file"; filename="{"n" * 1000}"')
    made = [api.send_form(field("purpose", "batch"), part, account=account).json["id"] for _ in range(7)]
    first = api.call("GET", f"/v1/files?limit=6&order={order}", account=account).json
    rest = api.call("GET", f"/v1/files?limit=6&order={order}&after={first['last_id']}", account=account).json
    assert (len(first["data"]), first["has_more"], rest["has_more"]) == (4, True, False)
    listed = [file["id"] for file in (*first["data"], *rest["data"])]
    assert listed == (made if order == "asc" else made[::-1])
