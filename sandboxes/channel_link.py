"""One connection to an agent, from the preamble on."""

import asyncio
import secrets
from collections.abc import Callable

from sandboxes.base import SandboxError, SandboxFencedError, SandboxLostError
from sandboxes.frames import (
    PREAMBLE,
    VERSION,
    Frame,
    FrameParser,
    MalformedError,
    Type,
    Welcome,
    encode,
    pack_hello,
    unpack_u64,
    unpack_welcome,
)
from sandboxes.line import Connection, Line


class Link:
    """A connection with a channel number of its own. `handle` gets the frames after WELCOME; `broken` is told once why it ended."""

    def __init__(self, sandbox: str, handle: Callable[[Frame], None], broken: "Callable[[Link, str], None]") -> None:
        self.channel = secrets.randbits(64) | 1
        self._sandbox = sandbox
        self._handle = handle
        self._broken = broken
        self._parser = FrameParser(self.channel, lost=True)
        self._connection: Connection | None = None
        self._welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()

    async def open(self, line: Line, fence: int, within_s: float) -> Welcome:
        """Connect and be welcomed.

        Raises:
            SandboxFencedError: a later lease holds it.
            SandboxLostError: the agent is one of another version.
            SandboxError: no connection, or no answer in time.
        """
        try:
            self._connection = await line.connect(self._received, self._lost)
            self._connection.write(PREAMBLE + encode(Type.HELLO, self.channel, payload=pack_hello(fence)))
            async with asyncio.timeout(within_s):
                welcome = await self._welcome
        except TimeoutError as error:
            self.close()
            raise SandboxError(f"{self._sandbox}: its agent did not answer within {within_s:g} s") from error
        except (SandboxError, asyncio.CancelledError):
            self.close()
            raise
        if welcome.version != VERSION:
            self.close()
            raise SandboxLostError(f"{self._sandbox}: its agent speaks version {welcome.version}, this is version {VERSION}")
        return welcome

    def write(self, data: bytes) -> None:
        if self._connection is not None:
            self._connection.write(data)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._welcome.cancel()

    def _received(self, data: bytes) -> None:
        for frame in self._parser.feed(data):
            if not self._welcome.done():
                self._greeted(frame)
            elif self._connection is not None:
                self._handle(frame)
        if self._parser.lost and self._welcome.done():
            self._lost("its agent's stream was disturbed")

    def _greeted(self, frame: Frame) -> None:
        try:
            if frame.type == Type.WELCOME:
                self._welcome.set_result(unpack_welcome(frame.payload))
            elif frame.type == Type.FENCED:
                self._refused(SandboxFencedError(f"{self._sandbox}: the holder of lease {unpack_u64(frame.payload)} is attached to it"))
        except MalformedError as error:
            self._refused(SandboxLostError(f"{self._sandbox}: its agent answers nonsense: {error}"))

    def _refused(self, error: SandboxError) -> None:
        self._welcome.set_exception(error)
        self._welcome.exception()  # seen: whoever waited may have been cancelled just now

    def _lost(self, reason: str) -> None:
        if not self._welcome.done():
            self._refused(SandboxError(f"{self._sandbox}: the connection to its agent ended: {reason}"))
        elif self._connection is not None:
            self.close()
            self._broken(self, reason)
