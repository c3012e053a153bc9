"""Appends to journals, combined: all that wait for one server go in one write, and their replies come in one read.

What must always hold: every append is answered, also by whatever ends the sending. A server that is away holds up none of another's.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

COMBINE = 256
"""Appends sent in one go; more would only delay their replies."""

CLOSED = RedisConnectionError("the store was closed")

Append = list[Any]
"""The arguments of one."""

Send = Callable[[Sequence[Append]], Awaitable[Sequence[Any]]]
"""Sends some at once. Their replies in order; errors are replies."""


class Appends:
    """The appends of a store. Usable until `close`, which whoever made it calls."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lanes: dict[Hashable, _Lane] = {}
        self._closed = False

    async def put(self, server: Hashable, append: Append) -> Any:
        """The reply to `append`, sent with the others for `server`. An error is a reply too."""
        if self._closed:
            return CLOSED
        lane = self._lanes.get(server)
        if lane is None:
            lane = self._lanes[server] = _Lane(self._send)
        return await lane.put(append)

    async def close(self) -> None:
        """Stop sending. Whoever waits is answered with an error, as is all that comes later."""
        self._closed = True
        for lane in self._lanes.values():
            lane.sender.cancel()
        await asyncio.gather(*(lane.sender for lane in self._lanes.values()), return_exceptions=True)


class _Lane:
    """What waits for one server."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._queue: list[_Waiting] = []
        self._sent: list[_Waiting] = []
        self._queued = asyncio.Event()
        self.sender = asyncio.create_task(self._serve(), name="store-appends")
        self.sender.add_done_callback(self._end)

    async def put(self, append: Append) -> Any:
        if self.sender.done():
            return CLOSED
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.append((append, future))
        self._queued.set()
        return await future

    async def _serve(self) -> None:
        while True:
            await self._queued.wait()
            batch, self._queue = self._queue[:COMBINE], self._queue[COMBINE:]
            if not self._queue:
                self._queued.clear()
            self._sent = [waiting for waiting in batch if not waiting[1].done()]
            replies = await self._send([append for append, _ in self._sent])
            for (_, future), reply in zip(self._sent, replies, strict=True):
                _settle(future, reply)

    def _end(self, sender: "asyncio.Task[None]") -> None:
        for _, future in self._sent + self._queue:
            _settle(future, CLOSED)


_Waiting = tuple[Append, "asyncio.Future[Any]"]


def _settle(future: "asyncio.Future[Any]", reply: Any) -> None:
    """Answer one append, unless its caller is gone."""
    if not future.done():
        future.set_result(reply)
