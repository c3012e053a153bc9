"""The attach stream of a container: both directions of its first process over one connection, Docker's stream headers taken off.

What must always hold: bytes of stdout go on in order and whole, however the stream is cut; nothing is called back after `close`; what is
kept of anything is bounded.
"""

import asyncio
import json
import re
import struct
from collections.abc import Callable
from typing import cast

from sandboxes.docker_engine import Engine, EngineError

_STDOUT, _STDERR = 1, 2
_HEADER = struct.Struct(">BxxxI")
_MAX_HEAD_BYTES = 16_384
_STDERR_BYTES = 4096
"""Of what the agent says on its way out, this much of the end is kept."""
_QUERY = "stream=1&stdin=1&stdout=1&stderr=1"


class NotAStreamError(ValueError):
    """Bytes that no engine sends for a container without a terminal."""


class StreamHeaders:
    """Takes Docker's multiplexed stream in any pieces. Pure."""

    def __init__(self) -> None:
        self._header = b""
        self._stream = 0
        self._left = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Pieces as (stream, bytes), as far as they have come: nothing is held back but a header that is cut.

        Raises:
            NotAStreamError: a header that is none.
        """
        pieces: list[tuple[int, bytes]] = []
        at = 0
        while at < len(data):
            if self._left:
                piece = data[at : at + self._left]
                self._left -= len(piece)
                at += len(piece)
                pieces.append((self._stream, piece))
                continue
            missing = _HEADER.size - len(self._header)
            self._header += data[at : at + missing]
            at += missing
            if len(self._header) == _HEADER.size:
                self._stream, self._left = _HEADER.unpack(self._header)
                self._header = b""
                if self._stream > _STDERR:
                    raise NotAStreamError(f"stream {self._stream} in the engine's attach stream")
        return pieces


class AttachStream(asyncio.Protocol):
    """A `Connection` to a container's first process; made by `attach`. One file descriptor."""

    def __init__(self) -> None:
        self._received: Callable[[bytes], None] = _dropped
        self._lost: Callable[[str], None] | None = None
        self._over = False
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._headers = StreamHeaders()
        self._stderr = b""
        self._upgraded = False
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the engine has answered; an EngineError where it refused."""

    def hand_over(self, received: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        """Who is called from now on. What came before was dropped: an agent speaks only when it is spoken to.

        Raises:
            EngineError: the stream is over already.
        """
        if self._over:
            raise EngineError(f"the attach stream is over: {self.said or 'the engine closed it'}", status=0)
        self._received, self._lost = received, lost

    @property
    def said(self) -> str:
        """The end of what the agent wrote to stderr."""
        return self._stderr.decode(errors="replace").strip()

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Let go at once; what is still queued is dropped."""
        self._over, self._lost = True, None
        if self._transport is not None:
            self._transport.abort()
        if not self.opened.done():
            self.opened.cancel()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        if not self._upgraded:
            data = self._answered(data)
        if not data:
            return
        try:
            pieces = self._headers.feed(data)
        except NotAStreamError as error:
            self._end(str(error))
            return
        for stream, piece in pieces:
            if self._over:
                return
            if stream == _STDOUT:
                self._received(piece)
            elif stream == _STDERR:
                self._stderr = (self._stderr + piece)[-_STDERR_BYTES:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(self.said or (f"the attach stream broke off: {exc}" if exc else "the attach stream ended"))

    def _end(self, reason: str) -> None:
        lost = self._lost
        refused = not self.opened.done()
        if refused:
            self.opened.set_exception(EngineError(f"the engine did not attach: {reason}", status=0))
        self.close()
        if lost is not None and not refused:
            lost(reason)

    def _answered(self, data: bytes) -> bytes:
        """Take the engine's answer to the request to attach; the bytes of the stream that came with it."""
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if not end:
            if len(self._head) > _MAX_HEAD_BYTES:
                self._end("its answer has no end")
            return b""
        status = _status(head)
        if status in (101, 200):
            self._upgraded, self._head = True, b""
            if not self.opened.done():
                self.opened.set_result(None)
            return rest
        if _whole(head, rest) and not self.opened.done():
            self.opened.set_exception(EngineError(f"the engine could not attach: {_message(rest)}", status=status))
            self.close()
        return b""


async def attach(engine: Engine, container_id: str) -> AttachStream:
    """Attach to the first process of a container that was created, started or not.

    Raises:
        EngineError: the engine refused, or did not answer in time.
    """
    loop = asyncio.get_running_loop()
    stream = AttachStream()
    opened = False
    try:
        async with engine.asked(f"attach to {container_id[:12]}"):
            address = engine.address
            if isinstance(address, str):
                await loop.create_unix_connection(lambda: stream, address)
            else:
                await loop.create_connection(lambda: stream, *address)
            stream.write(_request(container_id))
            await stream.opened
        opened = True
        return stream
    finally:
        if not opened:
            stream.close()


def _dropped(_: bytes) -> None:
    """Nobody listens yet."""


def _request(container_id: str) -> bytes:
    return (
        f"POST /containers/{container_id}/attach?{_QUERY} HTTP/1.1\r\nHost: docker\r\n"
        "Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n"
    ).encode()


def _status(head: bytes) -> int:
    found = re.match(rb"HTTP/1\.[01] (\d{3})", head)
    return int(found.group(1)) if found else 0


def _whole(head: bytes, body: bytes) -> bool:
    """Whether a refusal has come in full, or as much as is kept of one."""
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return length is None or len(body) >= min(int(length.group(1)), _MAX_HEAD_BYTES)


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body[:500].decode(errors="replace").strip() or "no reason given"
