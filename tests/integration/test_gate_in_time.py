"""The gate, the lease check and the early stop over many steps of a trainer: cases 052 (with time played) and 054."""

import random
from collections.abc import AsyncIterator

import pytest

from service.batches import BatchRecord
from service.leases import Lease
from service.store import open_store
from tests.store_stack import Stack, ended, fast_settings

pytestmark = pytest.mark.redis

STEP_S = 60
SLOW_S, FAST_S = 100, 20


@pytest.fixture
async def stack(fast_valkey_url: str) -> AsyncIterator[Stack]:
    async with open_store(fast_settings(fast_valkey_url)) as store:
        await store.redis.flushall()
        yield Stack(store)


async def test_case_052_slow_tasks_are_not_thrown_away(stack: Stack) -> None:
    """Every other task takes longer than a step; nothing is started that the trainer could not take in time, and so nothing is stopped."""
    job_id = await stack.open_job(group_size=1, groups_per_step=4, staleness_budget=2, stale_policy="requeue", max_requeues=0)
    ids = await stack.submit(120)
    slow = set(ids[::2])
    running: list[tuple[float, int, Lease]] = []
    version, exported = 0, list[str]()
    for now in range(0, 20 * STEP_S, 10):
        for lease in await stack.take():
            await stack.sample(lease, 1, at_index=0, version=version)
            running.append((now + (SLOW_S if lease.group_id in slow else FAST_S), version, lease))
        for done in [work for work in running if work[0] <= now]:
            running.remove(done)
            await stack.leases.finish(done[2], ended(version=done[1]))
        if now % STEP_S == 0 and isinstance(batch := await stack.lease(4), BatchRecord):
            assert max(group.staleness for group in batch.groups) <= 2
            staleness = [group.staleness for group in batch.groups]
            assert staleness == sorted(staleness, reverse=True), "oldest version first"
            exported += [group.group_id for group in batch.groups]
            version += 1
            await stack.bump(version, ack=[batch.batch_id])
    counts = await stack.jobs.counts(job_id)
    assert len(exported) >= 4 * 15
    assert len(slow & set(exported)) / len(exported) >= 0.4
    assert sum(counts.dropped.values()) <= 2


@pytest.mark.parametrize("steps_per_version", [1, 2])
@pytest.mark.parametrize(("budget", "prefetch"), [(0, False), (1, False), (3, False), (1, True), (3, True)])
async def test_case_054_the_trainer_always_gets_its_batch(stack: Stack, budget: int, steps_per_version: int, prefetch: bool) -> None:
    """It asks for exactly groups_per_step and publishes only after it has trained on them, whatever fails, is cancelled, filtered or too
    old; one that prefetches leases the next batch before it publishes."""
    rng = random.Random(7)
    clumsy = Stack(stack.store, max_attempts=1)
    shape = {"groups_per_step": 4, "staleness_budget": budget, "steps_per_version": steps_per_version, "zero_variance": "drop"}
    await clumsy.open_job(backlog_limit=2000, max_requeues=1, **shape)
    await clumsy.submit(1500)
    pending: list[tuple[BatchRecord, int]] = []
    version = 0
    for step in range(12):
        batch = await next_batch(clumsy, rng, version, capacity=4 * (budget + 1) * steps_per_version, trains=step // steps_per_version)
        assert max(group.staleness for group in batch.groups) <= budget
        pending.append((batch, step))
        while len(pending) > prefetch:
            done, number = pending.pop(0)
            version = (number + 1) // steps_per_version
            await clumsy.bump(version, ack=[done.batch_id])
    for done, _ in pending:
        await clumsy.batches.ack(done.batch_id)
    await clumsy.bump(version + 2)
    assert (await clumsy.jobs.counts(clumsy.job_id)).acked == 48


async def next_batch(stack: Stack, rng: random.Random, version: int, *, capacity: int, trains: int) -> BatchRecord:
    for _ in range(60):
        for lease in await stack.take():
            fate = rng.random()
            if (await stack.leases.renew(stack.job_id, [lease])).cancelled:
                continue
            if fate < 0.15:
                await stack.leases.restart(lease, "sandbox_lost", retry=True, attempt_counts=rng.random() < 0.3)
            elif fate < 0.2:
                await stack.groups.cancel(lease.group_id)
            else:
                await stack.leases.finish(lease, ended(version=version, reward=float(rng.random() < 0.5)))
        assert await stack.charged() <= capacity
        if isinstance(found := await stack.lease(4, trains_version=max(version, trains)), BatchRecord):
            return found
    raise AssertionError(f"deadlock: {await stack.jobs.counts(stack.job_id)}")
