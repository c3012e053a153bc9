"""The connection to Redis (or Valkey): scripts, durability, errors, and the registry of workers.

What must always hold: a Redis that would lose data is refused at start, and a cluster with one such node. Each script is one whole step and
safe to repeat, so that a lost reply costs nothing. Every failure of Redis itself leaves here as `UnavailableError`.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import NoScriptError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError

from service import crash_points, keys
from service.appends import Append, Appends
from service.embedded import EmbeddedValkey
from service.errors import StoreRefusedError, UnavailableError
from service.redis_cluster import TROUBLE, Cluster
from service.redis_connections import Address, connection_pool
from service.settings import Settings

logger = logging.getLogger(__name__)

__all__ = ["EmbeddedValkey", "Script", "Store", "open_store"]

LUA = Path(__file__).parent / "lua"

MAX_CONNECTIONS = 10_000
"""The number of concurrent callers is bounded where they start; a small pool would only fail or queue unfairly here."""

SHARED = ("state", "ledger", "rates", "solve_rates", "moves")
"""What stands before each step that works on a job."""

FEEDING = frozenset({"append", "submit", "take"})
"""Steps that begin or go on with work. Every other one is let through by a Redis that is full: they give memory back, and keep leases."""

THROUGH_WHEN_FULL = "#!lua flags=allow-oom\n"

MARK = f"""{THROUGH_WHEN_FULL}
redis.call('SET', KEYS[1], '1', 'EX', 60)
return #KEYS == 1 and 1 or redis.call('HEXISTS', KEYS[2], ARGV[1])
"""
"""A small write for `to_disk`, on a key of its own: nothing of a job that was deleted meanwhile comes back."""

BEAT = f"{THROUGH_WHEN_FULL}return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])"
"""A heartbeat replaces the one before: a worker whose Redis is full still lives, and what it holds is not swept."""

DISK_WAIT_MS = 5000
"""Longest wait for the disk. The write stands in memory by then; going on risks repeated work only, never a wrong sample."""

COPY_WAIT_S = 2.0
"""Longest wait for a replica, after that for the disk. One that is this slow would hold up every step."""

COPY_LOOK_MS = 100
"""Between two looks at whether there still is a replica to wait for."""

LOOK_S = 1.0
"""Between two looks at whether a server has a replica at all: a look costs as much as the wait."""

REPLICA_LAG_S = 5
"""A replica that has not been heard of for longer is not waited for: it may be dead, which its primary notices after a minute."""

AWAY_CURE = "Start it, correct the URL, or unset the setting for an embedded Valkey in ROLLWAY_DATA_DIR"

POOL: dict[str, Any] = {"max_connections": MAX_CONNECTIONS, "health_check_interval": 30}

Argument = str | bytes | int | float
AWAY = (*TROUBLE, ReadOnlyError)

NO_WRITES = ("MISCONF", "NOREPLICAS", "BUSY ")
"""How the answer of a Redis begins that takes none now: it cannot write to its disk, too few replicas follow, a script holds it up."""


@contextmanager
def unavailable() -> Iterator[None]:
    """Turn failures of Redis itself into `UnavailableError`; a wrong script or type stays an error of ours."""
    try:
        yield
    except AWAY as error:
        raise UnavailableError(f"the store is away ({type(error).__name__}: {error})", retry_after_s=1.0) from error
    except ResponseError as error:
        if str(error).startswith(NO_WRITES):
            raise UnavailableError(f"the store takes no writes ({error})", retry_after_s=5.0) from error
        if not isinstance(error, OutOfMemoryError) and "OOM" not in str(error):  # a script's is a text
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

    def __init__(self, client: "redis.asyncio.Redis | Cluster", url: str) -> None:
        self.redis: Any = client
        """Untyped: redis-py's annotations mix its sync and async answers."""
        self._cluster = client if isinstance(client, Cluster) else None
        self.url = url
        """Where child processes find the same store. May hold a password: never logged."""
        self._scripts = {file.stem: self._read(file) for file in sorted(LUA.glob("*.lua")) if file.stem not in SHARED}
        self._appends = Appends(self._send_appends)
        self._waits_for_disk = True
        self._replicas: dict[Address | None, tuple[float, bool]] = {}
        """When it was last looked whether a server has a live replica, and whether it has."""

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

    async def infos(self) -> dict[str, dict[str, Any]]:
        """What INFO says of each server by its name; of the only one by ''. Raises UnavailableError."""
        with unavailable():
            if self._cluster is not None:
                return await self._cluster.infos()
            return {"": await self.redis.info()}

    def _server_of(self, key: str) -> Address | None:
        """None: the only one, or unknown."""
        return None if self._cluster is None else self._cluster.server_of(key)

    async def deployment_id(self) -> str:
        """A name that whoever shares this store has in common, and nobody else: made at the first call. Raises UnavailableError."""
        with unavailable():
            if await self.redis.set(keys.DEPLOYMENT, secrets.token_hex(6), nx=True):
                await self.names_to_disk(keys.DEPLOYMENT)
            name: bytes = await self.redis.get(keys.DEPLOYMENT)
        return name.decode()

    async def to_disk(self, job: keys.JobKeys, *, wrote: tuple[str, str] | None = None) -> None:
        """Wait until everything that was written for `job` before this call is on the disk of its Redis, and at a replica if that has one.

        So neither a crash of Redis nor a fail-over to that replica forgets it. A fail-over between the write and this call may have:
        `wrote`, a hash and its field, is looked for. No-op where Redis is older than 7.2 or does not persist (allowed by
        `ROLLWAY_ALLOW_LOSSY_REDIS` only). Raises UnavailableError.
        """
        await self._to_disk(job.synced, wrote)

    async def names_to_disk(self, *names: str) -> None:
        """`to_disk` for keys that are no job's. Where there is one server, that of any job is for them too."""
        if self._cluster is not None:
            await asyncio.gather(*(self._to_disk(keys.synced(name)) for name in names))

    async def _to_disk(self, mark: str, wrote: tuple[str, str] | None = None) -> None:
        if not self._waits_for_disk:
            return
        server = self._server_of(mark)
        looked_at, replica = self._replicas.get(server, (0.0, False))
        now = time.monotonic()
        with unavailable():
            reached = await self._mark(mark, wrote, disk=True, replica=replica, look=now > looked_at + LOOK_S)
            until = time.monotonic() + COPY_WAIT_S
            while reached.replica and not reached.copied and time.monotonic() < until:
                reached = await self._mark(mark, wrote, disk=False, replica=True, look=True)
        if reached.looked:
            self._replicas[server] = now, reached.replica
        if reached.replica and not reached.copied:
            logger.warning("no replica of Redis has caught up within %.0f s: a fail-over could forget what was accepted", COPY_WAIT_S)

    async def _mark(self, mark: str, wrote: tuple[str, str] | None, *, disk: bool, replica: bool, look: bool) -> "_Reached":
        """Write a mark and wait for it, since a wait covers what its own connection wrote. look: whether there is a replica now."""
        pipeline = self.redis.pipeline(transaction=False)
        names, fields = ([], []) if wrote is None else ([wrote[0]], [wrote[1]])
        pipeline.eval(MARK, 1 + len(names), mark, *names, *fields)
        pipeline.execute_command("WAITAOF", int(disk), 0, DISK_WAIT_MS)
        if replica:
            pipeline.execute_command("WAIT", 1, COPY_LOOK_MS)
        if look:
            pipeline.info("replication")
        there, (synced, _), *more = await pipeline.execute()
        if not there:
            raise UnavailableError("the store failed over and forgot what was written just now; send it again", retry_after_s=1.0)
        if disk and synced < 1:
            logger.warning("Redis has not synced its append-only file within %d ms", DISK_WAIT_MS)
        return _Reached(replica=_replicated(more[-1]) if look else replica, copied=replica and more[0] > 0, looked=look)

    # -------------------------------------------------------------------------------------------------- appends, combined

    async def append(self, names: Sequence[str], args: Sequence[Argument]) -> int:
        """Run append.lua, together with all other appends that wait now for the same server. Raises UnavailableError."""
        with unavailable():
            reply = await self._appends.put(self._server_of(names[0]), [len(names), *names, *args])
            if isinstance(reply, Exception):
                raise reply
        return int(reply)

    async def close(self) -> None:
        """Appends are refused from now on."""
        await self._appends.close()

    async def _send_appends(self, appends: Sequence[Append]) -> Sequence[Any]:
        script = self._scripts["append"]
        try:
            replies = await self._send_once(appends, "EVALSHA", script.sha)
            forgot = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
            if forgot:
                again = await self._send_once([appends[at] for at in forgot], "EVAL", script.text)
                for at, reply in zip(forgot, again, strict=True):
                    replies[at] = reply
        except (RedisError, OSError) as error:
            return [error] * len(appends)
        return replies

    async def _send_once(self, appends: Sequence[Append], *command: str) -> list[Any]:
        pipeline = self.redis.pipeline(transaction=False)
        for append in appends:
            pipeline.execute_command(*command, *append)
        replies: list[Any] = await pipeline.execute(raise_on_error=False)
        return replies

    # -------------------------------------------------------------------------------------------------- workers

    async def heartbeat(self, worker: str, info: dict[str, Any], ttl_s: float) -> None:
        """Say that `worker` lives for another `ttl_s`. Raises UnavailableError."""
        entry = msgspec.msgpack.encode({"info": info, "until": time.time() + ttl_s})
        with unavailable():
            await self.redis.eval(BEAT, 1, keys.WORKERS, worker, entry)

    async def workers(self) -> list[dict[str, Any]]:
        """The live workers, as `{"worker": name, **info}`; forgets the others. Raises UnavailableError."""
        with unavailable():
            raw = await self.redis.hgetall(keys.WORKERS)
            entries = {name.decode(): msgspec.msgpack.decode(entry) for name, entry in raw.items()}
            dead = [name for name, entry in entries.items() if entry["until"] < time.time()]
            if dead:
                await self.redis.hdel(keys.WORKERS, *dead)
        return [{"worker": name, **entry["info"]} for name, entry in sorted(entries.items()) if name not in dead]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reached:
    """Where a mark is, beside the disk. replica: the server has a live one, as far as known or `looked`. copied: it has the mark."""

    replica: bool
    copied: bool
    looked: bool


def _replicated(info: Mapping[str, Any]) -> bool:
    """Whether a server with this INFO has a live replica."""
    replicas = [entry for name, entry in info.items() if name.startswith("slave") and isinstance(entry, dict)]
    return any(entry["state"] == "online" and entry["lag"] <= REPLICA_LAG_S for entry in replicas)


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
        try:
            store = Store(await _client(url, stack), url)
            with unavailable():
                await _check(store, lossy=settings.allow_lossy_redis)
                await store.load()
        except UnavailableError as error:
            if settings.redis_url is None:
                raise
            raise UnavailableError(f"the Redis of ROLLWAY_REDIS_URL does not serve: {error}. {AWAY_CURE}", retry_after_s=1.0) from error
        try:
            yield store
        finally:
            await store.close()


async def _client(url: str, stack: AsyncExitStack) -> "redis.asyncio.Redis | Cluster":
    """What speaks with the Redis at `url`, or with all of the cluster that it is a node of. Raises StoreRefusedError, UnavailableError."""
    retry = Retry(ExponentialBackoff(cap=1.0, base=0.05), 3)
    try:
        pool = connection_pool(url, retry=retry, **POOL)
    except ValueError:  # its text may hold the password
        raise StoreRefusedError("ROLLWAY_REDIS_URL is no URL of a Redis: redis://host:port, rediss://host:port or unix:///path") from None
    stack.push_async_callback(pool.disconnect)
    client = redis.asyncio.Redis(connection_pool=pool)
    with unavailable():
        info: dict[str, Any] = await client.info()
        if not info.get("cluster_enabled"):
            return client
        cluster = Cluster(url, **POOL)
        stack.push_async_callback(cluster.disconnect)
        await cluster.refresh()
    return cluster


async def _check(store: Store, *, lossy: bool) -> None:
    """Refuse a Redis, or any node of a cluster, that is too old or may lose what it was given."""
    infos = await store.infos()
    if not infos:
        raise UnavailableError("no node of this Redis Cluster holds a slot", retry_after_s=1.0)
    store._waits_for_disk = all([_checked(server, info, lossy=lossy) for server, info in infos.items()])


def _checked(server: str, info: Mapping[str, Any], *, lossy: bool) -> bool:
    """Whether a server can wait for its disk."""
    named = f"the Redis at {server}" if server else "this Redis"
    version = str(info.get("valkey_version") or info["redis_version"])
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < (7, 0):
        raise StoreRefusedError(f"{named} is too old: {version}; use Redis 7 or newer, or Valkey")
    persists = bool(info["aof_enabled"])
    findings: list[tuple[bool, Literal["maxmemory-policy", "appendonly"], str]] = [
        (info["maxmemory_policy"] == "noeviction", "maxmemory-policy", "noeviction"),
        (persists, "appendonly", "yes"),
    ]
    for fine, option, cure in findings:
        if fine:
            continue
        message = f"{named} would lose data: set `{option} {cure}` (redis-cli CONFIG SET {option} {cure}, and in its configuration)"
        if not lossy:
            raise StoreRefusedError(f"{message}; ROLLWAY_ALLOW_LOSSY_REDIS=true starts all the same")
        logger.warning("%s; going on because ROLLWAY_ALLOW_LOSSY_REDIS is set", message)
    return persists and numbers >= (7, 2)
