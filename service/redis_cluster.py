"""A Redis Cluster behind the commands of one Redis.

What must always hold: a command goes to the node that holds its key's slot, and follows the slot when it moves or its node is replaced. It
is then sent again, perhaps after it took effect: whoever uses this sends only what is safe to repeat. Every connection is one of
`service.redis_connections`, which redis-py's own cluster client cannot use.
"""

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands import AsyncCoreCommands
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, RedisError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from service.redis_connections import Address, connection_pool

logger = logging.getLogger(__name__)

PAUSES_S = (0.05, 0.2, 0.8)
"""Between tries of a command whose node is away, or whose slot is between two. What takes longer is for the caller to wait for."""

VIEW_S = 1.0
"""For one node's word on who holds what, before the next one is asked."""

KEYLESS = frozenset({"CLIENT", "CONFIG", "FLUSHALL", "INFO", "KEYS", "PING", "SCRIPT", "WAIT", "WAITAOF"})

TROUBLE = (AskError, TryAgainError, ClusterDownError, RedisConnectionError, RedisTimeoutError, OSError)
"""What another node, or the same one later, may answer. `AskError` is MOVED too."""

Command = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(slots=True)
class Step:
    """Commands for one node, sent as one: what has a key of `slot`, and keyless commands behind it. whole: a transaction."""

    slot: int
    whole: bool = False
    commands: list[Command] = field(default_factory=list)
    replies: list[Any] = field(default_factory=list)
    asked: Address | None = None
    """The node that a slot is on its way to: for the next try only."""

    @property
    def trouble(self) -> Exception | None:
        return next((reply for reply in self.replies if isinstance(reply, TROUBLE)), None)


class _Commands(AsyncCoreCommands):
    """`get`, `hset` and all others, over an `execute_command`."""

    _event_dispatcher: Any = None  # redis-py's type wants one; only its own clients use it


class Cluster(_Commands):
    """The cluster that the server at `url` belongs to. Call `refresh` before anything else."""

    def __init__(self, url: str, **options: Any) -> None:
        self._url = url
        self._options = options
        self._seed = self._connect(None)
        self._clients: dict[Address, Any] = {}
        self._owners: dict[int, Address] = {}
        self._nodes: list[Address] = []
        self._views = 0
        self._refreshing = asyncio.Lock()

    def server_of(self, key: str) -> Address | None:
        """The node that `key` is on, as far as is known."""
        return self._owners.get(_slot(key))

    async def infos(self) -> dict[str, dict[str, Any]]:
        """What INFO says of every node by its address, replicas too: one of those takes over. One that is away is left out."""
        primaries = set(self._owners.values())
        infos = {}
        for address in self._nodes:
            try:
                infos[f"{address[0]}:{address[1]}"] = await self._client(address).info()
            except (RedisError, OSError):
                if address in primaries:
                    raise
                logger.warning("a replica of the cluster at %s:%d does not answer", *address)
        return infos

    async def ping(self, **_: Any) -> bool:  # type: ignore[override]
        """Whether any primary answers: the loss of one stops the jobs that it holds, not the service. Raises as the last one does."""
        primaries = list(set(self._owners.values()))
        for address in primaries[:-1]:
            try:
                return bool(await self._client(address).ping())
            except (RedisError, OSError):
                continue
        return bool(await self._client(primaries[-1]).ping())

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """On the node of its key; what has no key, on every primary: lists are joined, else the first reply is the answer."""
        slot = _slot_of(args)
        if slot is not None:
            [reply] = await self.run([Step(slot, commands=[(args, options)])])
        else:
            some = {address: slot for slot, address in self._owners.items()}
            replies = await self.run([Step(slot, commands=[(args, options)]) for slot in some.values()])
            reply = next((reply for reply in replies if isinstance(reply, Exception)), replies[0])
            if isinstance(reply, list):
                reply = [item for part in replies for item in part]
        if isinstance(reply, Exception):
            raise reply
        return reply

    def pipeline(self, transaction: bool = True) -> "ClusterPipeline":
        """As `redis.asyncio.Redis.pipeline`. The keys of a transaction lie in one slot."""
        return ClusterPipeline(self, transaction)

    async def run(self, steps: Sequence[Step]) -> list[Any]:
        """The replies to all commands of `steps` in their order; errors are replies."""
        waiting = steps
        for pause_s in (*PAUSES_S, None):
            view = self._views
            await self._send(waiting)
            waiting = [step for step in waiting if step.trouble is not None]
            if not waiting or pause_s is None:
                break
            if not all([self._redirect(step) for step in waiting]):
                await asyncio.sleep(pause_s)
                await self.refresh(view, last={self._owners[step.slot] for step in waiting if step.slot in self._owners})
        return [reply for step in steps for reply in step.replies]

    async def refresh(self, view: int = 0, *, last: Iterable[Address] = ()) -> None:
        """Learn anew who holds what, unless another caller has since `view`; nodes in `last` are asked last.

        When nobody answers, what was known stands.
        """
        async with self._refreshing:
            if self._views != view:
                return
            asked = [self._client(address) for address in sorted(self._nodes, key=lambda one: (one in last, random.random()))]
            for client in [*asked, self._seed]:
                try:
                    async with asyncio.timeout(VIEW_S):
                        ranges = await client.execute_command("CLUSTER", "SLOTS")
                except (RedisError, OSError) as error:  # a timeout is one
                    logger.warning("a node of the Redis Cluster does not tell who holds what: %s", error)
                    continue
                if ranges:
                    self._learn(ranges, client.connection_pool.connection_kwargs.get("host", "127.0.0.1"))
                    break
            self._views += 1

    async def disconnect(self) -> None:
        """Close every connection."""
        for client in (self._seed, *self._clients.values()):
            await client.connection_pool.disconnect()

    def _connect(self, address: Address | None) -> Any:
        """One try a call: the next one may belong to another node."""
        return redis.asyncio.Redis(
            connection_pool=connection_pool(self._url, address=address, retry=Retry(NoBackoff(), 0), **self._options)
        )

    def _client(self, address: Address) -> Any:
        if address not in self._clients:
            self._clients[address] = self._connect(address)
        return self._clients[address]

    def _learn(self, ranges: Sequence[Any], asked: str) -> None:
        """Take the reply to CLUSTER SLOTS. A node that does not know its own name is at the address that was `asked`."""
        self._owners = {}
        nodes: dict[Address, None] = {}
        for first, end, *holders in ranges:
            addresses = [((host or b"").decode() or asked, int(port)) for host, port, *_ in holders]
            nodes.update(dict.fromkeys(addresses))
            self._owners.update(dict.fromkeys(range(first, end + 1), addresses[0]))
        self._nodes = list(nodes)

    def _redirect(self, step: Step) -> bool:
        """Whether the reply named the node to try next, at once."""
        error = step.trouble
        if not isinstance(error, AskError):
            return False
        host = error.host or self._owners[step.slot][0]
        if isinstance(error, MovedError):
            self._owners[step.slot] = (host, error.port)
            return True
        if step.whole:
            return False  # ASKING goes before each command, and MULTI is one: wait until the slot has moved
        step.asked = (host, error.port)
        return True

    async def _send(self, steps: Sequence[Step]) -> None:
        """One try of all, on all nodes at once."""
        parts: dict[Address, list[Step]] = defaultdict(list)
        for step in steps:
            address = step.asked or self._owners.get(step.slot)
            if address is None:
                step.replies = [ClusterDownError("CLUSTERDOWN no node holds the slot")] * len(step.commands)
            else:
                parts[address].append(step)
        await asyncio.gather(*(self._send_to(self._client(address), part) for address, part in parts.items()))

    async def _send_to(self, client: Any, steps: Sequence[Step]) -> None:
        pipeline = client.pipeline(transaction=steps[0].whole)
        for step in steps:
            for args, options in step.commands:
                if step.asked:
                    pipeline.execute_command("ASKING")
                pipeline.execute_command(*args, **options)
        replies: Any
        try:
            replies = iter(await pipeline.execute(raise_on_error=False))
        except (RedisError, OSError) as error:
            replies = repeat(error)
        for step in steps:
            step.replies = [next(replies) for _ in range(len(step.commands) * (2 if step.asked else 1))]
            if step.asked:
                step.replies, step.asked = step.replies[1::2], None


class ClusterPipeline(_Commands):
    """Commands that are sent together by `execute`, each to its node. One without a key goes with the one before it."""

    def __init__(self, cluster: Cluster, transaction: bool) -> None:
        self._cluster = cluster
        self._whole = transaction
        self._steps: list[Step] = []

    def execute_command(self, *args: Any, **options: Any) -> "ClusterPipeline":
        slot = _slot_of(args)
        if slot is not None and not (self._whole and self._steps):
            self._steps.append(Step(slot, self._whole))
        self._steps[-1].commands.append((args, options))
        return self

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """The replies in order. Raises the first error among them, or has it in its place."""
        steps, self._steps = self._steps, []
        replies = await self._cluster.run(steps)
        for reply in replies:
            if raise_on_error and isinstance(reply, Exception):
                raise reply
        return replies


def _slot(key: str | bytes) -> int:
    return key_slot(key.encode() if isinstance(key, str) else key)


def _slot_of(args: Sequence[Any]) -> int | None:
    """The slot of a command's first key; None: it has none."""
    name = args[0].split()[0].upper()
    if name in KEYLESS:
        return None
    return _slot(args[3] if name in ("EVAL", "EVALSHA") else args[1])
