"""Network links that can be broken: each stands between one party and a server, and passes on what comes until it is told not to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

CHUNK_BYTES = 65536


class Link:
    """Relays `port` on loopback to the port `to`. Every byte passes once and in order, or its connection breaks."""

    def __init__(self, to: int) -> None:
        self.port = 0
        self._to = to
        self._passing = asyncio.Event()
        self._passing.set()
        self._refusing = False
        self._pairs: set[asyncio.Task[None]] = set()

    async def silence(self, seconds: float) -> None:
        """Nothing arrives on either side, and no connection notices; what was sent meanwhile arrives afterwards."""
        self._passing.clear()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._passing.set()

    async def cut(self, seconds: float) -> None:
        """Every connection breaks, and so does each new one."""
        self._refusing = True
        for pair in self._pairs:
            pair.cancel()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._refusing = False

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        pair = asyncio.create_task(self._relay(reader, writer))
        self._pairs.add(pair)
        pair.add_done_callback(self._pairs.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: asyncio.StreamWriter | None = None
        try:
            answers, there = await asyncio.open_connection("127.0.0.1", self._to)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_on(reader, there))
                both.create_task(self._pass_on(answers, writer))
        except* OSError:
            pass  # the server is down, or a side broke off: the other side is told below
        finally:
            for side in (writer, there):
                if side is not None:
                    side.transport.abort()

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(CHUNK_BYTES):
            await self._passing.wait()
            sink.write(data)
            await sink.drain()
        await self._passing.wait()
        sink.write_eof()

    async def leave(self) -> None:
        for pair in list(self._pairs):
            pair.cancel()
        await asyncio.gather(*self._pairs, return_exceptions=True)


@asynccontextmanager
async def linked(to: int) -> AsyncIterator[Link]:
    link = Link(to)
    server = await asyncio.start_server(link.accept, "127.0.0.1", 0)
    link.port = server.sockets[0].getsockname()[1]
    try:
        async with server:
            yield link
    finally:
        await link.leave()
