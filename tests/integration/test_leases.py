"""Leases of rollouts: fencing, resuming, attempts, cancelling; case 049, 063, 064."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from service.errors import BusyError, ConflictError, LeaseLostError, NotFoundError
from service.journal import Opened, SandboxOpened
from service.keys import JobKeys
from service.records import GroupState
from tests.store_stack import Stack, ended, store_at, task

pytestmark = pytest.mark.redis


@pytest.fixture
async def stack(empty_redis_url: str) -> AsyncIterator[Stack]:
    async with store_at(empty_redis_url) as store:
        yield Stack(store)


@pytest.fixture
async def brief(empty_redis_url: str) -> AsyncIterator[Stack]:
    """With leases of 0.15 s."""
    async with store_at(empty_redis_url) as store:
        yield Stack(store, lease_s=0.15)


async def test_the_gate_lets_out_whole_groups_up_to_its_places(stack: Stack) -> None:
    await stack.open_job()
    await stack.submit(6)
    assert len(await stack.take(3)) == 3
    counts = await stack.jobs.counts(stack.job_id)
    assert (counts.running, counts.pending_rollouts, counts.leased_rollouts, counts.charged) == (2, 1, 3, 2)
    assert len(await stack.take()) == 5
    assert await stack.take() == []
    counts = await stack.jobs.counts(stack.job_id)
    assert (counts.charged, counts.capacity, counts.backlog, counts.in_flight_rollouts) == (4, 4, 2, 8)


async def test_max_in_flight_counts_members_that_have_not_ended(stack: Stack) -> None:
    await stack.open_job(max_in_flight_rollouts=3)
    await stack.submit(3)
    first, second = await stack.take()
    await stack.leases.finish(first, ended())
    assert len(await stack.take()) == 2  # one still runs, two more fit
    await stack.leases.finish(second, ended())
    assert await stack.take() == []


async def test_without_a_budget_the_ready_queue_is_the_bound(stack: Stack) -> None:
    await stack.open_job(staleness_budget=None, queue_groups=3)
    await stack.submit(10)
    assert len(await stack.take()) == 6
    assert await stack.take() == []


async def test_priority_then_age_and_resumed_before_new(stack: Stack) -> None:
    await stack.open_job(group_size=1, staleness_budget=3)
    submitted = await stack.groups.submit(stack.job_id, [task("low"), task("high", priority=5), task("also-low")])
    names = {group: name for name, group in submitted.groups}
    first = await stack.one()
    assert names[first.group_id] == "high"
    await stack.open_journal(first)
    await stack.leases.release(first)
    taken = await stack.take()
    assert [names[lease.group_id] for lease in taken] == ["high", "low", "also-low"]
    assert [lease.resumed for lease in taken] == [True, False, False]
    assert int(taken[0].fence) > int(first.fence)


async def test_a_full_backlog_is_refused_whole_and_a_retry_gets_its_groups(stack: Stack) -> None:
    await stack.open_job(backlog_limit=3)
    tasks = [task("a"), task("b")]
    first = await stack.groups.submit(stack.job_id, tasks, request_key="k")
    assert await stack.groups.submit(stack.job_id, tasks, request_key="k") == first
    with pytest.raises(BusyError) as caught:
        await stack.groups.submit(stack.job_id, tasks)
    assert caught.value.retry_after_s
    assert [group.task_id for group in await stack.groups.list(stack.job_id)] == ["a", "b"]
    assert (await stack.groups.task(first.groups[1][1])).task_id == "b"


async def test_only_the_current_fence_writes(brief: Stack) -> None:
    """case-063: a worker that was presumed dead wakes up and is refused; its work goes on from the journal."""
    await brief.open_job(group_size=1)
    await brief.submit(1)
    dead = await brief.one()
    await brief.open_journal(dead)
    await asyncio.sleep(0.2)
    [heir] = await brief.take(worker="w2")
    assert heir.resumed
    assert heir.attempt == dead.attempt
    assert int(heir.fence) > int(dead.fence)
    with pytest.raises(LeaseLostError):
        await brief.turn(dead, "late", at_index=1)
    with pytest.raises(LeaseLostError):
        await brief.leases.finish(dead, ended())
    with pytest.raises(LeaseLostError):
        await brief.leases.restart(dead, "late", retry=True)
    await brief.leases.release(dead)
    assert (await brief.leases.renew(brief.job_id, [dead])).lost == {dead.rollout_id}
    await brief.turn(heir, "on", at_index=1)
    assert await brief.leases.finish(heir, ended()) is GroupState.READY


async def test_a_renewed_lease_lasts(brief: Stack) -> None:
    """case-064."""
    await brief.open_job(group_size=1)
    await brief.submit(1)
    lease = await brief.one()
    for _ in range(5):
        await asyncio.sleep(0.06)
        assert not (await brief.leases.renew(brief.job_id, [lease])).lost
        assert await brief.take(worker="w2") == []


async def test_an_append_may_be_repeated_but_never_forks(stack: Stack) -> None:
    await stack.open_job()
    await stack.submit(1)
    lease = await stack.one()
    entries = [Opened(at=1.0, attempt=1, worker="w1"), SandboxOpened(at=2.0, id="sandbox-9", seconds=0.5)]
    await stack.leases.append(lease, entries, at_index=0, durable=True)
    await stack.leases.append(lease, entries, at_index=0)
    assert await stack.leases.journal(lease.rollout_id) == entries
    assert await stack.leases.journal(lease.rollout_id, start=1) == entries[1:]
    with pytest.raises(LeaseLostError, match="not 0 entries"):
        await stack.open_journal(lease)
    with pytest.raises(LeaseLostError, match="not 3 entries"):
        await stack.turn(lease, "gap", at_index=3)
    assert (await stack.groups.rollout(lease.rollout_id)).sandbox_id == "sandbox-9"


async def test_finish_and_restart_may_be_repeated(stack: Stack) -> None:
    await stack.open_job()
    await stack.submit(1)
    first, second = await stack.take()
    assert await stack.leases.finish(first, ended()) is GroupState.RUNNING
    assert await stack.leases.finish(first, ended()) is GroupState.RUNNING
    assert await stack.leases.restart(second, "generator: down", retry=True) == "pending"
    assert await stack.leases.restart(second, "generator: down", retry=True) == "pending"
    [again] = await stack.take()
    assert (again.attempt, again.resumed) == (2, False)
    assert (await stack.groups.rollout(again.rollout_id)).failures == ["generator: down"]


async def test_a_restart_begins_with_an_empty_journal(stack: Stack) -> None:
    await stack.open_job()
    await stack.submit(1)
    lease = await stack.one()
    await stack.open_journal(lease)
    await stack.leases.restart(lease, "sandbox_destroyed: rm -rf", retry=True, attempt_counts=False)
    taken = {one.rollout_id: one for one in await stack.take()}
    again = taken[lease.rollout_id]
    assert (again.attempt, again.sandbox_losses, again.resumed) == (2, 1, False)
    assert await stack.leases.live_attempts(stack.job_id) == {rollout: one.attempt for rollout, one in taken.items()}


async def test_one_bad_task_fails_after_its_attempts_and_gives_its_place_back(stack: Stack) -> None:
    """case-049."""
    await stack.open_job(groups_per_step=1, staleness_budget=0, group_size=2)
    bad, good = await stack.submit(2)
    first, sibling = await stack.take()
    await stack.open_journal(sibling)
    outcomes = [await stack.leases.restart(first, "exec_timeout", retry=True)]
    while outcomes[-1] == "pending":
        [again] = await stack.take()
        outcomes.append(await stack.leases.restart(again, "exec_timeout", retry=True))
    assert outcomes == ["pending", "pending", "group_failed"]
    group = await stack.groups.get(bad)
    told = "exec_timeout: member 0 has used up its attempts (3 failed attempts in the group)"
    assert (group.state, group.reason, group.failed_attempts) == (GroupState.FAILED, told, 3)
    assert [member.state for member in group.members] == ["failed", "cancelled"]
    assert (await stack.leases.renew(stack.job_id, [sibling])).cancelled == {sibling.rollout_id}
    with pytest.raises(LeaseLostError):
        await stack.leases.finish(sibling, ended())
    assert await stack.leases.journal(sibling.rollout_id) == []
    counts = await stack.jobs.counts(stack.job_id)
    assert (counts.failed, counts.charged, counts.in_flight_rollouts) == ({"exec_timeout": 1}, 0, 0)
    assert {lease.group_id for lease in await stack.take()} == {good}


async def test_a_task_fault_is_not_retried(stack: Stack) -> None:
    await stack.open_job()
    await stack.submit(1)
    lease = await stack.one()
    assert await stack.leases.restart(lease, "task_fault: no such image", retry=False) == "group_failed"
    assert (await stack.jobs.counts(stack.job_id)).failed == {"task_fault": 1}


async def test_attempts_that_do_not_count_are_bounded_all_the_same(stack: Stack) -> None:
    await stack.open_job(group_size=1)
    await stack.submit(1)
    for attempt in range(1, 31):
        lease = await stack.one()
        assert lease.attempt == attempt
        outcome = await stack.leases.restart(lease, "worker_stopped", retry=True, attempt_counts=False)
    assert outcome == "group_failed"


@pytest.mark.parametrize("when", ["queued", "running", "ready"])
async def test_cancel_at_any_time_frees_the_place_at_once(stack: Stack, when: str) -> None:
    await stack.open_job()
    [group] = await stack.submit(1)
    leases = await stack.take() if when != "queued" else []
    for lease in leases:
        await stack.open_journal(lease)
    if when == "ready":
        await stack.finish_all(leases)
    rollout = f"{group}-r0"
    record = await stack.groups.cancel_rollout(rollout)
    assert record == await stack.groups.cancel_rollout(rollout)
    assert await stack.state(group) is GroupState.CANCELLED
    counts = await stack.jobs.counts(stack.job_id)
    assert (counts.cancelled, counts.charged, counts.in_flight_rollouts, counts.leased, counts.ready) == (1, 0, 0, 0, 0)
    assert not any(name.startswith("t:") for name in await stack.job_keys())
    with pytest.raises(NotFoundError):
        await stack.groups.rollout(f"{group}-r2")
    with pytest.raises(NotFoundError):
        await stack.groups.task(group)


async def test_what_the_trainer_holds_is_not_cancelled(stack: Stack) -> None:
    await stack.open_job()
    [group] = await stack.make_ready(1)
    batch = await stack.batch(1)
    for cancel in (stack.groups.cancel(group), stack.groups.cancel_rollout(f"{group}-r0")):
        with pytest.raises(ConflictError, match=f"{batch.batch_id}.* release or ack"):
            await cancel
    assert await stack.batches.get(batch.batch_id) == batch
    await stack.batches.release(batch.batch_id)
    assert (await stack.groups.cancel(group)).state is GroupState.CANCELLED
    await stack.batches.ack(batch.batch_id)  # late: what was cancelled since is no obstacle


async def test_a_batch_whose_lease_ran_out_does_not_hold_its_groups(stack: Stack) -> None:
    await stack.open_job()
    [group] = await stack.make_ready(1)
    batch = await stack.batch(1)
    await stack.store.redis.zadd(JobKeys(stack.job_id).batch_leases, {batch.batch_id: 1.0})
    assert (await stack.groups.cancel(group)).state is GroupState.CANCELLED


async def test_list_pages_through_states(stack: Stack) -> None:
    await stack.open_job()
    ids = await stack.make_ready(6)
    listed = await stack.groups.list(stack.job_id, limit=2)
    assert [group.group_id for group in listed] == ids[:2]
    assert [group.group_id for group in await stack.groups.list(stack.job_id, after=ids[1])] == ids[2:]
    assert [group.group_id for group in await stack.groups.list(stack.job_id, state=GroupState.QUEUED)] == ids[4:]


async def test_an_attempt_that_outlives_its_workers_too_often_is_told_apart(brief: Stack) -> None:
    await brief.open_job(group_size=1)
    await brief.submit(1)
    seen = []
    for _ in range(3):
        [lease] = await brief.take()
        seen.append(lease.expiries)
        await asyncio.sleep(0.2)
    [lease] = await brief.take()
    await brief.leases.release(lease)  # handed back: no expiry
    [lease] = await brief.take()
    assert [*seen, lease.expiries] == [0, 1, 2, 3]
    assert await brief.leases.restart(lease, "worker_lost", retry=True) == "pending"
    assert (await brief.one()).expiries == 0
