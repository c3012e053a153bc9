"""Jobs: names, patches, policy versions, deletion, and what is left in Redis afterwards."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from service import keys
from service.batches import NothingReady
from service.errors import ConflictError, GoneError, InvalidError, LeaseLostError, NotFoundError
from service.records import GroupState, JobPatch
from tests.store_stack import Stack, group_ids, job_spec, store_at

pytestmark = pytest.mark.redis


@pytest.fixture
async def stack(empty_redis_url: str) -> AsyncIterator[Stack]:
    async with store_at(empty_redis_url) as store:
        yield Stack(store)


async def test_one_name_one_job_however_many_ask_at_once(stack: Stack) -> None:
    made = await asyncio.gather(*(stack.jobs.create("red", job_spec()) for _ in range(10)))
    assert len({record.job_id for record, _ in made}) == 1
    assert sum(new for _, new in made) == 1
    assert len(await stack.store.redis.keys("*:job")) == 1
    with pytest.raises(ConflictError, match="another spec"):
        await stack.jobs.create("red", job_spec(group_size=3))
    other, new = await stack.jobs.create("blue", job_spec())
    assert new
    with pytest.raises(NotFoundError):
        await stack.jobs.get(other.job_id, tenant="red")
    assert [job.job_id for job in await stack.jobs.list("blue")] == [other.job_id]
    assert len(await stack.jobs.ids()) == 2


async def test_patch_moves_the_gate(stack: Stack) -> None:
    job_id = await stack.open_job()
    await stack.submit(10)
    assert len(await stack.take()) == 8
    record = await stack.jobs.patch(job_id, JobPatch(staleness_budget=2))
    assert (record.spec.staleness_budget, record.spec.group_size) == (2, 2)
    assert len(await stack.take()) == 4
    await stack.jobs.patch(job_id, JobPatch(staleness_budget=None))
    counts = await stack.jobs.counts(job_id)
    assert counts.capacity is None
    assert len(await stack.take()) == 8
    with pytest.raises(InvalidError, match="max_in_flight_rollouts"):
        await stack.jobs.patch(job_id, JobPatch(max_in_flight_rollouts=1))


async def test_a_gate_that_is_turned_off_forgets_the_places_that_wait_for_a_version(stack: Stack) -> None:
    job_id = await stack.open_job(staleness_budget=0)
    await stack.make_ready(2)
    await stack.batches.ack((await stack.batch(2)).batch_id)
    assert await stack.charged() == 2
    await stack.jobs.patch(job_id, JobPatch(staleness_budget=None))
    assert await stack.charged() == 0
    assert not await stack.store.redis.exists(keys.JobKeys(job_id).all[9])


async def test_policy_is_monotonic(stack: Stack) -> None:
    job_id = await stack.open_job()
    assert (await stack.jobs.set_policy(job_id, 5)).policy_version == 5
    assert (await stack.jobs.set_policy(job_id, 5)).policy_version == 5
    with pytest.raises(ConflictError, match="rollback"):
        await stack.jobs.set_policy(job_id, 4)
    back = await stack.jobs.set_policy(job_id, 3, rollback=True)
    assert (back.policy_version, back.lineage) == (3, 1)


async def test_policy_acks_all_batches_or_changes_nothing(stack: Stack) -> None:
    job_id = await stack.open_job()
    await stack.make_ready(4)
    first, second = await stack.batch(2), await stack.batch(2, lease_s=0.01)
    await asyncio.sleep(0.02)
    again = await stack.batch(2)
    assert group_ids(again) == group_ids(second)
    with pytest.raises(GoneError):
        await stack.jobs.set_policy(job_id, 1, ack=[first.batch_id, second.batch_id])
    assert (await stack.jobs.get(job_id)).policy_version == 0
    with pytest.raises(NotFoundError):
        await stack.jobs.set_policy(job_id, 1, ack=[first.batch_id, f"{job_id}-b99"])
    await stack.jobs.set_policy(job_id, 1, ack=[first.batch_id, again.batch_id])
    counts = await stack.jobs.counts(job_id)
    assert (counts.acked, counts.charged, counts.leased) == (4, 0, 0)


async def test_rollback_ends_live_batches_and_clears_charges(stack: Stack) -> None:
    job_id = await stack.open_job(stale_policy="pace", max_requeues=1)
    ids = await stack.make_ready(4)
    done, live = await stack.batch(2), await stack.batch(2)
    await stack.batches.ack(done.batch_id)
    assert await stack.charged() == 4  # version 0 has not passed
    await stack.bump(0, rollback=True)
    assert await stack.charged() == 0
    with pytest.raises(GoneError):
        await stack.batches.ack(live.batch_id)
    # the dead lineage's tokens are stale even under pace: the tasks run again
    assert await stack.lease(2) == NothingReady(drained=False)
    assert [await stack.state(group) for group in ids] == [GroupState.ACKED] * 2 + [GroupState.QUEUED] * 2
    leases = await stack.take()
    assert [(lease.attempt, lease.lineage) for lease in leases] == [(2, 1)] * 4
    await stack.finish_all(leases, lineage=1)
    assert group_ids(await stack.batch(2)) == ids[2:]
    assert (await stack.jobs.counts(job_id)).requeued == 2


async def test_a_version_bump_waits_for_nothing(stack: Stack) -> None:
    """case-053: with every place taken, bump, read and cancel go through and the cancelled group holds nothing."""
    job_id = await stack.open_job(max_in_flight_rollouts=8, group_size=4)
    ids = await stack.submit(3)
    assert len(await stack.take()) == 8
    async with asyncio.timeout(2):
        await stack.bump(5)
        assert (await stack.jobs.get(job_id)).policy_version == 5
        assert (await stack.groups.cancel(ids[2])).state is GroupState.CANCELLED
    assert (await stack.jobs.counts(job_id)).charged == 2


async def test_delete_frees_everything_and_the_name(stack: Stack) -> None:
    job_id = await stack.open_job()
    await stack.make_ready(1)
    await stack.submit(5)
    leases = await stack.take()
    for lease in leases:
        await stack.open_journal(lease)
    await stack.jobs.delete(job_id)
    await stack.jobs.delete(job_id)
    assert await stack.job_keys() == {"job"}
    assert 0 < await stack.store.redis.ttl(f"rw:{{{job_id}}}:job") <= 60
    assert await stack.jobs.ids() == []
    assert (await stack.jobs.get(job_id)).deleted
    with pytest.raises(LeaseLostError):
        await stack.turn(leases[0], "late", at_index=1)
    assert (await stack.leases.renew(job_id, leases)).cancelled == {lease.rollout_id for lease in leases}
    with pytest.raises(NotFoundError):
        await stack.submit(1)
    again, new = await stack.jobs.create("red", job_spec())
    assert new
    assert again.job_id != job_id


async def test_a_create_that_races_a_delete_brings_nothing_back(stack: Stack) -> None:
    job_id = await stack.open_job()
    await stack.make_ready(1)
    await stack.jobs.delete(job_id)
    await stack.store.redis.hset("rw:names:red", "job", job_id)  # as a create reads it that began before the delete
    again, new = await stack.jobs.create("red", job_spec())
    assert new
    assert await stack.jobs.ids() == [again.job_id]
    assert 0 < await stack.store.redis.ttl(f"rw:{{{job_id}}}:job") <= 60
    assert not await stack.jobs._publish(job_id)
    assert 0 < await stack.store.redis.ttl(f"rw:{{{job_id}}}:job") <= 60


async def test_free_finishes_a_delete_that_crashed(stack: Stack) -> None:
    job_id = await stack.open_job()
    await stack.submit(2)
    for lease in await stack.take():
        await stack.open_journal(lease)
    await stack.store.script("delete_job")(keys.JobKeys(job_id), [60])
    with pytest.raises(NotFoundError):
        await stack.take()
    await stack.jobs.free(job_id)
    assert await stack.job_keys() == {"job"}
    assert await stack.jobs.ids() == []
