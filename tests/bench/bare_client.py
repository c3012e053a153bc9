"""The least that can drive `bare_agent.c` over Docker's attach stream: one connection a container, one call at a time."""

import asyncio
import struct
from collections.abc import Sequence
from typing import Self, cast

_DOCKER_HEAD = struct.Struct(">BxxxI")
"""Which stream, and how many bytes of it follow."""
_ENGINE = "/var/run/docker.sock"
_PIECE_BYTES = 1 << 20


class BareClient(asyncio.Protocol):
    """`attach` gives a connected one. A reply is its status and what follows it; a file that is read is only counted."""

    def __init__(self) -> None:
        self._upgraded = False
        self._wire = bytearray()
        self._stream = bytearray()
        self._reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._writable = asyncio.Event()
        self._writable.set()

    @classmethod
    async def attach(cls, container_id: str, engine: str = _ENGINE) -> Self:
        """Raises: ConnectionError: the engine refused."""
        _, client = await asyncio.get_running_loop().create_unix_connection(cls, engine)
        path = f"/containers/{container_id}/attach?stream=1&stdin=1&stdout=1"
        client._transport.write(f"POST {path} HTTP/1.1\r\nHost: docker\r\nUpgrade: tcp\r\nConnection: Upgrade\r\n\r\n".encode())
        await client._answered()
        return client

    async def run(self, argv: Sequence[str]) -> tuple[int, bytes, bytes]:
        """Exit code, stdout and stderr."""
        self._send(b"X", b"".join(argument.encode() + b"\0" for argument in argv))
        reply = await self._answered()
        status, printed = struct.unpack_from("<II", reply)
        return status, reply[8 : 8 + printed], reply[8 + printed :]

    async def put(self, path: str, content: bytes) -> None:
        body = path.encode() + b"\0"
        self._transport.write(struct.pack("<I", 1 + len(body) + len(content)) + b"P" + body)
        for start in range(0, len(content), _PIECE_BYTES):
            await self._writable.wait()
            self._transport.write(content[start : start + _PIECE_BYTES])
        await self._answered()

    async def get(self, path: str) -> bytes:
        self._send(b"G", path.encode() + b"\0")
        return (await self._answered())[4:]

    def close(self) -> None:
        self._transport.abort()

    def _send(self, what: bytes, body: bytes) -> None:
        self._transport.write(struct.pack("<I", 1 + len(body)) + what + body)

    async def _answered(self) -> bytes:
        reply = await self._reply
        self._reply = asyncio.get_running_loop().create_future()
        return reply

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, error: Exception | None) -> None:
        if not self._reply.done():
            self._reply.set_exception(error or ConnectionResetError("the engine closed the attach stream"))
            self._reply.exception()  # seen, should nobody wait

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._wire += data
        if not self._upgraded and not self._upgrade():
            return
        self._demultiplex()
        if len(self._stream) >= 4 and len(self._stream) >= 4 + (length := int.from_bytes(self._stream[:4], "little")):
            self._reply.set_result(bytes(memoryview(self._stream)[4 : 4 + length]))
            self._stream = bytearray()  # one call at a time: nothing follows

    def _upgrade(self) -> bool:
        head, found, rest = bytes(self._wire).partition(b"\r\n\r\n")
        if not found:
            return False
        if b" 101 " not in head.split(b"\r\n")[0]:
            self._reply.set_exception(ConnectionError(head.decode(errors="replace")))
            return False
        self._upgraded, self._wire = True, bytearray(rest)
        self._reply.set_result(b"")
        return True

    def _demultiplex(self) -> None:
        at, wire = 0, self._wire
        while len(wire) - at >= _DOCKER_HEAD.size:
            _, length = _DOCKER_HEAD.unpack_from(wire, at)
            if len(wire) - at < _DOCKER_HEAD.size + length:
                break
            at += _DOCKER_HEAD.size
            self._stream += memoryview(wire)[at : at + length]
            at += length
        del wire[:at]
