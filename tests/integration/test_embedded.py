"""One server per data directory, whoever comes and goes."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import redis.asyncio
from redis.exceptions import RedisError

from service.embedded import EmbeddedValkey

STARTER = """
import asyncio, pathlib, sys
from service.embedded import EmbeddedValkey
async def main():
    async with EmbeddedValkey.open(pathlib.Path(sys.argv[1])) as server:
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


@asynccontextmanager
async def starter(folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Another process that is the owner; it leaves in order when its stdin ends."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", STARTER, str(folder), stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    try:
        await asyncio.wait_for(process.stdout.readline(), 30)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # or its pipe warns after the loop is closed


async def read(url: str, key: str) -> object:
    """Tries until the server answers."""
    async with asyncio.timeout(10), redis.asyncio.Redis.from_url(url) as client:
        while True:
            try:
                return await client.get(key)
            except RedisError:
                await asyncio.sleep(0.05)


def servers(folder: Path) -> list[psutil.Process]:
    """A server shows its socket or its port as its title, so it is found by where it works."""
    found = []
    for process in psutil.process_iter(["name", "cwd"]):
        if process.info["cwd"] == str(folder) and "valkey" in process.info["name"]:
            found.append(process)
    return found


@pytest.mark.parametrize("depth", [1, 120], ids=["socket", "port"])
async def test_when_the_owner_leaves_another_takes_over(tmp_path: Path, depth: int) -> None:
    folder = tmp_path / ("d" * depth)
    async with starter(folder) as other, EmbeddedValkey.open(folder) as server:
        assert not server.owner
        async with redis.asyncio.Redis.from_url(server.url) as client:
            await client.set("k", "v")
        assert other.stdin is not None
        other.stdin.close()
        assert await other.wait() == 0
        assert await read(server.url, "k") == b"v"
        assert server.owner
    assert servers(folder) == []


async def test_the_server_of_a_killed_owner_goes_on_and_is_adopted(tmp_path: Path) -> None:
    async with starter(tmp_path) as other, EmbeddedValkey.open(tmp_path) as server:
        [running] = servers(tmp_path)
        other.kill()
        while not server.owner:
            await asyncio.sleep(0.05)
        assert servers(tmp_path) == [running]
    assert servers(tmp_path) == []


async def test_a_server_that_does_not_answer_is_not_taken_for_dead(tmp_path: Path) -> None:
    async with starter(tmp_path) as other:
        [running] = servers(tmp_path)
        running.suspend()
        other.kill()
    threading.Timer(2.0, running.resume).start()
    async with EmbeddedValkey.open(tmp_path) as server:
        assert server.owner
        assert servers(tmp_path) == [running]
    assert servers(tmp_path) == []
