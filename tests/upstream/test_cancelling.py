"""Cancelled posts: all work for them stops, and their answers reach no other post."""

import asyncio
from functools import partial

import pytest

from batchline.domain.replies import Answer, Reply
from batchline.upstream.connection import CLOSED
from tests.support.raw_server import BODY, Peer, Run, answer, client, serving

PATH = "/v1/chat/completions"
FINE = Answer(status=200, body=b"{}")


@pytest.mark.parametrize("start", [b"", answer()[:30], answer()[:-1]], ids=["silent", "half a head", "half a body"])
def test_the_answer_to_a_cancelled_post_reaches_no_other(run: Run, start: bytes) -> None:
    """C12: its rest arrives while the next post is in flight, which gets its own answer."""
    asked, cancelled = asyncio.Event(), asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        if peer.number == 1:
            await peer.send(start)
            asked.set()
            await cancelled.wait()
            await peer.send(answer(b'"late"')[len(start) :])
            await peer.left()
        else:
            await peer.send(answer())

    async def main() -> tuple[Reply, int]:
        async with serving(behave) as wire, client(wire.port) as upstream:
            cancelled_post = upstream.post(PATH, BODY)
            await asked.wait()
            assert cancelled_post.cancel()
            following = upstream.post(PATH, BODY)
            cancelled.set()
            assert cancelled_post.cancelled()
            return await following, wire.accepted

    assert run(main()) == (FINE, 2)


@pytest.mark.rule("C12", "To cancel what is over ends nothing: its connection serves another by then.")
def test_cancelling_what_is_done_touches_nobody_else(run: Run) -> None:
    """C12: its connection may already serve another post."""
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer())
        await peer.request()
        asked.set()
        await go_on.wait()
        await peer.send(answer())

    async def main() -> tuple[Reply, int]:
        async with serving(behave) as wire, client(wire.port) as upstream:
            done = upstream.post(PATH, BODY)
            await done
            following = upstream.post(PATH, BODY)
            await asked.wait()
            assert not done.cancel()
            go_on.set()
            return await following, wire.accepted

    assert run(main()) == (FINE, 1)


async def never_handshakes(peer: Peer, met: asyncio.Event, left: asyncio.Event) -> None:
    met.set()
    await peer.left()
    left.set()


@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_connecting_ends_with_its_post(run: Run, how: str) -> None:
    """C11: connecting stops for a line that was cancelled, or for a client that is closed."""
    met, left = asyncio.Event(), asyncio.Event()

    async def main() -> Reply | None:
        behave = partial(never_handshakes, met=met, left=left)
        async with serving(behave) as wire, client(wire.port, url="https://127.0.0.1:{port}/v1") as upstream:
            cancelled_post = upstream.post(PATH, BODY)
            await met.wait()
            (connecting,) = upstream._connecting
            if how == "closed":
                await upstream.close()
            else:
                cancelled_post.cancel()
            await left.wait()
            assert connecting.cancelled()
            assert not upstream._connecting
            return None if cancelled_post.cancelled() else cancelled_post.result()

    assert run(main()) == {"cancelled": None, "closed": CLOSED}[how]


def test_closing_ends_a_post_that_has_just_begun(run: Run) -> None:
    async def main() -> tuple[Reply, int]:
        async with serving(Peer.left) as wire, client(wire.port) as upstream:
            cancelled_post = upstream.post(PATH, BODY)
            await upstream.close()
            return await cancelled_post, wire.accepted

    assert run(main()) == (CLOSED, 0)
