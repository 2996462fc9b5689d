"""A TCP proxy between processes and a server that a test can cut, stall or slow down."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from threading import Thread

_CHUNK = 1 << 16
_SLOW_CHUNK = 4096
_SLOW_SECONDS = 0.02


class Mode(StrEnum):
    FORWARD = "forward"
    CUT = "cut"
    """Connections are reset, and so are new ones."""
    STALLED = "stalled"
    """Nothing is forwarded and nothing is closed; what was sent arrives when the proxy forwards again."""
    SLOW = "slow"
    """About 200 KB per second, and 20 ms later."""


class TcpProxy:
    """A TCP proxy in a thread of its own."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._mode = Mode.FORWARD
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.StreamWriter] = set()
        self._may_forward = asyncio.Event()
        self._closing = asyncio.Event()
        self._listening: asyncio.Future[int] = self._loop.create_future()
        self._thread = Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._port(), self._loop).result()

    def set_mode(self, mode: Mode) -> None:
        self._loop.call_soon_threadsafe(self._set_mode, mode)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()
        self._loop.close()

    async def _port(self) -> int:
        return await self._listening

    async def _run(self) -> None:
        self._may_forward.set()
        async with asyncio.TaskGroup() as group:
            forwarding: list[asyncio.Task[None]] = []
            server = await asyncio.start_server(
                lambda reader, writer: forwarding.append(group.create_task(self._forward(reader, writer))),
                "127.0.0.1",
                0,
            )
            self._listening.set_result(server.sockets[0].getsockname()[1])
            await self._closing.wait()
            server.close()
            self._set_mode(Mode.CUT)
            for each in forwarding:
                each.cancel()

    def _set_mode(self, mode: Mode) -> None:
        self._mode = mode
        if mode is Mode.STALLED:
            self._may_forward.clear()
        else:
            self._may_forward.set()
        if mode is Mode.CUT:
            for connection in self._connections:
                connection.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._mode is Mode.CUT:
            writer.transport.abort()
            return
        with suppress(OSError):
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
            self._connections |= {writer, server_writer}
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, server_writer))
                group.create_task(self._pump(server_reader, writer))
            self._connections -= {writer, server_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_SLOW_CHUNK if self._mode is Mode.SLOW else _CHUNK):
                if self._mode is Mode.SLOW:
                    await asyncio.sleep(_SLOW_SECONDS)
                await self._may_forward.wait()
                writer.write(data)
                await writer.drain()
            await self._may_forward.wait()
        writer.close()


@contextmanager
def proxy_to(port: int) -> Iterator[TcpProxy]:
    proxy = TcpProxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
