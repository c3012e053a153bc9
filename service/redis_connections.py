"""Connections to Redis whose calls end on time and can be cancelled.

redis-py sends through `asyncio.wait_for` when it has a socket timeout. Before Python 3.12 that swallows a cancellation which arrives just
as the send is done, so a worker that is told to stop goes on. Here `asyncio.timeout` sets the deadline, and redis-py has none.
"""

import asyncio
from typing import Any

import redis.asyncio
from redis.exceptions import TimeoutError as RedisTimeoutError

SOCKET_S = 15.0
"""For one send and for one reply; the longest reply waits for the disk (`store.DISK_WAIT_MS`)."""

CONNECT_S = 5.0

Address = tuple[str, int]
"""Host and port of a server."""


class _Deadline:
    """Over a redis-py connection without a socket timeout."""

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        await self._on_time(super().send_packed_command(*args, **kwargs))  # type: ignore[misc]

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        return await self._on_time(super().read_response(*args, **kwargs))  # type: ignore[misc]

    async def _on_time(self, call: Any) -> Any:
        deadline = asyncio.timeout(SOCKET_S)
        try:
            async with deadline:
                return await call
        except TimeoutError:
            if not deadline.expired():
                raise
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]
            raise RedisTimeoutError(f"no answer within {SOCKET_S:.0f} s") from None


class _Connection(_Deadline, redis.asyncio.Connection):
    pass


class _SSLConnection(_Deadline, redis.asyncio.SSLConnection):
    pass


class _UnixConnection(_Deadline, redis.asyncio.UnixDomainSocketConnection):
    pass


_CLASSES: dict[type, type] = {
    redis.asyncio.Connection: _Connection,
    redis.asyncio.SSLConnection: _SSLConnection,
    redis.asyncio.UnixDomainSocketConnection: _UnixConnection,
}


def connection_pool(url: str, *, max_connections: int, address: Address | None = None, **options: Any) -> redis.asyncio.ConnectionPool:
    """A pool for `url` (redis, rediss or unix) of such connections. address: another server's, reached as that of `url` is."""
    pool = redis.asyncio.ConnectionPool.from_url(
        url, max_connections=max_connections, socket_timeout=None, socket_connect_timeout=CONNECT_S, **options
    )
    pool.connection_class = _CLASSES[pool.connection_class]
    if address is not None:
        if pool.connection_kwargs.pop("path", None) is not None:
            pool.connection_class = _Connection
        pool.connection_kwargs.update(host=address[0], port=address[1])
    return pool
