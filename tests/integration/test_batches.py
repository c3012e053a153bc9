"""The trainer's queue: staleness at the lease, charges, late acks, requeues, and what is left afterwards; case 073."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from service.batches import NothingReady
from service.errors import ConflictError, GoneError, InvalidError, NotFoundError
from service.groups import Groups
from service.records import GroupState
from tests.store_stack import Stack, ended, group_ids, store_at

pytestmark = pytest.mark.redis


@pytest.fixture
async def stack(empty_redis_url: str) -> AsyncIterator[Stack]:
    async with store_at(empty_redis_url) as store:
        yield Stack(store)


async def test_exactly_n_or_nothing(stack: Stack) -> None:
    await stack.open_job()
    assert await stack.lease(1) == NothingReady(drained=True)
    ids = await stack.submit(1)
    assert await stack.lease(1) == NothingReady(drained=False)
    await stack.finish_all(await stack.take())
    assert await stack.lease(2) == NothingReady(drained=True)  # one is ready, and no other will ever be
    assert group_ids(await stack.batch(2, allow_fewer=True)) == ids
    assert await stack.lease(1, allow_fewer=True) == NothingReady(drained=False)  # one is leased
    with pytest.raises(InvalidError, match="lets out 4"):
        await stack.lease(5)


async def test_the_same_request_gets_the_same_batch(stack: Stack) -> None:
    await stack.open_job()
    await stack.make_ready(4)
    first = await stack.batch(2, request_key="k")
    assert await stack.batch(2, request_key="k") == first
    assert await stack.batches.live(stack.job_id) == [first]
    await stack.batches.release(first.batch_id)
    again = await stack.batch(2, request_key="k")
    assert again.batch_id != first.batch_id
    assert group_ids(again) == group_ids(first)
    await stack.batches.ack(again.batch_id)
    with pytest.raises(GoneError):
        await stack.batch(2, request_key="k")


@pytest.mark.parametrize("order", ["ack-then-bump", "bump-then-ack", "together"])
async def test_a_place_is_free_after_ack_and_bump(stack: Stack, order: str) -> None:
    await stack.open_job(staleness_budget=0)
    await stack.make_ready(4)
    batch = await stack.batch(2)
    if order == "ack-then-bump":
        await stack.batches.ack(batch.batch_id)
        assert await stack.take() == []
        await stack.bump(1)
    elif order == "bump-then-ack":
        await stack.bump(1)
        assert await stack.take() == []
        await stack.batches.ack(batch.batch_id)
    else:
        await stack.bump(1, ack=[batch.batch_id])
    assert await stack.charged() == 0
    assert len(await stack.take()) == 4


async def test_a_prefetched_batch_holds_its_place_for_the_version_it_trains(stack: Stack) -> None:
    await stack.open_job()
    await stack.make_ready(2)
    batch = await stack.batch(2, trains_version=1)
    await stack.bump(1, ack=[batch.batch_id])
    assert await stack.charged() == 2
    await stack.bump(2)
    assert await stack.charged() == 0
    with pytest.raises(InvalidError, match="trains_version"):
        await stack.lease(2, trains_version=1)


async def test_oldest_policy_first_and_returned_ones_in_front(stack: Stack) -> None:
    await stack.open_job(staleness_budget=3, group_size=1)
    ids = await stack.submit(4)
    for lease, version in zip(await stack.take(), [3, 1, 2, 1], strict=True):
        await stack.leases.finish(lease, ended(version=version))
    await stack.bump(3)
    first = await stack.batch(2)
    assert group_ids(first) == [ids[1], ids[3]]
    assert [group.staleness for group in first.groups] == [2, 2]
    second = await stack.batch(1)
    await stack.batches.release(second.batch_id)
    await stack.batches.release(second.batch_id)
    assert group_ids(await stack.batch(2)) == [ids[2], ids[0]]


async def test_an_expired_batch_can_be_acked_until_it_is_leased_again(stack: Stack) -> None:
    await stack.open_job()
    await stack.make_ready(4)
    first, second = await stack.batch(2, lease_s=0.3), await stack.batch(2, lease_s=30)
    assert await stack.batches.extend(second.batch_id, 0.3) < second.lease_until - 20
    await asyncio.sleep(0.35)
    third = await stack.batch(2)
    assert group_ids(third) == group_ids(first)
    with pytest.raises(GoneError):
        await stack.batches.ack(first.batch_id)
    with pytest.raises(GoneError):
        await stack.batches.get(first.batch_id)
    with pytest.raises(GoneError):
        await stack.batches.extend(first.batch_id, 10)
    await stack.batches.ack(second.batch_id)
    await stack.batches.ack(second.batch_id)
    with pytest.raises(ConflictError):
        await stack.batches.release(second.batch_id)
    assert (await stack.jobs.counts(stack.job_id)).acked == 2
    with pytest.raises(NotFoundError):
        await stack.batches.ack(f"{stack.job_id}-b77")


@pytest.mark.parametrize(
    ("policy", "max_requeues", "end"),
    [
        pytest.param("requeue", 1, GroupState.QUEUED, id="requeue"),
        pytest.param("requeue", 0, GroupState.DROPPED, id="requeues-used-up"),
        pytest.param("drop", 2, GroupState.DROPPED, id="drop"),
        pytest.param("pace", 2, GroupState.LEASED, id="pace"),
    ],
)
async def test_stale_groups_at_the_lease(stack: Stack, policy: str, max_requeues: int, end: GroupState) -> None:
    await stack.open_job(stale_policy=policy, max_requeues=max_requeues)
    stale, fresh = await stack.submit(2)
    leases = await stack.take()
    for lease in leases:
        await stack.open_journal(lease)
        await stack.leases.finish(lease, ended(version=0 if lease.group_id == stale else 2))
    await stack.bump(2)
    batch = await stack.batch(1)
    assert group_ids(batch) == [stale if policy == "pace" else fresh]
    assert await stack.state(stale) is end
    counts = await stack.jobs.counts(stack.job_id)
    if end is GroupState.DROPPED:
        assert (counts.dropped, counts.tokens_discarded, counts.charged) == ({"stale": 1}, 20, 1)
    if end is GroupState.QUEUED:
        assert (counts.requeued, counts.backlog, counts.charged) == (1, 1, 1)
        assert (await stack.groups.get(stale)).requeues == 1
        again = await stack.take()
        assert [(lease.group_id, lease.attempt, lease.resumed) for lease in again] == [(stale, 2, False)] * 2
        assert await stack.leases.journal(again[0].rollout_id) == []


async def test_zero_variance_is_dropped_when_its_last_member_ends(stack: Stack) -> None:
    await stack.open_job(zero_variance="drop")
    same, differs = await stack.submit(2)
    for lease, reward in zip(await stack.take(), [1.0, 1.0, 1.0, 0.5], strict=True):
        await stack.open_journal(lease)
        await stack.leases.finish(lease, ended(reward=reward))
    assert [await stack.state(group) for group in (same, differs)] == [GroupState.DROPPED, GroupState.READY]
    counts = await stack.jobs.counts(stack.job_id)
    assert (counts.dropped, counts.charged) == ({"zero_variance": 1}, 1)
    assert len([name for name in await stack.job_keys() if name.startswith("t:")]) == 2


async def test_nothing_is_left_of_acked_work(stack: Stack) -> None:
    """case-073: 200 rollouts are acked; after `retain_s` no key, record or index entry of theirs remains."""
    await stack.open_job(group_size=10, groups_per_step=20, staleness_budget=0)
    await stack.submit(20)
    leases = await stack.take(200)
    for lease in leases:
        await stack.open_journal(lease)
    await stack.finish_all(leases)
    batch = await stack.batch(20)
    await stack.bump(1, ack=[batch.batch_id])
    assert not any(name.startswith("t:") for name in await stack.job_keys())
    assert (await stack.groups.get(leases[0].group_id)).state is GroupState.ACKED  # a tombstone
    brief = Groups(stack.store, retain_s=0.01)
    await asyncio.sleep(0.02)
    assert await brief.purge(stack.job_id) == 20 + 1 + 1  # groups, the batch, the request that submitted them
    assert await stack.job_keys() == {"job", "counts", "ledger", "rates", "solve_rates", "solve_order"}
    with pytest.raises(NotFoundError):
        await stack.groups.get(leases[0].group_id)
