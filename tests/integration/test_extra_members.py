"""`extra_members`: a group starts more than it takes; the first `group_size` that end are taken, the others stopped."""

from collections.abc import AsyncIterator

import pytest

from service.errors import InvalidError, LeaseLostError
from service.ledger import Entry
from service.records import GroupState, JobPatch
from service.store import open_store
from tests.store_stack import Stack, ended, fast_settings

pytestmark = pytest.mark.redis


@pytest.fixture
async def stack(fast_valkey_url: str) -> AsyncIterator[Stack]:
    async with open_store(fast_settings(fast_valkey_url)) as store:
        await store.redis.flushall()
        yield Stack(store, max_attempts=1)


async def test_the_first_that_end_are_taken_and_the_others_stopped(stack: Stack) -> None:
    await stack.open_job(group_size=2, extra_members=2)
    [group] = await stack.submit(1)
    leases = await stack.take(3)  # the last one is not begun by then
    for lease in leases:
        await stack.sample(lease, 5, at_index=0)
    for index in (2, 0):
        await stack.leases.finish(leases[index], ended(tokens=5))
    record = await stack.groups.get(group)
    assert (record.state, record.size, record.requested_size, len(record.members)) == (GroupState.READY, 2, 2, 4)
    assert [(member.state, member.stop_reason) for member in record.members] == [
        ("ended", "answered"),
        ("cancelled", "surplus"),
        ("ended", "answered"),
        ("cancelled", "surplus"),
    ]
    with pytest.raises(LeaseLostError):
        await stack.leases.finish(leases[1], ended())
    assert (await stack.leases.renew(stack.job_id, [leases[1]])).cancelled == {leases[1].rollout_id}  # its sandbox may go
    assert await stack.take() == []
    counts = await stack.jobs.counts(stack.job_id)
    assert (counts.surplus_rollouts, counts.in_flight_rollouts, counts.charged) == (2, 0, 1)
    assert counts.ledger.discarded == {"surplus": Entry(1, 5, {8: 1})}
    assert {name for name in await stack.job_keys() if name.startswith("t:")} == {f"t:{leases[index].rollout_id}" for index in (0, 2)}


async def test_the_trainer_gets_group_size_members_with_their_index_among_all(stack: Stack) -> None:
    await stack.open_job(group_size=2, extra_members=2)
    await stack.submit(1)
    leases = await stack.take()
    for index in (3, 1):
        await stack.leases.finish(leases[index], ended())
    batch = await stack.batch(1)
    [group] = batch.groups
    assert (group.size, group.requested_size, [rollout.index for rollout in group.rollouts]) == (2, 2, [1, 3])
    await stack.bump(1, ack=[batch.batch_id])
    assert not any(name.startswith("t:") for name in await stack.job_keys())
    assert await stack.charged() == 0


async def test_spare_members_stand_in_for_failed_ones(stack: Stack) -> None:
    """Without min_group_size a group fails only once fewer than group_size are left."""
    await stack.open_job(group_size=2, extra_members=1)
    short, whole = await stack.submit(2)
    held = {(lease.group_id, lease.index): lease for lease in await stack.take()}
    assert await stack.leases.restart(held[whole, 1], "sandbox: lost", retry=True) == "left_out"
    for index in (0, 2):
        await stack.leases.finish(held[whole, index], ended())
    assert (await stack.groups.get(whole)).state is GroupState.READY
    assert await stack.leases.restart(held[short, 0], "sandbox: lost", retry=True) == "left_out"
    assert await stack.leases.restart(held[short, 1], "sandbox: lost", retry=True) == "group_failed"
    failed = await stack.groups.get(short)
    assert str(failed.reason).endswith("and fewer than group_size 2 would be left")
    assert (await stack.jobs.counts(stack.job_id)).charged == 1


async def test_with_min_group_size_a_group_that_ran_out_of_spares_goes_on_short(stack: Stack) -> None:
    await stack.open_job(group_size=3, extra_members=1, min_group_size=1)
    [group] = await stack.submit(1)
    leases = await stack.take()
    for lease in leases[:2]:
        assert await stack.leases.restart(lease, "sandbox: lost", retry=True) == "left_out"
    await stack.finish_all(leases[2:])
    record = await stack.groups.get(group)
    assert (record.state, record.size, record.requested_size) == (GroupState.READY, 2, 3)


@pytest.mark.parametrize(
    ("rewards", "state"),
    [
        pytest.param([1.0, 1.0], GroupState.DROPPED, id="the-taken-are-alike"),
        pytest.param([1.0, 0.0], GroupState.READY, id="the-taken-differ"),
    ],
)
async def test_zero_variance_is_that_of_the_taken(stack: Stack, rewards: list[float], state: GroupState) -> None:
    await stack.open_job(group_size=2, extra_members=2, zero_variance="drop")
    [group] = await stack.submit(1)
    leases = await stack.take()
    for lease, reward in zip(leases, rewards, strict=False):
        await stack.leases.finish(lease, ended(reward=reward))
    assert await stack.state(group) is state
    assert {name for name in await stack.job_keys() if name.startswith("t:")} == set()


async def test_a_stale_group_runs_again_with_all_its_members(stack: Stack) -> None:
    await stack.open_job(group_size=1, extra_members=2, staleness_budget=0)
    [group] = await stack.submit(1)
    await stack.leases.finish((await stack.take())[0], ended())
    await stack.bump(1)
    again = await stack.take()
    assert [(lease.index, lease.attempt) for lease in again] == [(0, 2), (1, 2), (2, 2)]
    await stack.leases.finish(again[1], ended(version=1))
    assert await stack.state(group) is GroupState.READY


async def test_in_flight_counts_rollouts_and_the_gate_counts_groups(stack: Stack) -> None:
    await stack.open_job(group_size=1, extra_members=3, groups_per_step=2, max_in_flight_rollouts=7)
    await stack.submit(5)
    assert len(await stack.take()) == 4  # a second group would make 8
    await stack.jobs.patch(stack.job_id, JobPatch(max_in_flight_rollouts=100))
    assert len(await stack.take()) == 12
    counts = await stack.jobs.counts(stack.job_id)
    assert counts.charged == counts.capacity == 4


async def test_cancelling_and_purging_forget_every_member(stack: Stack) -> None:
    await stack.open_job(group_size=1, extra_members=1)
    [group] = await stack.submit(1)
    leases = await stack.take()
    for lease in leases:
        await stack.sample(lease, 1, at_index=0)
    await stack.groups.cancel(group)
    brief = Stack(stack.store, retain_s=-1.0)
    await brief.groups.purge(stack.job_id)
    assert await stack.job_keys() == {"job", "counts", "ledger", "rates"}


async def test_sizes_must_fit_together(stack: Stack) -> None:
    with pytest.raises(ValueError, match="extra_members: with group_size there are more than 1024 members"):
        await stack.open_job(group_size=1000, extra_members=25, max_in_flight_rollouts=2000)
    with pytest.raises(ValueError, match="max_in_flight_rollouts is below group_size and extra_members together"):
        await stack.open_job(group_size=4, extra_members=5, max_in_flight_rollouts=8)
    await stack.open_job(group_size=4, extra_members=4)
    with pytest.raises(InvalidError, match="max_in_flight_rollouts is below group_size and extra_members"):
        await stack.jobs.patch(stack.job_id, JobPatch(max_in_flight_rollouts=7))
