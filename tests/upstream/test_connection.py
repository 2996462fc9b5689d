"""The HTTP client's connections: how they are opened, reused and closed, and that answers are never mixed up."""

import asyncio
import socket
from contextlib import AsyncExitStack, suppress
from threading import Thread
from typing import Any

import pytest

from batchline.domain.held_bytes import HeldBytes, Reservation
from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.upstream.connection import UpstreamConnection
from batchline.upstream.http import HttpUpstream
from tests.support.raw_server import BODY, KEY, Behaviour, ManualClock, Peer, Run, answer, client, serving

PATH = "/v1/chat/completions"
FINE = Answer(status=200, body=b"{}")
MiB = 1024 * 1024


def kind_of(reply: Reply) -> FaultKind | None:
    return reply.kind if isinstance(reply, Fault) else None


async def post(upstream: HttpUpstream) -> Reply:
    """Post, and check that a fault contains neither the key nor the body."""
    reply = await upstream.post(PATH, BODY)
    if isinstance(reply, Fault):
        assert KEY not in reply.detail
        assert BODY.decode() not in reply.detail
    return reply


async def answers_for_ever(peer: Peer) -> None:
    while await peer.request():
        await peer.send(answer())


async def answers_once(peer: Peer) -> None:
    await peer.request()
    await peer.send(answer())


def answers_then(behave: Behaviour) -> Behaviour:
    """Answer once on the first connection, then do something else; later connections work."""

    async def behave_by_number(peer: Peer) -> None:
        await answers_once(peer)
        await (behave(peer) if peer.number == 1 else answers_for_ever(peer))

    return behave_by_number


async def post_twice(behave: Behaviour, **options: Any) -> tuple[Reply, int]:
    """Post twice; return the second reply and the number of connections."""
    async with serving(behave) as wire, client(wire.port, **options) as upstream:
        assert await post(upstream) == FINE
        return await post(upstream), wire.accepted


def test_a_connection_is_used_again(run: Run) -> None:
    """A hundred posts one after the other need one connection."""

    async def main() -> int:
        async with serving(answers_for_ever) as wire, client(wire.port) as upstream:
            assert [await post(upstream) for _ in range(100)] == [FINE] * 100
            return wire.accepted

    assert run(main()) == 1


@pytest.mark.parametrize(
    "wire_bytes", [answer(b"{}", "Connection: close"), answer().replace(b"1.1", b"1.0")], ids=["close", "1.0"]
)
def test_a_connection_the_server_will_close_is_not_used_again(run: Run, wire_bytes: bytes) -> None:
    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(wire_bytes)
        await peer.left()

    assert run(post_twice(behave)) == (FINE, 2)


def test_the_connection_used_last_is_taken_first(run: Run) -> None:
    """Connections that a smaller load does not need are closed after 4 s idle; the busy one is not."""
    clock = ManualClock()
    served: list[int] = []
    both = asyncio.Barrier(2)
    first_left = asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        await both.wait()
        await peer.send(answer())
        try:
            while await peer.request():
                served.append(peer.number)
                await peer.send(answer())
        finally:
            first_left.set()

    async def main() -> None:
        async with serving(behave) as wire, client(wire.port, clock=clock) as upstream:
            await asyncio.gather(post(upstream), post(upstream))
            for pause in (0, 0, 3, 3):
                clock.seconds += pause
                assert await post(upstream) == FINE
            await first_left.wait()
            assert wire.accepted == 2

    run(main())
    assert len(set(served)) == 1


def test_a_connection_that_a_server_may_close_at_any_moment_is_not_reused(run: Run) -> None:
    """D10: many servers close after 5 s idle, and a request that is on its way then would spend an attempt."""
    clock = ManualClock()

    async def main() -> list[int]:
        accepted = []
        async with serving(answers_for_ever) as wire, client(wire.port, clock=clock) as upstream:
            for pause in (0, 3.9, 4.1):
                clock.seconds += pause
                assert await post(upstream) == FINE
                accepted.append(wire.accepted)
        return accepted

    assert run(main()) == [1, 1, 2]


def test_idle_connections_are_closed_without_a_further_request(run: Run) -> None:
    """A server that serves a fixed number of connections is then free for the other workers."""
    both = asyncio.Barrier(2)
    left = asyncio.Barrier(3)

    async def behave(peer: Peer) -> None:
        await peer.request()
        await both.wait()
        await peer.send(answer())
        await peer.left()
        await left.wait()

    async def main() -> None:
        async with serving(behave) as wire, client(wire.port, max_idle_seconds=0.01) as upstream:
            await asyncio.gather(post(upstream), post(upstream))
            await left.wait()

    run(main())


@pytest.mark.rule("D10", "A kept-alive connection that is found closed before the first byte is replaced.")
@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_connection_closed_while_idle_is_replaced(run: Run, how: str) -> None:
    """D10: a server's idle timeout does not count as an error of the line, and only one of the two gets the request."""
    requests: list[int] = []

    async def behave(peer: Peer) -> None:
        await peer.request()
        requests.append(peer.number)
        await peer.send(answer())
        if how == "reset":
            peer.reset()

    async def main() -> tuple[Reply, int]:
        async with serving(behave) as wire, client(wire.port) as upstream:
            await post(upstream)
            (idle,) = upstream._open
            await idle.closed
            return await post(upstream), wire.accepted

    assert run(main()) == (FINE, 2)
    assert requests == [1, 2]


@pytest.mark.rule("D10", "A kept-alive connection that was closed a moment ago is replaced too.")
def test_a_connection_that_was_closed_unnoticed_is_replaced(run: Run) -> None:
    """D10: the server closed it while the event loop was busy with something else."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def serve_one() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(answer())

        async def main() -> list[Reply]:
            replies = []
            async with client(listener.getsockname()[1]) as upstream:
                for _ in range(2):
                    server = Thread(target=serve_one)
                    server.start()
                    replies.append(await post(upstream))
                    server.join()
            return replies

        assert run(main()) == [FINE, FINE]


@pytest.mark.rule("D10", "A request is written once per attempt, whatever becomes of its connection.")
@pytest.mark.parametrize("how", ["closed", "reset"])
@pytest.mark.parametrize("kept", [False, True], ids=["new", "kept"])
def test_a_request_is_written_once_per_attempt(run: Run, how: str, *, kept: bool) -> None:
    """D10: a connection that breaks without a byte of an answer spends the attempt, also if it was a kept one."""
    requests: list[bytes] = []

    async def behave(peer: Peer) -> None:
        if kept:
            await answers_once(peer)
        requests.append(await peer.request())
        if how == "reset":
            peer.reset()

    async def main() -> list[FaultKind | None]:
        kinds = []
        async with serving(behave) as wire, client(wire.port) as upstream:
            for _ in range(4):
                if kept:
                    assert await post(upstream) == FINE
                kinds.append(kind_of(await post(upstream)))
        return kinds

    assert run(main()) == [FaultKind.BROKEN] * 4
    assert len(requests) == 4


def test_a_request_is_not_written_to_another_idle_connection(run: Run) -> None:
    """D5, D10: a line that kills servers is not sent to one after the other."""
    requests: list[int] = []
    both = asyncio.Barrier(2)

    async def behave(peer: Peer) -> None:
        await peer.request()
        await both.wait()
        await peer.send(answer())
        await peer.request()
        requests.append(peer.number)

    async def main() -> tuple[FaultKind | None, int]:
        async with serving(behave) as wire, client(wire.port) as upstream:
            await asyncio.gather(post(upstream), post(upstream))
            return kind_of(await post(upstream)), wire.accepted

    assert run(main()) == (FaultKind.BROKEN, 2)
    assert len(requests) == 1


@pytest.mark.rule("D5", "A server that is gone after it took a line may have gone down over it.")
def test_a_server_that_is_gone_after_it_took_a_request_is_broken(run: Run) -> None:
    """D5: the line may have crashed the server, so the fault is not that of a refused connection."""

    async def dies(peer: Peer) -> None:
        await peer.request()

    async def main() -> Reply:
        async with AsyncExitStack() as server:
            wire = await server.enter_async_context(serving(answers_then(dies)))
            async with client(wire.port) as upstream, asyncio.TaskGroup() as group:
                await post(upstream)
                group.create_task(server.aclose())
                # From here on it listens no more; its last connection waits for the request that it ends over.
                await asyncio.sleep(0)
                return await post(upstream)

    reply = run(main())
    assert reply == Fault(kind=FaultKind.BROKEN, detail="the connection ended before an answer came")


def test_a_fresh_connection_that_ends_is_broken(run: Run) -> None:
    """D2: the first request of a connection is not sent again, because the server received it."""

    async def ends(peer: Peer) -> None:
        await peer.request()

    async def main() -> tuple[FaultKind | None, int]:
        async with serving(ends) as wire, client(wire.port) as upstream:
            return kind_of(await post(upstream)), wire.accepted

    assert run(main()) == (FaultKind.BROKEN, 1)


def test_a_server_that_began_to_answer_took_the_request(run: Run) -> None:
    """D2: after one byte of an answer the request is not sent again."""

    async def begins(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"H")

    reply, accepted = run(post_twice(answers_then(begins)))
    assert (kind_of(reply), accepted) == (FaultKind.BROKEN, 1)


def test_a_connection_that_is_ending_is_not_sent_to(run: Run) -> None:
    """D2: if no other connection can be opened either, nothing was sent."""

    async def main() -> tuple[Reply, int]:
        async with serving(answers_for_ever) as wire, client(wire.port) as upstream:
            await post(upstream)
            (ending,) = upstream._idle
            ending.data_received(b"?")
            reply = await post(upstream)
            assert ending._exchanges == 1
            return reply, wire.accepted

    assert run(main()) == (FINE, 2)


def test_an_answer_does_not_affect_the_next(run: Run) -> None:
    """D2: after one without length or body, a lone line end is not read as an answer."""

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 204 None\r\n\r\n")
        await peer.request()
        await peer.send(b"\r\n")

    async def main() -> Reply:
        async with serving(behave) as wire, client(wire.port) as upstream:
            assert await post(upstream) == Answer(status=204, body=b"")
            return await post(upstream)

    assert kind_of(run(main())) is FaultKind.BROKEN


def test_a_post_is_sent_before_it_is_awaited(run: Run) -> None:
    """Over a new connection and over a kept one; and an early answer is not lost."""
    asked: asyncio.Queue[bytes] = asyncio.Queue()

    async def behave(peer: Peer) -> None:
        while True:
            asked.put_nowait(await peer.request())
            await peer.send(answer())

    async def main() -> int:
        async with serving(behave) as wire, client(wire.port) as upstream:
            for _ in range(2):
                posted = upstream.post(PATH, BODY)
                await asked.get()
                assert await asyncio.ensure_future(posted) == FINE
            return wire.accepted

    assert run(main()) == 1


def test_unrequested_bytes_close_the_connection(run: Run) -> None:
    """C12: bytes on an idle connection are never read as the answer to the next line."""

    idle = asyncio.Event()
    left = asyncio.Event()

    async def talks(peer: Peer) -> None:
        await idle.wait()
        await peer.send(answer(b'"unasked"'))
        await peer.left()
        left.set()

    async def main() -> tuple[Reply, int]:
        async with serving(answers_then(talks)) as wire, client(wire.port) as upstream:
            await post(upstream)
            idle.set()
            await left.wait()
            return await post(upstream), wire.accepted

    assert run(main()) == (FINE, 2)


def test_each_post_on_a_kept_connection_has_the_whole_timeout(run: Run) -> None:
    """D2: although one timer serves all of them."""
    waited: list[float] = []

    async def scene() -> None:
        async with serving(answers_then(hangs)) as wire, client(wire.port, request_timeout=1) as upstream:
            loop = asyncio.get_running_loop()
            assert await post(upstream) == FINE
            # Its timer is due in the middle of the next one.
            await asyncio.sleep(0.3)
            since = loop.time()
            assert kind_of(await post(upstream)) is FaultKind.TIMEOUT
            waited.append(loop.time() - since)

    run(scene())
    assert waited[0] > 0.99


async def hangs(peer: Peer) -> None:
    await peer.request()
    await peer.left()


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"], ids=["silent", "begun"])
def test_a_timeout_closes_the_connection(run: Run, start: bytes) -> None:
    """D2: the whole answer must arrive in time, and a late one is not read as another's."""
    left = asyncio.Event()

    async def stalls(peer: Peer) -> None:
        await peer.request()
        await peer.send(start)
        await peer.left()
        left.set()

    async def main() -> Reply:
        async with serving(stalls) as wire, client(wire.port, request_timeout=0.05) as upstream:
            reply = await post(upstream)
            await left.wait()
            return reply

    assert kind_of(run(main())) is FaultKind.TIMEOUT


def test_connecting_does_not_extend_the_timeout(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """D2: the request timeout is for the post as a whole."""
    clock = ManualClock()
    connect = HttpUpstream._connect

    async def connect_slowly(upstream: HttpUpstream) -> UpstreamConnection:
        clock.seconds += 0.5
        return await connect(upstream)

    async def main() -> Reply:
        async with serving(Peer.left) as wire, client(wire.port, clock=clock, request_timeout=1) as upstream:
            return await post(upstream)

    monkeypatch.setattr(HttpUpstream, "_connect", connect_slowly)
    assert run(main()) == Fault(kind=FaultKind.TIMEOUT, detail="no complete answer within 0.5 s")


def test_cancelling_closes_the_connection(run: Run) -> None:
    """C11: the answer to a line that is cancelled at the end of the grace period is not read as the next one's."""
    asked = asyncio.Event()
    left = asyncio.Event()

    async def stalls(peer: Peer) -> None:
        await peer.request()
        asked.set()
        await peer.left()
        left.set()

    async def main() -> Reply:
        async with serving(answers_then(stalls)) as wire, client(wire.port) as upstream:
            await post(upstream)
            doomed = asyncio.create_task(post(upstream))
            await asked.wait()
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            await left.wait()
            return await post(upstream)

    assert run(main()) == FINE


def test_closing_ends_what_is_in_flight(run: Run) -> None:
    asked = asyncio.Event()

    async def stalls(peer: Peer) -> None:
        await peer.request()
        asked.set()
        await peer.left()

    async def main() -> Reply:
        async with serving(stalls) as wire, client(wire.port) as upstream:
            in_flight = asyncio.create_task(post(upstream))
            await asked.wait()
            await upstream.close()
            return await in_flight

    assert kind_of(run(main())) is FaultKind.BROKEN


def test_a_port_without_a_server_is_refused(run: Run) -> None:
    """D2: no connection, and nothing was sent."""

    async def main() -> Reply:
        async with serving(answers_once) as wire:
            port = wire.port
        async with client(port) as upstream:
            return await post(upstream)

    assert run(main()) == Fault(kind=FaultKind.REFUSED, detail="cannot connect to the upstream: connection refused")


@pytest.mark.parametrize("hosts", [["127.0.0.1", "127.0.0.2"], ["255.255.255.255"]])
def test_the_reason_of_a_refused_connection_names_no_address(monkeypatch: pytest.MonkeyPatch, hosts: list[str]) -> None:
    """D2: the reason becomes part of an error line, and the addresses of the operator's servers are not for tenants."""

    async def main() -> Reply:
        async with serving(answers_once) as wire:
            port = wire.port
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        async with client(port, url="http://model.example:{port}/v1") as upstream:
            return await post(upstream)

    reply = asyncio.run(main())
    assert isinstance(reply, Fault)
    assert reply.kind is FaultKind.REFUSED
    assert not [host for host in hosts if host in reply.detail]


def test_a_name_that_does_not_resolve_is_refused(run: Run) -> None:
    """The text gets into tenants' error files, which must not name the operator's machines."""

    async def main() -> Reply:
        async with client(1, url="http://batchline.invalid/v1") as upstream:
            return await post(upstream)

    reply = run(main())
    assert kind_of(reply) is FaultKind.REFUSED
    assert isinstance(reply, Fault)
    assert "cannot be resolved" in reply.detail
    assert "batchline.invalid" not in reply.detail


def test_connecting_has_its_own_limit(run: Run) -> None:
    """D2: a server that accepts the connection but not the handshake is abandoned after the connect timeout."""

    async def silent(peer: Peer) -> None:
        await peer.left()

    async def main() -> Reply:
        url = "https://127.0.0.1:{port}/v1"
        async with serving(silent) as wire, client(wire.port, url=url, connect_timeout=0.05) as upstream:
            return await post(upstream)

    reply = run(main())
    assert kind_of(reply) is FaultKind.REFUSED
    assert reply.detail.endswith("timed out after 0.05 s")


class Watched(HeldBytes):
    """Notes the most bytes that were held, and says when an answer has to wait."""

    def __init__(self, limit: float) -> None:
        super().__init__(limit)
        self.peak = 0
        self.waits = asyncio.Event()

    def request(self, reservation: Reservation) -> None:
        super().request(reservation)
        self.peak = max(self.peak, self.total)
        if reservation.waiting:
            self.waits.set()


LARGE = answer(b"x" * MiB)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n100000\r\n" + b"x" * MiB + b"\r\n0\r\n\r\n"


@pytest.mark.parametrize("wire_bytes", [LARGE, CHUNKED], ids=["length", "chunked"])
def test_large_answers_at_once_stay_within_the_limit(run: Run, wire_bytes: bytes) -> None:
    """All of them arrive, on connections that can be used again, and at most four exceed the limit at a time."""

    async def answers_large(peer: Peer) -> None:
        while await peer.request():
            await peer.send(wire_bytes)

    async def is_whole(upstream: HttpUpstream) -> bool:
        return await post(upstream) == Answer(status=200, body=b"x" * MiB)

    async def main() -> None:
        held_bytes = Watched(2 * MiB)
        async with serving(answers_large) as wire, client(wire.port, held_bytes=held_bytes) as upstream:
            assert all(await asyncio.gather(*(is_whole(upstream) for _ in range(24))))
            assert await is_whole(upstream)
            assert wire.accepted == 24
        assert held_bytes.peak <= (2 + 4 + 1) * MiB
        assert held_bytes.total == 0

    run(main())


def test_an_answer_holds_its_bytes_until_it_is_gone(run: Run) -> None:
    """Until it is recorded it may wait behind others, and what it takes must not be given to more that arrive."""

    async def answers_large(peer: Peer) -> None:
        await peer.request()
        await peer.send(LARGE)
        await peer.left()

    async def main() -> None:
        held_bytes = Watched(2 * MiB)
        async with serving(answers_large) as wire, client(wire.port, held_bytes=held_bytes) as upstream:
            reply = await post(upstream)
            assert held_bytes.total >= MiB
            del reply
            # The event loop keeps what it has just passed on until its next turn.
            await asyncio.sleep(0)
            assert held_bytes.total == 0

    run(main())


def test_small_answers_do_not_wait_for_large_ones(run: Run) -> None:
    """D8: what another project has asked for does not hold them up."""

    async def first_is_large(peer: Peer) -> None:
        while await peer.request():
            await peer.send(LARGE if peer.number == 1 else answer())

    async def main() -> None:
        held_bytes = Watched(MiB)
        held_bytes.add_unrecorded(MiB)
        async with serving(first_is_large) as wire, client(wire.port, held_bytes=held_bytes) as upstream:
            large = upstream.post(PATH, BODY)
            await held_bytes.waits.wait()
            assert await post(upstream) == FINE
            assert not large.done()
            held_bytes.on_recorded(MiB)
            assert (await large) == Answer(status=200, body=b"x" * MiB)

    run(main())


def test_the_time_that_an_answer_waits_here_is_no_timeout(run: Run) -> None:
    """D4: while storage is unavailable an answer waits as long as it takes, and costs no further attempt."""

    async def second_hangs(peer: Peer) -> None:
        await peer.request()
        await (peer.send(LARGE) if peer.number == 1 else peer.left())
        await peer.left()

    async def main() -> None:
        held_bytes = Watched(MiB)
        held_bytes.add_unrecorded(MiB)
        options: dict[str, Any] = {"request_timeout": 0.2, "held_bytes": held_bytes}
        async with serving(second_hangs) as wire, client(wire.port, **options) as upstream:
            waiting = upstream.post(PATH, BODY)
            await held_bytes.waits.wait()
            for _ in range(3):
                assert kind_of(await post(upstream)) is FaultKind.TIMEOUT
            held_bytes.on_recorded(MiB)
            assert (await waiting) == Answer(status=200, body=b"x" * MiB)

    run(main())


def test_an_attempt_that_is_cancelled_while_it_waits_gives_its_bytes_back(run: Run) -> None:
    async def answers_large(peer: Peer) -> None:
        await peer.request()
        with suppress(ConnectionError):
            await peer.send(LARGE)
        await peer.left()

    async def main() -> None:
        held_bytes = Watched(MiB)
        held_bytes.add_unrecorded(MiB)
        async with serving(answers_large) as wire, client(wire.port, held_bytes=held_bytes) as upstream:
            waiting = upstream.post(PATH, BODY)
            await held_bytes.waits.wait()
            waiting.cancel()
            held_bytes.on_recorded(MiB)
            assert held_bytes.total == 0

    run(main())
