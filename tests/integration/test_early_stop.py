"""Work that can no longer be in time is stopped at the bump, and nothing else is: running groups by their oldest journaled token, and ready
ones that no trainer has had. Cases 052 and 053; any order of events is test_gate_model.py's."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from service.batches import NothingReady
from service.errors import LeaseLostError
from service.journal import Restored
from service.keys import JobKeys
from service.leases import Lease
from service.records import GroupState, JobPatch
from service.store import open_store
from tests.gateway_stack import RunningGateway
from tests.store_stack import Stack, ended, fast_settings, generated, group_ids
from tests.weight_play import scene

pytestmark = pytest.mark.redis


@pytest.fixture
async def stack(fast_valkey_url: str) -> AsyncIterator[Stack]:
    async with open_store(fast_settings(fast_valkey_url)) as store:
        await store.redis.flushall()
        yield Stack(store)


async def sampling(stack: Stack, *, version: int = 0, tokens: int = 3, **fields: object) -> tuple[str, list[Lease]]:
    """A job with one running group: its first member has sampled under `version`, the second nothing yet."""
    await stack.open_job(**fields)
    [group] = await stack.submit(1)
    leases = await stack.take()
    await stack.sample(leases[0], tokens, at_index=0, version=version)
    return group, leases


@pytest.mark.parametrize(
    ("fields", "bump", "state", "reason"),
    [
        pytest.param({"staleness_budget": 1}, 1, GroupState.RUNNING, None, id="at-the-bound"),
        pytest.param({"staleness_budget": 1}, 2, GroupState.QUEUED, "requeued", id="one-past-the-bound"),
        pytest.param({"staleness_budget": 0}, 1, GroupState.QUEUED, "requeued", id="on-policy"),
        pytest.param({"staleness_budget": 0, "max_requeues": 0}, 1, GroupState.DROPPED, "stale", id="requeues-used-up"),
        pytest.param({"staleness_budget": 0, "stale_policy": "drop"}, 1, GroupState.DROPPED, "stale", id="drop"),
        pytest.param({"staleness_budget": 0, "stale_policy": "pace"}, 9, GroupState.RUNNING, None, id="never-under-pace"),
        pytest.param({"staleness_budget": None}, 9, GroupState.RUNNING, None, id="no-gate"),
    ],
)
async def test_a_running_group_is_stopped_once_it_is_too_old(
    stack: Stack, fields: dict[str, object], bump: int, state: GroupState, reason: str | None
) -> None:
    group, leases = await sampling(stack, **fields)
    await stack.bump(bump)
    assert await stack.state(group) is state
    counts = await stack.jobs.counts(stack.job_id)
    assert counts.charged == (state is GroupState.RUNNING)
    assert set(counts.ledger.discarded) == ({reason} if reason else set())
    gone = (await stack.leases.renew(stack.job_id, leases)).cancelled
    assert gone == (set() if state is GroupState.RUNNING else {lease.rollout_id for lease in leases})
    assert (await stack.leases.journal(leases[0].rollout_id) == []) == (state is not GroupState.RUNNING)


async def test_it_runs_again_as_new_attempts_and_its_old_workers_are_refused(stack: Stack) -> None:
    group, old = await sampling(stack, staleness_budget=0)
    await stack.bump(1)
    new = await stack.take()
    assert [(lease.attempt, lease.resumed, lease.policy_version) for lease in new] == [(2, False, 1)] * 2
    with pytest.raises(LeaseLostError):
        await stack.sample(old[0], 1, at_index=1)
    with pytest.raises(LeaseLostError):
        await stack.leases.finish(old[1], ended())
    assert (await stack.leases.renew(stack.job_id, old)).cancelled == {lease.rollout_id for lease in old}  # not another worker's to resume
    await stack.finish_all(new, version=1)
    assert group_ids(await stack.batch(1)) == [group]


async def test_others_are_not_disturbed(stack: Stack) -> None:
    await stack.open_job(staleness_budget=0, groups_per_step=3)
    old, young, unborn = await stack.submit(3)
    leases = {(lease.group_id, lease.index): lease for lease in await stack.take()}
    await stack.sample(leases[old, 0], 1, at_index=0)
    await stack.sample(leases[young, 1], 1, at_index=0, version=1)  # labelled ahead of the bump
    await stack.bump(1)
    assert [await stack.state(group) for group in (old, young, unborn)] == [GroupState.QUEUED, GroupState.RUNNING, GroupState.RUNNING]
    renewed = await stack.leases.renew(stack.job_id, list(leases.values()))
    assert renewed.cancelled == {leases[old, index].rollout_id for index in (0, 1)}
    assert not renewed.lost


async def test_a_failed_attempts_tokens_make_nobody_old(stack: Stack) -> None:
    group, leases = await sampling(stack, staleness_budget=0)
    await stack.leases.restart(leases[0], "sandbox: lost", retry=True)
    await stack.bump(1)
    assert await stack.state(group) is GroupState.RUNNING


async def test_tokens_that_will_not_train_make_nobody_old(stack: Stack) -> None:
    """Those of a turn that is sampled anew at once, and those behind a snapshot at the latest when the member ends."""
    await stack.open_job(staleness_budget=0)
    [group] = await stack.submit(1)
    first, second = await stack.take()
    entries = [
        generated(5, discarded=True),
        generated(5, version=1),
        generated(5, version=0),  # by a generator that had not moved
        Restored(at=1.0, id="s", boot_id="", cut_to=1, seconds=0.0),
    ]
    await stack.leases.append(first, entries, at_index=0)
    await stack.leases.finish(first, ended(version=1, tokens=5, discarded_tokens=10, cut_back_tokens=5))
    await stack.leases.finish(second, ended(version=1))
    await stack.bump(1)
    assert await stack.state(group) is GroupState.READY


async def test_a_ready_group_gives_its_place_back_at_the_bump(stack: Stack) -> None:
    await stack.open_job(staleness_budget=0)
    old, young = await stack.submit(2)
    for lease in await stack.take():
        await stack.leases.finish(lease, ended(version=int(lease.group_id == young)))
    await stack.bump(1)
    assert [await stack.state(group) for group in (old, young)] == [GroupState.QUEUED, GroupState.READY]
    assert await stack.charged() == 1


async def test_what_a_trainer_has_had_is_left_for_its_late_ack(stack: Stack) -> None:
    await stack.open_job(staleness_budget=0)
    [group] = await stack.make_ready(1)
    batch = await stack.batch(1)
    await stack.batches.release(batch.batch_id)
    await stack.bump(1)
    assert await stack.state(group) is GroupState.READY
    await stack.batches.ack(batch.batch_id)
    assert await stack.state(group) is GroupState.ACKED
    assert await stack.charged() == 0


async def test_what_a_trainer_has_had_is_turned_away_when_it_asks_again(stack: Stack) -> None:
    await stack.open_job(staleness_budget=0)
    [group] = await stack.make_ready(1)
    await stack.batches.release((await stack.batch(1)).batch_id)
    await stack.bump(1)
    assert isinstance(await stack.lease(1), NothingReady)
    assert await stack.state(group) is GroupState.QUEUED


@pytest.mark.parametrize("fields", [{"stale_policy": "pace"}, {"staleness_budget": None}, {"staleness_budget": 5}])
async def test_a_rollback_stops_what_the_dead_lineage_has_sampled(stack: Stack, fields: dict[str, object]) -> None:
    group, leases = await sampling(stack, version=3, **fields)
    [ready] = await stack.make_ready(1)
    [untouched] = await stack.submit(1)
    [*_, fresh] = await stack.take()
    await stack.bump(3)
    await stack.bump(2, rollback=True)
    assert [await stack.state(name) for name in (group, ready, untouched)] == [GroupState.QUEUED, GroupState.QUEUED, GroupState.RUNNING]
    assert (await stack.leases.renew(stack.job_id, [*leases, fresh])).cancelled == {lease.rollout_id for lease in leases}
    assert set((await stack.jobs.counts(stack.job_id)).ledger.discarded) == {"rolled_back"}


async def test_a_lower_budget_stops_at_once_what_it_makes_too_old(stack: Stack) -> None:
    group, _ = await sampling(stack, staleness_budget=4)
    await stack.bump(2)
    await stack.jobs.patch(stack.job_id, JobPatch(staleness_budget=2))
    assert await stack.state(group) is GroupState.RUNNING
    await stack.jobs.patch(stack.job_id, JobPatch(staleness_budget=1))
    assert await stack.state(group) is GroupState.QUEUED


async def test_tokens_that_come_late_are_found_with_the_next_renewal(stack: Stack) -> None:
    """A generation that began two versions ago is journaled after the bump."""
    await stack.open_job(staleness_budget=1)
    [group] = await stack.submit(1)
    leases = await stack.take()
    await stack.bump(2)
    await stack.sample(leases[0], 3, at_index=0, version=0)
    assert await stack.state(group) is GroupState.RUNNING
    assert not (await stack.leases.renew(stack.job_id, leases)).cancelled
    assert await stack.state(group) is GroupState.QUEUED
    assert (await stack.leases.renew(stack.job_id, leases)).cancelled == {lease.rollout_id for lease in leases}


async def test_a_weight_update_is_a_bump_too(tiny_gateway: RunningGateway, tmp_path: Path) -> None:
    async with scene(tiny_gateway, tmp_path, staleness_budget=0) as on:
        stack = Stack(tiny_gateway.store)
        stack.job_id = on.trainer.job_id
        [group] = await stack.submit(1)
        await stack.sample((await stack.take())[0], 3, at_index=0)
        await on.trainer.until(await on.trainer.begun(1, from_disk="next"), "done")
        async with asyncio.timeout(30):
            while await stack.state(group) is not GroupState.QUEUED:
                await asyncio.sleep(0.02)


async def test_many_are_stopped_in_several_steps(stack: Stack) -> None:
    """More members than one step works through; no index keeps anything of them."""
    await stack.open_job(staleness_budget=0, groups_per_step=6, group_size=400, max_in_flight_rollouts=10_000, stale_policy="drop")
    await stack.submit(6)
    for lease in await stack.take(2400):
        if lease.index < 3:
            await stack.sample(lease, 1, at_index=0)
    await stack.bump(1)
    counts = await stack.jobs.counts(stack.job_id)
    assert (counts.dropped, counts.in_flight_rollouts, counts.charged, counts.tokens_standing) == ({"stale": 6}, 0, 0, 0)
    assert counts.ledger.discarded["stale"].rollouts == 18
    job = JobKeys(stack.job_id)
    assert await stack.store.redis.exists(job.oldest, job.sampled, job.fences, job.leases, job.pending) == 0
