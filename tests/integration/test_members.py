"""Members that infrastructure fails: replaced one by one, within the group's retries; then the group fails, or goes on short.

Cases 050 and 051; the rule as a table, and any order of failures against a model of it.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.errors import InvalidError, LeaseLostError
from service.keys import JobKeys
from service.leases import Lease
from service.records import GroupState, JobPatch
from service.store import open_store
from tests.store_stack import Stack, ended, fast_settings, group_ids

pytestmark = pytest.mark.redis

LOST, DESTROYED, STOPPED = "sandbox: lost", "sandbox_destroyed", "worker: stopped"


@pytest.fixture
async def stack(fast_valkey_url: str) -> AsyncIterator[Stack]:
    async with open_store(fast_settings(fast_valkey_url)) as store:
        await store.redis.flushall()
        yield Stack(store)


async def lose(stack: Stack, lease: Lease, *, reason: str = LOST, counts: bool = True) -> str:
    return await stack.leases.restart(lease, reason, retry=True, attempt_counts=counts)


async def lose_until_over(stack: Stack, lease: Lease) -> str:
    """Fail one member's attempts until there is no other; what became of it."""
    while (state := await lose(stack, lease)) == "pending":
        lease = await stack.one()
    return state


async def test_case_050_one_lost_sandbox_costs_one_attempt_of_one_member(stack: Stack) -> None:
    await stack.open_job(group_size=8)
    [group] = await stack.submit(1)
    leases = await stack.take()
    assert await lose(stack, leases[3]) == "pending"
    [again] = await stack.take()
    rest = [lease for lease in leases if lease.index != 3]
    assert not (await stack.leases.renew(stack.job_id, rest)).lost
    await stack.finish_all([*rest, again])
    batch = await stack.batch(1)
    assert [(r.index, r.attempt, r.failures) for r in batch.groups[0].rollouts] == [
        (index, 2 if index == 3 else 1, [LOST] if index == 3 else []) for index in range(8)
    ]
    record = await stack.groups.get(group)
    assert (record.size, record.requested_size, record.failed_attempts) == (8, 8, 1)


async def test_case_051_a_short_group_says_so_and_too_short_a_one_fails(stack: Stack) -> None:
    await stack.open_job(group_size=4, groups_per_step=3, min_group_size=2)
    a, b, c = await stack.submit(3)
    rewards = {a: [1.0, 0.0, None, None], b: [1.0, 1.0, 0.0, 0.0], c: [1.0, None, None, None]}
    for lease in await stack.take():
        reward = rewards[lease.group_id][lease.index]
        if reward is not None:
            await stack.leases.finish(lease, ended(reward=reward))
        elif (lease.group_id, lease.index) != (c, 3):
            assert await lose_until_over(stack, lease) == "left_out"
        else:
            assert await lose_until_over(stack, lease) == "group_failed"
    batch = await stack.batch(2)
    assert [(group.group_id, group.size, group.requested_size) for group in batch.groups] == [(a, 2, 4), (b, 4, 4)]
    assert [[member.index for member in group.rollouts] for group in batch.groups] == [[0, 1], [0, 1, 2, 3]]
    failed = await stack.groups.get(c)
    assert failed.reason is not None
    assert failed.reason.startswith("sandbox: lost; member 3 has used up its attempts (9 failed attempts in the group)")
    assert failed.reason.endswith("fewer than min_group_size 2 would be left")
    short = await stack.groups.get(a)
    assert [(m.state, len(m.failures)) for m in short.members] == [("ended", 0), ("ended", 0), ("failed", 3), ("failed", 3)]
    counts = await stack.jobs.counts(stack.job_id)
    assert (counts.failed, counts.left_out_rollouts, counts.charged) == ({"sandbox": 1}, 4, 2)
    await stack.bump(1, ack=[batch.batch_id])
    assert await stack.charged() == 0
    assert not any(name.startswith("t:") for name in await stack.job_keys())


@pytest.mark.parametrize(
    ("fields", "reasons", "end"),
    [
        pytest.param({}, [LOST] * 6, "pending", id="twice-the-group-size-unless-said"),
        pytest.param({}, [LOST] * 7, "group_failed", id="and-one-more"),
        pytest.param({"group_retries": 0}, [LOST], "group_failed", id="no-retries"),
        pytest.param({"group_retries": 2}, [LOST] * 2, "pending", id="at-the-bound"),
        pytest.param({"group_retries": 2}, [LOST] * 3, "group_failed", id="one-past-the-bound"),
        pytest.param({"group_retries": 0, "min_group_size": 1}, [LOST] * 2, "left_out", id="short"),
        pytest.param({"group_retries": 0, "min_group_size": 1}, [LOST] * 3, "group_failed", id="never-empty"),
        pytest.param({"group_retries": 0, "min_group_size": 3}, [LOST], "group_failed", id="min-is-all-of-them"),
        pytest.param({"group_retries": 1}, [DESTROYED, LOST], "pending", id="the-models-doing-costs-no-retry"),
        pytest.param({"group_retries": 0}, [DESTROYED], "pending", id="nor-does-it-need-one"),
        pytest.param({"group_retries": 0, "min_group_size": 1}, [LOST, STOPPED], "pending", id="what-does-not-count-needs-none"),
    ],
)
async def test_the_groups_retries(stack: Stack, fields: dict[str, int], reasons: list[str], end: str) -> None:
    """The failures go round the three members, so that none of them runs out of its own attempts."""
    patient = Stack(stack.store, max_attempts=10)
    await patient.open_job(group_size=3, **fields)
    [group] = await patient.submit(1)
    held = await patient.take()
    for reason in reasons:
        state = await lose(patient, held.pop(0), reason=reason, counts=reason != STOPPED)
        held += await patient.take()
    assert state == end
    if end == "group_failed":
        record = await patient.groups.get(group)
        assert record.state is GroupState.FAILED
        assert f"retries ({len(reasons)} failed attempts in the group)" in str(record.reason)
        assert (await patient.leases.renew(patient.job_id, held)).cancelled == {lease.rollout_id for lease in held}
        assert await patient.charged() == 0


async def test_a_task_fault_fails_even_a_group_that_may_be_short(stack: Stack) -> None:
    await stack.open_job(min_group_size=1)
    [group] = await stack.submit(1)
    lease = await stack.one()
    assert await stack.leases.restart(lease, "task: setup exited 1", retry=False) == "group_failed"
    assert (await stack.groups.get(group)).reason == "task: setup exited 1"


async def test_a_member_is_left_out_once_and_for_all(stack: Stack) -> None:
    """Its journal goes at once, its lease is nobody's, and the same call again has the same answer."""
    await stack.open_job(group_size=3, min_group_size=1, group_retries=0)
    [group] = await stack.submit(1)
    leases = await stack.take()
    await stack.open_journal(leases[2])
    assert await lose(stack, leases[2]) == "left_out"
    assert await lose(stack, leases[2]) == "left_out"
    assert (await stack.groups.get(group)).size == 2
    assert await stack.leases.journal(leases[2].rollout_id) == []
    with pytest.raises(LeaseLostError):
        await stack.turn(leases[2], "late", at_index=1)
    assert (await stack.leases.renew(stack.job_id, leases)).cancelled == {leases[2].rollout_id}
    assert await stack.leases.live_attempts(stack.job_id) == {lease.rollout_id: 1 for lease in leases[:2]}
    await stack.finish_all(leases[:2])
    assert await stack.state(group) is GroupState.READY


async def test_the_last_member_that_is_left_out_makes_the_group_ready(stack: Stack) -> None:
    """The oldest version is that of the members that are there."""
    await stack.open_job(group_size=2, min_group_size=1, group_retries=0, staleness_budget=2)
    [group] = await stack.submit(1)
    lost, kept = await stack.take()
    await stack.open_journal(kept)
    await stack.leases.finish(kept, ended(version=1))
    assert await lose(stack, lost) == "left_out"
    record = await stack.groups.get(group)
    assert (record.state, record.oldest_version) == (GroupState.READY, 1)
    assert (await stack.groups.cancel(group)).state is GroupState.CANCELLED
    assert not any(name.startswith("t:") for name in await stack.job_keys())


@pytest.mark.parametrize(
    ("rewards", "end"),
    [
        pytest.param([1.0, 1.0], GroupState.DROPPED, id="alike"),
        pytest.param([1.0, 0.0], GroupState.READY, id="different"),
        pytest.param([1.0, None], GroupState.READY, id="left-to-the-trainer"),
        pytest.param([1.0], GroupState.DROPPED, id="one-reward-has-no-variance"),
    ],
)
async def test_zero_variance_is_that_of_the_members_that_are_there(stack: Stack, rewards: list[float | None], end: GroupState) -> None:
    await stack.open_job(group_size=3, min_group_size=1, group_retries=0, zero_variance="drop")
    [group] = await stack.submit(1)
    leases = await stack.take()
    for lease, reward in zip(leases, rewards, strict=False):
        await stack.leases.finish(lease, ended(reward=reward))
    for lease in leases[len(rewards) :]:
        assert await lose(stack, lease) == "left_out"
    assert await stack.state(group) is end
    assert await stack.charged() == (end is GroupState.READY)


async def test_a_stale_short_group_runs_again_whole(stack: Stack) -> None:
    await stack.open_job(group_size=2, min_group_size=1, group_retries=0, staleness_budget=0)
    [group] = await stack.submit(1)
    kept, lost = await stack.take()
    await stack.open_journal(kept)
    await stack.leases.finish(kept, ended())
    await lose(stack, lost)
    await stack.bump(1)
    await stack.lease(1)
    record = await stack.groups.get(group)
    assert (record.state, record.size, record.failed_attempts) == (GroupState.QUEUED, 2, 0)
    await stack.finish_all(await stack.take(), version=1)
    assert [member.attempt for member in (await stack.batch(1)).groups[0].rollouts] == [2, 2]


async def test_a_patch_holds_for_the_next_failure(stack: Stack) -> None:
    job_id = await stack.open_job(group_size=3, group_retries=0)
    await stack.submit(1)
    leases = await stack.take()
    await stack.jobs.patch(job_id, JobPatch(min_group_size=2))
    assert await lose(stack, leases[0]) == "left_out"
    await stack.jobs.patch(job_id, JobPatch(group_retries=5))
    assert await lose(stack, leases[1]) == "pending"
    with pytest.raises(InvalidError, match="min_group_size is above group_size"):
        await stack.jobs.patch(job_id, JobPatch(min_group_size=4))
    await stack.jobs.patch(job_id, JobPatch(min_group_size=None, group_retries=0))
    assert await lose(stack, leases[2]) == "group_failed"


async def test_a_job_from_before_has_the_usual_retries_and_no_short_groups(stack: Stack) -> None:
    await stack.open_job()
    await stack.store.redis.hdel(JobKeys(stack.job_id).job, "group_retries", "min_group_size")
    ids = await stack.submit(1)
    held = await stack.take()
    assert await lose(stack, held[0]) == "pending"
    assert await lose_until_over(stack, await stack.one()) == "group_failed"
    assert await stack.state(ids[0]) is GroupState.FAILED


async def test_the_first_reasons_and_the_last_one_are_kept(stack: Stack) -> None:
    await stack.open_job(group_size=1, group_retries=0)
    [group] = await stack.submit(1)
    for number in range(20):
        await lose(stack, await stack.one(), reason=f"worker: {number}", counts=False)
    await lose(stack, await stack.one())
    failures = (await stack.groups.get(group)).members[0].failures
    assert failures == [*(f"worker: {number}" for number in range(15)), LOST]


@dataclass(slots=True)
class Rule:
    """The rule, told a second time. strikes: by member that still runs."""

    strikes: dict[int, int]
    retries: int
    min_size: int | None
    max_attempts: int
    ended: int = 0
    failed: int = 0

    def after(self, index: int, counts: bool) -> str:
        """What becomes of a member's failure."""
        self.strikes[index] += counts
        self.failed += counts
        if self.strikes[index] < self.max_attempts and not (counts and self.failed > self.retries):
            return "pending"
        del self.strikes[index]
        return "left_out" if self.min_size is not None and self.ended + len(self.strikes) >= self.min_size else "group_failed"


happenings = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["lose", "uncounted", "finish"])), min_size=4, max_size=20)


@given(st.data(), st.integers(1, 4), happenings)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
async def test_any_order_of_failures_follows_the_rule(stack: Stack, data: st.DataObject, size: int, script: list[tuple[int, str]]) -> None:
    retries = data.draw(st.none() | st.integers(0, 4))
    min_size = data.draw(st.integers(1, size) | st.none())
    await stack.store.redis.flushall()
    await stack.open_job(group_size=size, group_retries=retries, min_group_size=min_size)
    [group] = await stack.submit(1)
    held = {lease.index: lease for lease in await stack.take()}
    rule = Rule(dict.fromkeys(held, 0), 2 * size if retries is None else retries, min_size, max_attempts=3)
    for pick, what in script:
        index = sorted(held)[pick % len(held)]
        if what == "finish":
            del rule.strikes[index]
            rule.ended += 1
            await stack.leases.finish(held.pop(index), ended())
        else:
            state = await lose(stack, held.pop(index), counts=what == "lose")
            assert state == rule.after(index, what == "lose")
            held |= {lease.index: lease for lease in await stack.take()}
        record = await stack.groups.get(group)
        if what != "finish" and state == "group_failed":
            assert (record.state, await stack.charged()) == (GroupState.FAILED, 0)
            return
        assert (record.size, record.failed_attempts) == (rule.ended + len(rule.strikes), rule.failed)
        assert (record.state is GroupState.READY) == (not held)
        if not held:
            assert group_ids(await stack.batch(1)) == [group]
            return
