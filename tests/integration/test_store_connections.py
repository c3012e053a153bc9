"""What connections to Redis promise when callers give up and answers are slow."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr

from service.settings import Settings
from service.store import Store, open_store

pytestmark = pytest.mark.redis

DELAY_S = 0.06
VALUES = [f"v{i}".encode() for i in range(5)]


@asynccontextmanager
async def delayed(url: str) -> AsyncIterator[str]:
    """The URL of a proxy that holds every answer for DELAY_S; requests pass at once."""
    handlers: set[asyncio.Task[Any]] = set()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.current_task())  # type: ignore[arg-type]
        redis_reader, redis_writer = await reach(url)
        pumps = [asyncio.create_task(pump(reader, redis_writer, 0.0)), asyncio.create_task(pump(redis_reader, writer, DELAY_S))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in (redis_writer, writer):
                end.close()
                await asyncio.gather(end.wait_closed(), return_exceptions=True)

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*handlers)


async def reach(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(url)
    if address.scheme == "unix":
        return await asyncio.open_unix_connection(address.path)
    return await asyncio.open_connection(address.hostname, address.port)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    while data := await reader.read(65_536):
        await asyncio.sleep(delay_s)
        writer.write(data)
        await writer.drain()


async def get(store: Store) -> None:
    await store.redis.get("k0")


async def pipeline(store: Store) -> None:
    some = store.redis.pipeline(transaction=False)
    for _ in range(3):
        some.get("k0")
    await some.execute()


async def transaction(store: Store) -> None:
    some = store.redis.pipeline(transaction=True)
    some.get("k0").get("k1")
    await some.execute()


async def lua(store: Store) -> None:
    await store.redis.eval("return redis.call('GET', KEYS[1])", 1, "k0")


async def blocking(store: Store) -> None:
    await store.redis.blpop("nothing", 1)


async def cancelled(call: Any) -> None:
    task = asyncio.ensure_future(call)
    await asyncio.sleep(DELAY_S / 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def timed_out(call: Any) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(DELAY_S / 2):
            await call


@pytest.mark.parametrize("given_up", [cancelled, timed_out], ids=["case-070-cancelled", "case-070-timed-out"])
async def test_a_call_that_was_given_up_shifts_no_reply(empty_redis_url: str, given_up: Callable[[Any], Any]) -> None:
    async with delayed(empty_redis_url) as url, open_store(Settings(redis_url=SecretStr(url))) as store:
        await store.redis.mset({f"k{i}": value for i, value in enumerate(VALUES)})
        for command in (get, pipeline, transaction, lua, blocking):
            await given_up(command(store))
            async with asyncio.timeout(5):
                assert [await store.redis.get(f"k{i}") for i in range(5)] == VALUES, command.__name__
        assert len(store.redis.connection_pool._available_connections) == 1
        assert not store.redis.connection_pool._in_use_connections
