"""One call on its way: what is still to be sent, what came so far. No I/O: a channel moves the bytes.

What must always hold: of stdin at most a window and one piece is held, of data at most a window, whoever is slow.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from sandboxes.base import SandboxError
from sandboxes.frames import (
    DATA_WINDOW_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_RUN_BYTES,
    STDIN_PIECE_BYTES,
    STDIN_WINDOW_BYTES,
    Assembler,
    Type,
    encode,
    encode_message,
    pack_stdin,
    parts,
)

_GRANT_BYTES = DATA_WINDOW_BYTES // 4


class Outgoing:
    """The stdin of a call: what the agent has not taken yet, so that it can be sent again after a lost connection."""

    __slots__ = ("_closed", "_ended", "_ended_sent", "_limit", "_on_the_way", "_sent", "_size", "_unsent", "_waiter")

    def __init__(self) -> None:
        self._on_the_way: deque[memoryview] = deque()
        self._unsent: deque[memoryview] = deque()
        self._size = 0
        """Of both together."""
        self._sent = 0
        self._limit = STDIN_WINDOW_BYTES
        self._ended = self._ended_sent = self._closed = False
        self._waiter: asyncio.Future[None] | None = None

    def feed(self, data: bytes | memoryview) -> None:
        """`data` is kept, not copied."""
        if data:
            self._unsent.append(memoryview(data))
            self._size += len(data)

    def end(self) -> None:
        """All is fed."""
        self._ended = True

    def take(self) -> list[bytes]:
        """The payloads that may be sent now."""
        payloads = list[bytes]()
        while self._unsent and self._sent < self._limit:
            first, most = self._unsent.popleft(), min(STDIN_PIECE_BYTES, self._limit - self._sent)
            piece, rest = first[:most], first[most:]
            if rest:
                self._unsent.appendleft(rest)
            self._on_the_way.append(piece)
            payloads.append(pack_stdin(self._sent, piece))
            self._sent += len(piece)
        if self._ended and not self._ended_sent and not self._unsent:
            payloads.append(pack_stdin(self._sent, b""))
            self._ended_sent = True
        return payloads

    def allow(self, limit: int) -> None:
        """The agent takes bytes up to `limit`, so it has all up to a window before."""
        self._limit = max(self._limit, limit)
        stop = self._sent - sum(map(len, self._on_the_way))
        while self._on_the_way and (stop := stop + len(self._on_the_way[0])) <= self._limit - STDIN_WINDOW_BYTES:
            self._size -= len(self._on_the_way.popleft())
        self._wake()

    def rewind(self) -> None:
        """On a new connection: send again what the agent may not have."""
        self._sent -= sum(map(len, self._on_the_way))
        self._unsent.extendleft(reversed(self._on_the_way))
        self._on_the_way.clear()
        self._ended_sent = False

    def close(self) -> None:
        """The call is over; nobody waits for room any more."""
        self._closed = True
        self._size = 0
        self._unsent.clear()
        self._on_the_way.clear()
        self._wake()

    async def room(self) -> bool:
        """Wait until there is some; False when the call is over and more is of no use."""
        while not self._closed and self._size >= STDIN_WINDOW_BYTES:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return not self._closed

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Incoming:
    """The data of a call, as it comes. `grant` tells the agent that so many more bytes may follow."""

    __slots__ = ("_ended", "_grant", "_pieces", "_size", "_taken", "_waiter")

    def __init__(self, grant: Callable[[int], None]) -> None:
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._taken = 0
        self._ended = False
        self._grant = grant
        self._waiter: asyncio.Future[None] | None = None

    def feed(self, data: bytes) -> bool:
        """False when the agent sends past the window."""
        self._pieces.append(data)
        self._size += len(data)
        self._wake()
        return self._size <= DATA_WINDOW_BYTES + MAX_PAYLOAD_BYTES

    def end(self) -> None:
        self._ended = True
        self._wake()

    async def pieces(self) -> AsyncIterator[bytes]:
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                self._size -= len(piece)
                yield piece
                self._took(len(piece))
            if self._ended:
                return
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _took(self, count: int) -> None:
        self._taken += count
        if self._taken >= _GRANT_BYTES and not self._ended:
            self._grant(self._taken)
            self._taken = 0

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Call:
    """One request and its answer. `ours`: its id is known to nobody else, so its result is dropped once it is here."""

    __slots__ = (
        "_parts",
        "answer",
        "deadline",
        "flags",
        "id",
        "incoming",
        "killed",
        "kind",
        "max_answer_bytes",
        "ours",
        "outgoing",
        "payload",
    )

    def __init__(
        self,
        call: int,
        kind: Type,
        payload: bytes,
        *,
        flags: int = 0,
        deadline: float = float("inf"),
        max_answer_bytes: int = MAX_RUN_BYTES,
    ) -> None:
        self.id = call
        self.kind = kind
        self.payload = payload
        self.flags = flags
        self.deadline = deadline
        self.max_answer_bytes = max_answer_bytes
        self.ours = True
        self.killed = False
        self.outgoing: Outgoing | None = None
        self.incoming: Incoming | None = None
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._parts: Assembler | None = None

    def request(self, channel: int) -> bytes:
        """Everything that may be sent at once. One that was killed is not asked for again: it might start now."""
        if self.killed:
            return encode(Type.KILL, channel, self.id)
        first = encode_message(self.kind, channel, self.id, self.payload, self.flags)
        if self.outgoing is None:
            return first
        return b"".join((first, self.stdin(channel)))

    def stdin(self, channel: int) -> bytes:
        """The frames of stdin that may be sent now."""
        assert self.outgoing is not None
        return b"".join([part for payload in self.outgoing.take() for part in parts(Type.STDIN, channel, self.id, payload)])

    def rewind(self) -> None:
        """On a new connection: what came of the answer is asked for again."""
        self._parts = None
        if self.outgoing is not None:
            self.outgoing.rewind()

    def part(self, frame: Any) -> bytes | None:
        """The whole answer, once `frame` is its last part.

        Raises:
            MalformedError: it is longer than was asked for.
        """
        if self._parts is None:
            self._parts = Assembler(self.max_answer_bytes)
        whole: bytes | None = self._parts.add(frame)
        return whole

    def finish(self, outcome: object) -> None:
        """Wake whoever waits; `outcome` is the answer, or the SandboxError that stands for it."""
        if self.outgoing is not None:
            self.outgoing.close()
        if self.incoming is not None:
            self.incoming.end()
        if self.answer.done():
            return
        if isinstance(outcome, SandboxError):
            self.answer.set_exception(outcome)
            self.answer.exception()  # seen: nobody may wait any more
        else:
            self.answer.set_result(outcome)
