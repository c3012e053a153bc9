"""The connection to Redis (or Valkey): scripts, durability, errors, and the registry of workers.

What must always hold: a Redis that would lose data is refused at start. Each script is one whole step and safe to repeat, so that a lost
reply costs nothing. Every failure of Redis itself leaves here as `UnavailableError`.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import BusyLoadingError, NoScriptError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from service import crash_points, keys
from service.embedded import EmbeddedValkey
from service.errors import StoreRefusedError, UnavailableError
from service.redis_connections import connection_pool
from service.settings import Settings

logger = logging.getLogger(__name__)

__all__ = ["EmbeddedValkey", "Script", "Store", "open_store"]

LUA = Path(__file__).parent / "lua"

MAX_CONNECTIONS = 10_000
"""The number of concurrent callers is bounded where they start; a small pool would only fail or queue unfairly here."""

COMBINE = 256
"""Appends sent in one go; more would only delay their replies."""

SHARED = ("state", "ledger", "rates", "moves")
"""What stands before each step that works on a job."""

FEEDING = frozenset({"append", "submit", "take"})
"""Steps that begin or go on with work. Every other one is let through by a Redis that is full: they give memory back, and keep leases."""

THROUGH_WHEN_FULL = "#!lua flags=allow-oom\n"

MARK = f"{THROUGH_WHEN_FULL}return redis.call('SET', KEYS[1], '1', 'EX', 60)"
"""A small write for `to_disk`, on a key of its own: nothing of a job that was deleted meanwhile comes back."""

DISK_WAIT_MS = 5000
"""Longest wait for the disk. The write stands in memory by then; going on risks repeated work only, never a wrong sample."""

AWAY_CURE = "Start it, correct the URL, or unset the setting for an embedded Valkey in ROLLWAY_DATA_DIR"

CLOSED = RedisConnectionError("the store was closed")

Argument = str | bytes | int | float
AWAY = (RedisConnectionError, RedisTimeoutError, BusyLoadingError, OutOfMemoryError, ReadOnlyError, OSError)


@contextmanager
def unavailable() -> Iterator[None]:
    """Turn failures of Redis itself into `UnavailableError`; a wrong script or type stays an error of ours."""
    try:
        yield
    except AWAY as error:
        raise UnavailableError(f"the store is away ({type(error).__name__}: {error})", retry_after_s=1.0) from error
    except ResponseError as error:
        if "OOM" not in str(error):
            raise
        raise UnavailableError("the store is out of memory; raise its maxmemory", retry_after_s=5.0) from error


class Script:
    """One Lua step of a job. Its reply is a msgpack map with `status`."""

    def __init__(self, store: "Store", name: str, text: str) -> None:
        self._store = store
        self.name = name
        self.text = text
        self.sha = ""

    async def __call__(self, job: keys.JobKeys, args: Sequence[Argument] = (), *, journals: Sequence[str] = ()) -> dict[str, Any]:
        """Run it on `job`'s keys and then `journals`. Raises UnavailableError."""
        crash_points.reached("before", self.name)
        reply = await self._store.evaluate(self, [*job.all, *journals], args)
        crash_points.reached("after", self.name)
        decoded: dict[str, Any] = msgspec.msgpack.decode(reply)
        return decoded


class Store:
    """Redis as the other modules see it. Made by `open_store`."""

    def __init__(self, client: "redis.asyncio.Redis", url: str) -> None:
        self.redis: Any = client
        """Untyped: redis-py's annotations mix its sync and async answers."""
        self.url = url
        """Where child processes find the same store. May hold a password: never logged."""
        self._scripts = {file.stem: self._read(file) for file in sorted(LUA.glob("*.lua")) if file.stem not in SHARED}
        self._queue: list[tuple[list[Argument], asyncio.Future[int]]] = []
        self._queued = asyncio.Event()
        self._closed = False
        self._waits_for_disk = True

    def _read(self, file: Path) -> Script:
        shared = "" if file.stem == "append" else "".join((LUA / f"{part}.lua").read_text() for part in SHARED)
        flags = "" if file.stem in FEEDING else THROUGH_WHEN_FULL
        return Script(self, file.stem, flags + shared + file.read_text())

    def script(self, name: str) -> Script:
        """The step in `service/lua/<name>.lua`."""
        return self._scripts[name]

    async def load(self) -> None:
        """Register every script."""
        for script in self._scripts.values():
            script.sha = await self.redis.script_load(script.text)

    async def evaluate(self, script: Script, names: Sequence[str], args: Sequence[Argument]) -> Any:
        """One EVALSHA; EVAL where Redis forgot the script. Raises UnavailableError."""
        with unavailable():
            try:
                return await self.redis.evalsha(script.sha, len(names), *names, *args)
            except NoScriptError:
                return await self.redis.eval(script.text, len(names), *names, *args)

    async def ping(self) -> None:
        """Raises UnavailableError."""
        with unavailable():
            await self.redis.ping()

    async def deployment_id(self) -> str:
        """A name that whoever shares this store has in common, and nobody else: made at the first call. Raises UnavailableError."""
        with unavailable():
            await self.redis.set(keys.DEPLOYMENT, secrets.token_hex(6), nx=True)
            name: bytes = await self.redis.get(keys.DEPLOYMENT)
        return name.decode()

    async def to_disk(self, job: keys.JobKeys) -> None:
        """Wait until everything that was written for `job` before this call is on the disk of its Redis.

        A wait covers what its own connection wrote, so a small write goes first on it. No-op where Redis is older than 7.2 or does not
        persist (allowed by `ROLLWAY_ALLOW_LOSSY_REDIS` only). Raises UnavailableError.
        """
        if not self._waits_for_disk:
            return
        with unavailable():
            pipeline = self.redis.pipeline(transaction=False)
            pipeline.eval(MARK, 1, job.synced)
            pipeline.execute_command("WAITAOF", 1, 0, DISK_WAIT_MS)
            reached = (await pipeline.execute())[1][0]
        if reached < 1:
            logger.warning("Redis has not synced its append-only file within %d ms", DISK_WAIT_MS)

    # -------------------------------------------------------------------------------------------------- appends, combined

    async def append(self, names: Sequence[str], args: Sequence[Argument]) -> int:
        """Run append.lua, together with all other appends that wait now: one write and one read for up to `COMBINE` of them.

        Raises UnavailableError.
        """
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self._closed:
            _settle(future, CLOSED)
        self._queue.append(([len(names), *names, *args], future))
        self._queued.set()
        return await future

    async def send_appends(self) -> None:
        """Serve `append` until cancelled. Whatever ends it, nobody is left waiting: appends are refused from then on."""
        batch: list[tuple[list[Argument], asyncio.Future[int]]] = []
        try:
            while True:
                await self._queued.wait()
                batch, self._queue = self._queue[:COMBINE], self._queue[COMBINE:]
                if not self._queue:
                    self._queued.clear()
                await self._send([pair for pair in batch if not pair[1].done()])
        finally:
            self._closed = True
            for _, future in batch + self._queue:
                _settle(future, CLOSED)

    async def _send(self, batch: Sequence[tuple[list[Argument], "asyncio.Future[int]"]]) -> None:
        script = self._scripts["append"]
        replies: Sequence[Any]
        try:
            replies = await self._send_once(script, batch)
            if any(isinstance(reply, NoScriptError) for reply in replies):
                await self.redis.script_load(script.text)
                replies = await self._send_once(script, batch)  # an append that was done succeeds again without effect
        except (RedisError, OSError) as error:
            replies = [error] * len(batch)
        for (_, future), reply in zip(batch, replies, strict=True):
            _settle(future, reply)

    async def _send_once(self, script: Script, batch: Sequence[tuple[list[Argument], "asyncio.Future[int]"]]) -> Sequence[Any]:
        pipeline = self.redis.pipeline(transaction=False)
        for args, _ in batch:
            pipeline.execute_command("EVALSHA", script.sha, *args)
        replies: Sequence[Any] = await pipeline.execute(raise_on_error=False)
        return replies

    # -------------------------------------------------------------------------------------------------- workers

    async def heartbeat(self, worker: str, info: dict[str, Any], ttl_s: float) -> None:
        """Say that `worker` lives for another `ttl_s`. Raises UnavailableError."""
        entry = msgspec.msgpack.encode({"info": info, "until": time.time() + ttl_s})
        with unavailable():
            await self.redis.hset(keys.WORKERS, worker, entry)

    async def workers(self) -> list[dict[str, Any]]:
        """The live workers, as `{"worker": name, **info}`; forgets the others. Raises UnavailableError."""
        with unavailable():
            raw = await self.redis.hgetall(keys.WORKERS)
            entries = {name.decode(): msgspec.msgpack.decode(entry) for name, entry in raw.items()}
            dead = [name for name, entry in entries.items() if entry["until"] < time.time()]
            if dead:
                await self.redis.hdel(keys.WORKERS, *dead)
        return [{"worker": name, **entry["info"]} for name, entry in sorted(entries.items()) if name not in dead]


def _settle(future: "asyncio.Future[int]", reply: Any) -> None:
    """Answer one append, unless its caller is gone."""
    if future.done():
        return
    if not isinstance(reply, Exception):
        future.set_result(reply)
        return
    try:
        with unavailable():
            raise reply
    except (UnavailableError, RedisError) as error:
        future.set_exception(error)


# ------------------------------------------------------------------------------------------------------ opening


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Store]:
    """Connect to the Redis of the settings, or to an embedded Valkey in the data directory.

    Raises:
        StoreRefusedError: it would lose data (evicts, does not persist), is too old, or does not start: with the cure.
        UnavailableError: it does not answer.
    """
    async with AsyncExitStack() as stack:
        if settings.redis_url is not None:
            url = settings.redis_url.get_secret_value()
        else:
            url = (await stack.enter_async_context(EmbeddedValkey.open(settings.data_dir / "valkey"))).url
        retry = Retry(ExponentialBackoff(cap=1.0, base=0.05), 3)
        try:
            pool = connection_pool(url, max_connections=MAX_CONNECTIONS, health_check_interval=30, retry=retry)
        except ValueError:  # its text may hold the password
            raise StoreRefusedError(
                "ROLLWAY_REDIS_URL is no URL of a Redis: redis://host:port, rediss://host:port or unix:///path"
            ) from None
        client = redis.asyncio.Redis(connection_pool=pool)
        stack.push_async_callback(pool.disconnect)
        store = Store(client, url)
        try:
            with unavailable():
                await _check(store, lossy=settings.allow_lossy_redis)
                await store.load()
        except UnavailableError as error:
            if settings.redis_url is None:
                raise
            raise UnavailableError(f"the Redis of ROLLWAY_REDIS_URL does not serve: {error}. {AWAY_CURE}", retry_after_s=1.0) from error
        sender = asyncio.create_task(store.send_appends(), name="store-appends")
        try:
            yield store
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)


async def _check(store: Store, *, lossy: bool) -> None:
    """Refuse a Redis that is too old or may lose what it was given."""
    info = await store.redis.info()
    version = str(info.get("valkey_version") or info["redis_version"])
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < (7, 0):
        raise StoreRefusedError(f"Redis {version} is too old; use Redis 7 or newer, or Valkey")
    await _check_cluster(store, info)
    persists = bool(info["aof_enabled"])
    findings: list[tuple[bool, Literal["maxmemory-policy", "appendonly"], str]] = [
        (info["maxmemory_policy"] == "noeviction", "maxmemory-policy", "noeviction"),
        (persists, "appendonly", "yes"),
    ]
    for fine, option, cure in findings:
        if fine:
            continue
        message = f"this Redis would lose data: set `{option} {cure}` (redis-cli CONFIG SET {option} {cure}, and in its configuration)"
        if not lossy:
            raise StoreRefusedError(f"{message}; ROLLWAY_ALLOW_LOSSY_REDIS=true starts all the same")
        logger.warning("%s; going on because ROLLWAY_ALLOW_LOSSY_REDIS is set", message)
    store._waits_for_disk = persists and numbers >= (7, 2)


async def _check_cluster(store: Store, info: Mapping[str, Any]) -> None:
    """Every step runs on a cluster's node, but a job whose slot lies on another node would never be found."""
    if not info.get("cluster_enabled"):
        return
    nodes = int((await store.redis.cluster("INFO"))["cluster_size"])
    if nodes > 1:
        raise StoreRefusedError(
            f"this is one of {nodes} nodes of a Redis Cluster, and Rollway does not follow slots from node to node: "
            "name a Redis that holds them all, or a proxy that speaks for the cluster"
        )
