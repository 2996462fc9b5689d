"""The HTTP client's streams: passed on as they arrive, with bounded memory, and ended when either side ends."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from batchline import __version__
from batchline.domain.errors import StreamBroken
from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.ports import SyncUpstream
from batchline.upstream.connection import UpstreamConnection
from batchline.upstream.http import HttpUpstream
from batchline.upstream.streaming import EventStream
from tests.support.raw_server import BODY, KEY, Behaviour, Peer, Run, answer, client, sends, serving

PATH = "/v1/chat/completions"
FINE = Answer(status=200, body=b"{}")
HELD_LIMIT = 64 * 1024
ONE_READ = 256 * 1024
END = b"0\r\n\r\n"


def head(*fields: str, status: str = "200 OK", kind: str = "text/event-stream") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", "X-Request-Id: req_1", *fields, "", ""]
    return "\r\n".join(lines).encode()


HEAD = head("Transfer-Encoding: chunked")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def answers(peer: Peer) -> None:
    while await peer.request():
        await peer.send(answer())


def streaming(answered: EventStream | Reply) -> EventStream:
    assert isinstance(answered, EventStream), answered
    return answered


async def whole(upstream: HttpUpstream) -> bytes:
    """Return everything that a stream yields, up to its end."""
    async with upstream.stream(PATH, BODY) as answered:
        return b"".join([piece async for piece in streaming(answered)])


async def broken(upstream: HttpUpstream) -> tuple[bytes, str]:
    """Return what a stream yielded before it broke, and the reason."""
    came = b""

    async def read(stream: EventStream) -> None:
        nonlocal came
        async for piece in stream:
            came += piece

    async with upstream.stream(PATH, BODY) as answered:
        with pytest.raises(StreamBroken) as why:
            await read(streaming(answered))
    assert KEY not in str(why.value)
    assert BODY.decode() not in str(why.value)
    return came, str(why.value)


def play(behave: Behaviour, scene: Callable[[HttpUpstream], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with serving(behave) as wire, client(wire.port, **options) as upstream:
            return await scene(upstream)

    return main()


async def reply(upstream: HttpUpstream) -> Reply:
    async with upstream.stream(PATH, BODY) as answered:
        assert isinstance(answered, Answer | Fault), answered
        return answered


def test_a_stream_accepts_events_and_a_get_accepts_json(run: Run) -> None:
    """E1: a stream is a post that accepts events; a GET accepts JSON and has no Content-Type."""
    seen: list[bytes] = []

    async def behave(peer: Peer) -> None:
        seen.append(await peer.request())
        await peer.send(HEAD + END)
        seen.append(await peer.reader.readuntil(b"\r\n\r\n"))
        await peer.send(answer())

    async def main() -> tuple[int, Reply]:
        async with serving(behave) as wire, client(wire.port) as upstream:
            live: SyncUpstream = upstream
            assert await whole(upstream) == b""
            return wire.port, await live.get("/v1/models")

    port, got = run(main())
    identity = f"Accept-Encoding: identity\r\nUser-Agent: batchline/{__version__}\r\nAuthorization: Bearer {KEY}\r\n"
    assert got == FINE
    assert seen == [
        f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\n{identity}Content-Length: {len(BODY)}\r\n\r\n".encode()
        + BODY,
        f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept: application/json\r\n{identity}\r\n".encode(),
    ]


def test_pieces_are_passed_on_as_they_arrive(run: Run) -> None:
    """E1: the beginning can be read before the end has arrived."""
    taken = asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(HEAD)
        for word in (b"one", b"two", b"three"):
            await peer.send(chunk(word))
            await taken.wait()
            taken.clear()
        await peer.send(END)

    async def scene(upstream: HttpUpstream) -> list[bytes]:
        pieces = []
        async with upstream.stream(PATH, BODY) as answered:
            assert streaming(answered).request_id == "req_1"
            async for piece in streaming(answered):
                pieces.append(piece)
                taken.set()
        return pieces

    assert run(play(behave, scene)) == [b"one", b"two", b"three"]


@pytest.mark.parametrize(
    "wire_bytes",
    [
        HEAD + chunk(b"da") + chunk(b"ta") + END,
        head("Content-Length: 4") + b"data",
        head("Connection: close") + b"data",
        b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + chunk(b"data") + END,
        head("Content-Length: 4", kind="Text/Event-Stream; charset=utf-8") + b"data",
        head("Content-Length: 4", status="201 Created") + b"data",
    ],
    ids=["chunked", "length", "until the end", "interim", "charset", "201"],
)
def test_a_stream_is_complete_when_http_says_so(run: Run, wire_bytes: bytes) -> None:
    """E1: for every way to give its length, and for every division by the network."""
    assert run(play(sends(wire_bytes), whole)) == b"data"
    assert run(play(sends(*(wire_bytes[n : n + 1] for n in range(len(wire_bytes)))), whole)) == b"data"


@pytest.mark.parametrize("frame", ["chunked", "length"])
def test_a_stream_may_be_of_any_size(run: Run, frame: str) -> None:
    """E1: the limit on answers only applies to those that are held as a whole."""
    data = b"x" * 10_000
    wire_bytes = HEAD + chunk(data) + END if frame == "chunked" else head("Content-Length: 10000") + data
    assert run(play(sends(wire_bytes), whole, max_answer_bytes=100)) == data


@pytest.mark.parametrize(
    ("wire_bytes", "expected"),
    [
        (answer(), FINE),
        (answer(b"{}", "Content-Type: application/json"), FINE),
        (answer(b"no", "Retry-After: 2", status="429 No"), Answer(status=429, body=b"no", retry_after=2)),
        (head("Content-Length: 2", status="500 No") + b"no", Answer(status=500, body=b"no", request_id="req_1")),
        (answer(b"x" * 101), Fault(kind=FaultKind.GARBLED, detail="answer over 100 bytes", answer_bytes=100)),
        (
            head("Content-Encoding: gzip", "Content-Length: 1") + b"x",
            Fault(kind=FaultKind.UNREADABLE, detail="the answer has the encoding 'gzip', and identity was asked for"),
        ),
        (b"", Fault(kind=FaultKind.BROKEN, detail="the connection ended before an answer came")),
        (HEAD[:30], Fault(kind=FaultKind.BROKEN, detail="the connection ended in the middle of the answer")),
    ],
    ids=["json", "named json", "429", "500 of events", "too large", "compressed", "nothing", "half a head"],
)
def test_anything_else_is_a_reply(run: Run, wire_bytes: bytes, expected: Reply) -> None:
    """E2: anything but a 2xx of events is read as a whole, within the limits of a post."""
    assert run(play(sends(wire_bytes), reply, max_answer_bytes=100)) == expected


def test_a_post_takes_events_as_a_whole(run: Run) -> None:
    async def scene(upstream: HttpUpstream) -> Reply:
        return await upstream.post(PATH, BODY)

    expected = Answer(status=200, body=b"data", request_id="req_1")
    assert run(play(sends(HEAD + chunk(b"data") + END), scene)) == expected


def test_a_port_without_a_server_is_refused(run: Run) -> None:
    async def main() -> Reply:
        async with serving(answers) as wire:
            port = wire.port
        async with client(port) as upstream:
            return await reply(upstream)

    refused = run(main())
    assert isinstance(refused, Fault)
    assert refused.kind is FaultKind.REFUSED


class Flood:
    """Sends a long stream as fast as it is read, and notes which side waits for the other."""

    def __init__(self) -> None:
        self.size = 64 * 1024 * 1024
        self.sent = 0
        self.over = asyncio.Event()
        self.reader_waits = asyncio.Event()
        self.sender_waits = asyncio.Event()

    async def behave(self, peer: Peer) -> None:
        await peer.request()
        try:
            await peer.send(HEAD)
            while self.sent < self.size:
                await self._send(peer, chunk(b"x" * HELD_LIMIT))
                self.sent += HELD_LIMIT
            await peer.send(END)
        finally:
            for event in (self.over, self.reader_waits, self.sender_waits):
                event.set()

    async def _send(self, peer: Peer, data: bytes) -> None:
        transport = peer.writer.transport
        transport.set_write_buffer_limits(high=0)
        peer.writer.write(data)
        if transport.get_write_buffer_size():
            self.sender_waits.set()
            await peer.writer.drain()
            self.sender_waits.clear()

    async def stands_still(self) -> None:
        """Wait until the client has paused and the server can send no more, or the server has sent everything."""
        await self.reader_waits.wait()
        await self.sender_waits.wait()


@pytest.fixture
def flood(monkeypatch: pytest.MonkeyPatch) -> Flood:
    flood = Flood()
    pause, resume = UpstreamConnection.pause_reading, UpstreamConnection.resume_reading

    def pause_reading(connection: UpstreamConnection) -> None:
        pause(connection)
        flood.reader_waits.set()

    def resume_reading(connection: UpstreamConnection) -> None:
        resume(connection)
        flood.reader_waits.clear()

    monkeypatch.setattr(UpstreamConnection, "pause_reading", pause_reading)
    monkeypatch.setattr(UpstreamConnection, "resume_reading", resume_reading)
    return flood


@pytest.mark.rule("E1", "A slow reader slows the upstream down.")
def test_who_reads_slowly_slows_the_upstream_down(run: Run, flood: Flood) -> None:
    """E1: memory does not grow with the stream: at most 64 KiB and one read are held, then the server must wait."""

    async def scene(upstream: HttpUpstream) -> int:
        async with upstream.stream(PATH, BODY) as answered:
            stream = streaming(answered)
            await flood.stands_still()
            assert flood.sent < flood.size / 2
            assert len(stream._held) <= HELD_LIMIT + ONE_READ
            taken = len(await anext(stream))
            await flood.stands_still()
            assert flood.sent < flood.size / 2
            return taken + sum([len(piece) async for piece in stream])

    assert run(play(flood.behave, scene)) == flood.size


def test_leaving_an_unread_stream_frees_the_upstream(run: Run, flood: Flood) -> None:
    """E2: also if the server is blocked while it sends."""

    async def scene(upstream: HttpUpstream) -> None:
        async with upstream.stream(PATH, BODY):
            await flood.stands_still()
        await flood.over.wait()
        assert flood.sent < flood.size / 2

    run(play(flood.behave, scene))


async def leave_after_a_piece(upstream: HttpUpstream) -> None:
    async with upstream.stream(PATH, BODY) as answered:
        async for _ in streaming(answered):
            break


async def leave_at_once(upstream: HttpUpstream) -> None:
    async with upstream.stream(PATH, BODY) as answered:
        streaming(answered)


async def leave_by_an_error(upstream: HttpUpstream) -> None:
    with pytest.raises(ZeroDivisionError):
        async with upstream.stream(PATH, BODY):
            raise ZeroDivisionError


async def leave_by_cancelling(upstream: HttpUpstream) -> None:
    reading = asyncio.Event()

    async def read() -> None:
        async with upstream.stream(PATH, BODY) as answered:
            async for _ in streaming(answered):
                reading.set()

    async with asyncio.TaskGroup() as group:
        reader = group.create_task(read())
        await reading.wait()
        reader.cancel()


@pytest.mark.rule("E2", "Completer a stream closes its connection.")
@pytest.mark.parametrize("leave", [leave_after_a_piece, leave_at_once, leave_by_an_error, leave_by_cancelling])
def test_leaving_early_ends_the_upstreams_request(
    run: Run, leave: Callable[[HttpUpstream], Coroutine[Any, Any, None]]
) -> None:
    """E2: the upstream sees the closed connection, and what it still sends reaches no other request."""
    left = asyncio.Event()

    async def behave(peer: Peer) -> None:
        if peer.number == 1:
            await peer.request()
            await peer.send(HEAD + chunk(b"data"))
            await peer.left()
            left.set()
        else:
            await answers(peer)

    async def main() -> tuple[Reply, int]:
        async with serving(behave) as wire, client(wire.port) as upstream:
            await leave(upstream)
            await left.wait()
            return await upstream.post(PATH, BODY), wire.accepted

    assert run(main()) == (FINE, 2)


def test_cancelling_before_the_head_closes_the_connection(run: Run) -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        asked.set()
        await peer.left()
        left.set()

    async def scene(upstream: HttpUpstream) -> None:
        async with asyncio.TaskGroup() as group:
            doomed = group.create_task(whole(upstream))
            await asked.wait()
            doomed.cancel()
        await left.wait()

    run(play(behave, scene))


@pytest.mark.parametrize(
    ("wire_bytes", "why"),
    [
        (HEAD + chunk(b"data"), "the connection ended in the middle"),
        (HEAD + chunk(b"data") + b"0\r\n", "the connection ended in the middle"),
        (head("Content-Length: 5") + b"data", "the connection ended in the middle"),
        (HEAD + chunk(b"data") + b"zz\r\n", "not an HTTP answer"),
        (HEAD + b"4\r\ndata5\r\n", "not an HTTP answer"),
        (HEAD + chunk(b"data") + b"5;" + b"a" * 2_000_000, "headers over 65536 bytes"),
    ],
    ids=["between chunks", "before the end", "short", "no chunk", "no line end", "endless extension"],
)
def test_a_stream_that_breaks_off_says_so(run: Run, wire_bytes: bytes, why: str) -> None:
    """E2: half a stream is never taken for a whole one; the bytes before the break are still passed on."""
    came, told = run(play(sends(wire_bytes), broken))
    assert came == b"data"
    assert told.startswith(why)


@pytest.mark.parametrize("start", [HEAD + chunk(b"data"), head("Connection: close") + b"data"], ids=["chunked", "eof"])
def test_a_reset_breaks_a_stream(run: Run, start: bytes) -> None:
    """E2: also a stream that is allowed to end with its connection."""
    taken = asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(start)
        await taken.wait()
        peer.reset()

    async def scene(upstream: HttpUpstream) -> None:
        async with upstream.stream(PATH, BODY) as answered:
            assert await anext(streaming(answered)) == b"data"
            taken.set()
            with pytest.raises(StreamBroken):
                await anext(streaming(answered))

    run(play(behave, scene))


@pytest.mark.parametrize("start", [b"", HEAD[:30]], ids=["silent", "half a head"])
def test_a_head_that_does_not_come_is_a_timeout(run: Run, start: bytes) -> None:
    """E2: an upstream must begin its answer within the request timeout."""

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(start)
        await peer.left()

    late = run(play(behave, reply, request_timeout=0.05))
    assert isinstance(late, Fault)
    assert late.kind is FaultKind.TIMEOUT


class Timers:
    """Records every timer that is started with ``call_later``; a test can fire them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: asyncio.Queue[tuple[float, asyncio.TimerHandle]] = asyncio.Queue()
        self._call_later = loop.call_later
        monkeypatch.setattr(loop, "call_later", self._start)

    def _start(self, delay: float, callback: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        timer = self._call_later(delay, callback, *arguments)
        self.started.put_nowait((delay, timer))
        return timer


def sends_on_demand(go_on: asyncio.Event, left: asyncio.Event) -> Behaviour:
    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(HEAD)
        await go_on.wait()
        await peer.send(chunk(b"data"))
        await peer.left()
        left.set()

    return behave


async def broken_piece(stream: EventStream) -> str:
    with pytest.raises(StreamBroken) as why:
        await anext(stream)
    return str(why.value)


def test_a_stall_breaks_a_stream_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """E2: an upstream that sends nothing is abandoned after the request timeout.

    The time counts only while the reader waits, and starts again with each piece: a stream may last much longer.
    """
    go_on, left = asyncio.Event(), asyncio.Event()

    async def scene(upstream: HttpUpstream) -> None:
        async with upstream.stream(PATH, BODY) as answered, asyncio.TaskGroup() as group:
            timers = Timers(asyncio.get_running_loop(), monkeypatch)
            stream = streaming(answered)
            stream.connection._check_deadline()
            first = group.create_task(stream.__anext__())
            seconds, waiting = await timers.started.get()
            assert (seconds, waiting.cancelled()) == (60, False)
            go_on.set()
            assert await first == b"data"
            assert waiting.cancelled()
            assert timers.started.empty()
            second = group.create_task(broken_piece(stream))
            _, waiting = await timers.started.get()
            waiting._run()
            assert await second == "no data received for 60 s"
            await left.wait()

    asyncio.run(play(sends_on_demand(go_on, left), scene, request_timeout=60))


def test_closing_the_client_breaks_its_streams(run: Run) -> None:
    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(HEAD)
        await peer.left()

    async def scene(upstream: HttpUpstream) -> None:
        async with upstream.stream(PATH, BODY) as answered:
            await upstream.close()
            with pytest.raises(StreamBroken, match="closed on this side"):
                await anext(streaming(answered))

    run(play(behave, scene))


@pytest.mark.parametrize("size", [4, HELD_LIMIT * 3], ids=["small", "over what is held"])
def test_a_connection_is_used_again_after_a_whole_stream(run: Run, size: int) -> None:
    """E1: streams and posts share connections, also after a stream that was paused for its reader."""

    async def behave(peer: Peer) -> None:
        while await peer.request():
            await peer.send(HEAD + chunk(b"x" * size) + END)
            await peer.request()
            await peer.send(answer())

    async def main() -> int:
        async with serving(behave) as wire, client(wire.port, request_timeout=60) as upstream:
            for _ in range(3):
                assert len(await whole(upstream)) == size
                assert await upstream.post(PATH, BODY) == FINE
            return wire.accepted

    assert run(main()) == 1


def test_a_connection_is_used_again_after_a_reply(run: Run) -> None:
    """E2: an error in place of a stream does not cost the connection."""

    async def main() -> int:
        async with serving(answers) as wire, client(wire.port) as upstream:
            assert [await reply(upstream) for _ in range(3)] == [FINE] * 3
            return wire.accepted

    assert run(main()) == 1


def test_leaving_a_whole_stream_leaves_its_connection_alone(run: Run) -> None:
    """C12: after its end, the connection may already serve another request."""
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(HEAD + chunk(b"data") + END)
        await peer.request()
        asked.set()
        await go_on.wait()
        await peer.send(answer())

    async def main() -> tuple[Reply, int]:
        async with serving(behave) as wire, client(wire.port) as upstream:
            async with upstream.stream(PATH, BODY) as answered:
                assert b"".join([piece async for piece in streaming(answered)]) == b"data"
                following = upstream.post(PATH, BODY)
                await asked.wait()
                streaming(answered)._fail_stalled()
            go_on.set()
            return await following, wire.accepted

    assert run(main()) == (FINE, 1)


def test_a_whole_stream_left_unread_leaves_a_connection_that_reads(run: Run) -> None:
    """E1: a connection that was paused by a stream in one read must not be returned to the idle ones paused."""

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(HEAD)
        await answers(peer)

    async def main() -> tuple[Reply, int]:
        async with serving(behave) as wire, client(wire.port, request_timeout=60) as upstream:
            async with upstream.stream(PATH, BODY) as answered:
                # Handed in here because no network promises a single read.
                streaming(answered).connection.data_received(chunk(b"x" * (HELD_LIMIT + 1)) + END)
            return await upstream.post(PATH, BODY), wire.accepted

    assert run(main()) == (FINE, 1)


def test_a_connection_with_a_stream_serves_no_other_request(run: Run) -> None:
    """C12: during a stream, a post uses another connection."""

    async def behave(peer: Peer) -> None:
        if peer.number == 1:
            await peer.request()
            await peer.send(HEAD + chunk(b"data"))
            await peer.left()
        else:
            await answers(peer)

    async def main() -> tuple[Reply, int]:
        async with serving(behave) as wire, client(wire.port) as upstream, upstream.stream(PATH, BODY):
            return await upstream.post(PATH, BODY), wire.accepted

    assert run(main()) == (FINE, 2)


def test_a_server_that_will_close_is_not_used_again(run: Run) -> None:
    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(head("Connection: close", "Content-Length: 4") + b"data")
        await peer.left()

    async def main() -> int:
        async with serving(behave) as wire, client(wire.port) as upstream:
            assert [await whole(upstream) for _ in range(2)] == [b"data"] * 2
            return wire.accepted

    assert run(main()) == 2


def test_bytes_past_the_end_are_discarded(run: Run) -> None:
    """C12: the surplus of a stream is not read as the next answer."""

    async def behave(peer: Peer) -> None:
        await peer.request()
        if peer.number == 1:
            await peer.send(HEAD + chunk(b"data") + END + answer(b'"surplus"'))
            await peer.left()
        else:
            await peer.send(answer())

    async def main() -> tuple[bytes, Reply]:
        async with serving(behave) as wire, client(wire.port) as upstream:
            return await whole(upstream), await upstream.post(PATH, BODY)

    assert run(main()) == (b"data", FINE)


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_request_is_written_once(run: Run, how: str) -> None:
    """D10: also if it was written to a kept-alive connection that ends without a byte."""

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer())
        await peer.request()
        if how == "reset":
            peer.reset()

    async def main() -> tuple[Reply, int]:
        async with serving(behave) as wire, client(wire.port) as upstream:
            assert await upstream.post(PATH, BODY) == FINE
            return await reply(upstream), wire.accepted

    assert run(main()) == (Fault(kind=FaultKind.BROKEN, detail="the connection ended before an answer came"), 1)


def test_streams_at_once_get_their_own_events(run: Run) -> None:
    """C12: as with posts, no reader gets another's events."""

    async def behave(peer: Peer) -> None:
        word = b"%d " % peer.number
        await peer.request()
        await peer.send(HEAD)
        for _ in range(50):
            await peer.send(chunk(word))
        await peer.send(END)

    async def scene(upstream: HttpUpstream) -> list[bytes]:
        return await asyncio.gather(*(whole(upstream) for _ in range(20)))

    texts = run(play(behave, scene))
    assert sorted(texts) == sorted(b"%d " % number * 50 for number in range(1, 21))
