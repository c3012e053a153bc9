"""The store's four parts on a real Valkey, with shorthands for what a worker and a trainer do."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from pydantic import SecretStr

from service.batches import Batches, BatchRecord, NothingReady
from service.groups import Groups
from service.jobs import Jobs
from service.journal import Generated, Opened, Replied
from service.leases import Ended, Lease, Leases
from service.records import GroupState, JobSpec, Message, ModelFields, Outcome, TaskSpec
from service.settings import Settings
from service.store import Store, open_store


def job_spec(name: str = "job", **fields: Any) -> JobSpec:
    """group_size 2, groups_per_step 2, budget 1: four places."""
    model = ModelFields(tokenizer="any", context_tokens=1000)
    return JobSpec(**{"group_size": 2, "groups_per_step": 2, "name": name, "model": model, "generators": ["http://127.0.0.1:1"]} | fields)


def task(task_id: str, *, priority: int = 0) -> TaskSpec:
    return TaskSpec(task_id=task_id, messages=[Message(role="user", content="hi")], priority=priority)


def ended(*, version: int | None = 0, lineage: int = 0, reward: float | None = None, tokens: int = 10, **fields: Any) -> Ended:
    return Ended(
        outcome=Outcome.COMPLETED,
        stop_reason="answered",
        reward=reward,
        reward_detail='{"why": "é"}',
        turns=1,
        tool_calls=0,
        sampled_tokens=tokens,
        oldest_version=version,
        newest_version=version,
        oldest_lineage=None if version is None else lineage,
        **fields,
    )


def generated(tokens: int, *, version: int = 0, lineage: int = 0, discarded: bool = False) -> Generated:
    return Generated(
        at=1.0,
        token_ids=b"\x01\x00\x00\x00" * tokens,
        logprobs=b"\x00" * 4 * tokens,
        spans=[(version, lineage, 0, tokens)],
        finish="abort" if discarded else "stop",
        generator="g",
        seconds=0.0,
        discarded=discarded,
    )


class Stack:
    """One deployment's store; lease_s and retain_s as given."""

    def __init__(self, store: Store, *, lease_s: float = 30.0, retain_s: float = 60.0, max_attempts: int = 3) -> None:
        self.store = store
        self.jobs = Jobs(store, retain_s=retain_s)
        self.groups = Groups(store, retain_s=retain_s)
        self.leases = Leases(store, lease_s=lease_s, max_attempts=max_attempts)
        self.batches = Batches(store, retain_s=retain_s)
        self.job_id = ""

    async def open_job(self, **fields: Any) -> str:
        self.job_id = (await self.jobs.create("red", job_spec(**fields)))[0].job_id
        return self.job_id

    async def submit(self, count: int, *, prefix: str = "t") -> list[str]:
        """Group ids of `count` new tasks."""
        submitted = await self.groups.submit(self.job_id, [task(f"{prefix}{i}") for i in range(count)])
        return [group for _, group in submitted.groups]

    async def take(self, n: int = 100, *, worker: str = "w1") -> list[Lease]:
        return await self.leases.take(self.job_id, worker, n=n)

    async def one(self) -> Lease:
        return (await self.take(1))[0]

    async def open_journal(self, lease: Lease) -> None:
        await self.leases.append(lease, [Opened(at=1.0, attempt=lease.attempt, worker="w1")], at_index=0)

    async def turn(self, lease: Lease, text: str, *, at_index: int) -> None:
        await self.leases.append(lease, [Replied(at=1.0, content=text, calls=[])], at_index=at_index)

    async def sample(
        self, lease: Lease, tokens: int, *, at_index: int, version: int = 0, lineage: int = 0, discarded: bool = False
    ) -> None:
        await self.leases.append(lease, [generated(tokens, version=version, lineage=lineage, discarded=discarded)], at_index=at_index)

    async def finish_all(self, leases: Sequence[Lease], **fields: Any) -> None:
        for lease in leases:
            await self.leases.finish(lease, ended(**fields))

    async def make_ready(self, count: int, **fields: Any) -> list[str]:
        """Submit `count` tasks, run all that the gate lets out; the ids submitted."""
        ids = await self.submit(count)
        await self.finish_all(await self.take(), **fields)
        return ids

    async def lease(self, groups: int, *, lease_s: float = 30.0, **fields: Any) -> BatchRecord | NothingReady:
        return await self.batches.lease(self.job_id, groups=groups, lease_s=lease_s, **fields)

    async def batch(self, groups: int, **fields: Any) -> BatchRecord:
        found = await self.lease(groups, **fields)
        assert isinstance(found, BatchRecord), found
        return found

    async def bump(self, version: int, **fields: Any) -> None:
        await self.jobs.set_policy(self.job_id, version, **fields)

    async def state(self, group: str) -> GroupState:
        return (await self.groups.get(group)).state

    async def charged(self) -> int:
        return (await self.jobs.counts(self.job_id)).charged

    async def job_keys(self) -> set[str]:
        """Names of the job's keys without their common start."""
        names = {key.decode().split("}:")[1] for key in await self.store.redis.keys(f"rw:{{{self.job_id}}}:*")}
        return names - {"synced"}  # goes by itself


def group_ids(batch: BatchRecord) -> list[str]:
    return [group.group_id for group in batch.groups]


def fast_settings(url: str) -> Settings:
    """For a Valkey without an append-only file."""
    return Settings(redis_url=SecretStr(url), allow_lossy_redis=True)


@asynccontextmanager
async def store_at(url: str) -> AsyncIterator[Store]:
    async with open_store(Settings(redis_url=SecretStr(url))) as store:
        yield store
