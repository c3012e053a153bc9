"""A batch whose lease runs out before anybody has heard of it: it is told whole or not at all, since who acks it acks all of its groups."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from service.errors import GoneError, NotFoundError
from service.keys import JobKeys
from service.records import GroupState
from tests.store_stack import Stack, group_ids, store_at

pytestmark = pytest.mark.redis


@pytest.fixture
async def stack(empty_redis_url: str) -> AsyncIterator[Stack]:
    async with store_at(empty_redis_url) as store:
        yield Stack(store)


async def ran_out(stack: Stack, batch_id: str) -> None:
    """Until the batch was there and is no longer: purging is what notices."""
    while True:
        await stack.groups.purge(stack.job_id)
        try:
            await stack.batches.get(batch_id)
        except GoneError:
            return
        except NotFoundError:
            pass
        await asyncio.sleep(0.001)


async def test_a_batch_that_runs_out_on_its_way_is_leased_anew_and_whole(stack: Stack) -> None:
    """A lease waits for the disk; by then it has run out and somebody has noticed, in three of these tries at least."""
    await stack.open_job()
    groups = await stack.make_ready(2)
    on_its_way = 0
    async with asyncio.timeout(50):
        while on_its_way < 3:
            number = int(await stack.store.redis.hget(JobKeys(stack.job_id).job, "batches") or 0) + 1
            leasing = asyncio.create_task(stack.batch(2, lease_s=0.001))
            await ran_out(stack, f"{stack.job_id}-b{number}")
            on_its_way += not leasing.done()
            batch = await leasing
            assert sorted(group_ids(batch)) == sorted(groups)
    await stack.batches.ack(batch.batch_id)
    assert {await stack.state(group) for group in groups} == {GroupState.ACKED}
