"""The gate and the lease check over many steps of a trainer, with time played: case 052."""

from collections.abc import AsyncIterator

import pytest

from service.batches import BatchRecord
from service.leases import Lease
from tests.store_stack import Stack, ended, store_at

pytestmark = pytest.mark.redis

STEP_S = 60
SLOW_S, FAST_S = 100, 20


@pytest.fixture
async def stack(empty_redis_url: str) -> AsyncIterator[Stack]:
    async with store_at(empty_redis_url) as store:
        yield Stack(store)


async def test_case_052_slow_tasks_are_not_thrown_away(stack: Stack) -> None:
    """Every other task takes longer than a step; nothing is started that the trainer could not take in time."""
    job_id = await stack.open_job(group_size=1, groups_per_step=4, staleness_budget=2, stale_policy="requeue", max_requeues=0)
    ids = await stack.submit(120)
    slow = set(ids[::2])
    running: list[tuple[float, int, Lease]] = []
    version, exported = 0, list[str]()
    for now in range(0, 20 * STEP_S, 10):
        for lease in await stack.take():
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
