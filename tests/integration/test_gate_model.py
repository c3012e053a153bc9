"""Any order of what clients, workers, trainers and time can do to one job keeps the promises of the gate and the queues.

The machine plays against the real steps on a real Valkey (without an append-only file: the waits for the disk are not what is tested here).
Time is played by moving the end of a lease into the past.
"""

import asyncio
import random
from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from service.batches import BatchRecord, NothingReady
from service.errors import ConflictError, GoneError, LeaseLostError
from service.groups import GroupRecord
from service.jobs import JobCounts
from service.keys import JobKeys
from service.leases import Lease
from service.ledger import together
from service.records import GroupState
from service.store import open_store
from tests.store_stack import Stack, ended, fast_settings, group_ids

pytestmark = pytest.mark.redis

picks = st.integers(min_value=0, max_value=1000)
OUT = {GroupState.RUNNING, GroupState.READY, GroupState.LEASED}
"""States in which a group holds a place."""


class Gate(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.exit = AsyncExitStack()

    def do(self, call: Any) -> Any:
        return self.runner.run(call)

    @initialize(
        budget=st.sampled_from([0, 0, 1, 2]),
        policy=st.sampled_from(["requeue", "drop", "pace"]),
        zero_variance=st.sampled_from(["keep", "drop"]),
        size=st.sampled_from([1, 2, 3]),
        retries=st.sampled_from([None, 0, 1]),
        short=st.booleans(),
    )
    def start(self, budget: int, policy: str, zero_variance: str, size: int, retries: int | None, short: bool) -> None:
        self.budget, self.policy = budget, policy
        self.retries, self.least = 2 * size if retries is None else retries, 1 if short else size
        self.held: list[Lease] = []
        self.batches: list[BatchRecord] = []
        self.fences: dict[str, int] = {}
        self.ids: list[str] = []
        self.version = self.lineage = 0
        opened = self.do(self.exit.enter_async_context(open_store(fast_settings(self.url))))
        self.do(opened.redis.flushall())
        self.stack = Stack(opened, max_attempts=2)
        fields = {"staleness_budget": budget, "stale_policy": policy, "zero_variance": zero_variance, "max_requeues": 1}
        members = {"group_size": size, "group_retries": retries, "min_group_size": 1 if short else None}
        self.do(self.stack.open_job(**fields, **members))

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.do(self.finish_everything())
        self.do(self.exit.aclose())
        self.runner.close()

    # ---------------------------------------------------------------------------------------------------- clients and workers

    @rule(count=st.integers(min_value=1, max_value=3))
    def submit(self, count: int) -> None:
        self.ids += self.do(self.stack.submit(count))

    @rule(n=st.integers(min_value=1, max_value=6))
    def take(self, n: int) -> None:
        for lease in self.do(self.stack.take(n)):
            assert int(lease.fence) > self.fences.get(lease.rollout_id, 0)
            assert lease.resumed == (len(self.do(self.stack.leases.journal(lease.rollout_id))) > 0)
            self.fences[lease.rollout_id] = int(lease.fence)
            self.held.append(lease)

    def work(self, pick: int, call: Any) -> None:
        """One call on one lease, which may have been lost; a lost one changes nothing."""
        lease = self.held[pick % len(self.held)]
        current = self.fences[lease.rollout_id] == int(lease.fence)
        try:
            self.do(call(lease))
        except LeaseLostError:
            return
        assert current, "an old fence was let through"

    @precondition(lambda self: self.held)
    @rule(pick=picks, reward=st.sampled_from([0.0, 1.0]), age=st.integers(min_value=0, max_value=2), given_up=st.integers(0, 2))
    def finish(self, pick: int, reward: float, age: int, given_up: int) -> None:
        async def one(lease: Lease) -> None:
            journaled = int(await self.stack.store.redis.hget(JobKeys(self.stack.job_id).sampled, lease.rollout_id) or 0)
            tokens = {"tokens": max(0, journaled - given_up), "discarded_tokens": min(journaled, given_up)}
            fields = {"version": max(0, self.version - age), "lineage": self.lineage, "reward": reward}
            await self.stack.leases.finish(lease, ended(**fields, **tokens))

        self.work(pick, one)

    @rule()
    def a_good_worker_runs_all_it_can(self) -> None:
        for number, lease in enumerate(self.do(self.stack.take())):
            self.fences[lease.rollout_id] = int(lease.fence)
            self.do(self.stack.leases.finish(lease, ended(version=self.version, lineage=self.lineage, reward=float(number))))

    @precondition(lambda self: self.held)
    @rule(pick=picks, tokens=st.integers(min_value=0, max_value=5))
    def append(self, pick: int, tokens: int) -> None:
        async def one(lease: Lease) -> None:
            length = len(await self.stack.leases.journal(lease.rollout_id))
            await self.stack.sample(lease, tokens, at_index=length, version=self.version, lineage=self.lineage)

        self.work(pick, one)

    @precondition(lambda self: self.held)
    @rule(pick=picks, retry=st.booleans(), counts=st.booleans())
    def restart(self, pick: int, retry: bool, counts: bool) -> None:
        self.work(pick, lambda lease: self.stack.leases.restart(lease, "sandbox_lost", retry=retry, attempt_counts=counts))

    @precondition(lambda self: self.held)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        self.do(self.stack.leases.release(self.held[pick % len(self.held)]))

    @precondition(lambda self: self.held)
    @rule(pick=picks)
    def worker_dies(self, pick: int) -> None:
        key, rollout = JobKeys(self.stack.job_id).leases, self.held[pick % len(self.held)].rollout_id
        self.do(self.stack.store.redis.zadd(key, {rollout: 1.0}, xx=True))

    @precondition(lambda self: self.ids)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        group = self.ids[pick % len(self.ids)]
        try:
            self.do(self.stack.groups.cancel(group))
        except ConflictError:
            assert self.do(self.stack.groups.get(group)).state is GroupState.LEASED

    # ---------------------------------------------------------------------------------------------------- the trainer

    @rule(n=st.integers(min_value=1, max_value=2), fewer=st.booleans())
    def lease(self, n: int, fewer: bool) -> None:
        found = self.do(self.stack.lease(n, allow_fewer=fewer))
        if isinstance(found, NothingReady):
            return
        assert self.policy == "pace" or max(group.staleness for group in found.groups) <= self.budget
        assert len(found.groups) == n or (fewer and found.groups)
        assert all(len(group.rollouts) == group.size >= self.least for group in found.groups)
        self.batches.append(found)

    @precondition(lambda self: self.batches)
    @rule(pick=picks)
    def trainer_dies(self, pick: int) -> None:
        key, batch = JobKeys(self.stack.job_id).batch_leases, self.batches[pick % len(self.batches)].batch_id
        self.do(self.stack.store.redis.zadd(key, {batch: 1.0}, xx=True))

    @precondition(lambda self: self.batches)
    @rule(pick=picks, bump=st.booleans())
    def ack(self, pick: int, bump: bool) -> None:
        batch = self.batches[pick % len(self.batches)].batch_id
        try:
            self.do(self.stack.bump(self.version + 1, ack=[batch]) if bump else self.stack.batches.ack(batch))
        except GoneError:
            return
        self.version += bump

    @rule()
    def bump(self) -> None:
        self.version += 1
        self.do(self.stack.bump(self.version))

    @rule(back=st.integers(min_value=0, max_value=2))
    def rollback(self, back: int) -> None:
        self.version, self.lineage = max(0, self.version - back), self.lineage + 1
        self.do(self.stack.bump(self.version, rollback=True))

    # ---------------------------------------------------------------------------------------------------- what always holds

    @invariant()
    def each_group_is_in_one_place(self) -> None:
        if hasattr(self, "stack"):
            self.do(self.check())

    async def check(self) -> None:
        stack, job, client = self.stack, JobKeys(self.stack.job_id), self.stack.store.redis
        counts = await stack.jobs.counts(stack.job_id)
        groups = {group.group_id: group for group in await stack.groups.list(stack.job_id, limit=1000)}
        states = [group.state for group in groups.values()]
        assert counts.charged <= 2 * (self.budget + 1) == counts.capacity
        await self.check_books(counts, groups.values())
        assert list(groups) == self.ids

        async def members(key: str) -> set[str]:
            return {name.decode() for name in await client.zrange(key, 0, -1)}

        assert await members(job.backlog) == {name for name, group in groups.items() if group.state is GroupState.QUEUED}
        assert await members(job.ready) == {name for name, group in groups.items() if group.state is GroupState.READY}
        assert (counts.running, counts.leased) == (states.count(GroupState.RUNNING), states.count(GroupState.LEASED))
        assert counts.acked == states.count(GroupState.ACKED)
        ends = sum(counts.dropped.values()), sum(counts.failed.values()), counts.cancelled
        assert ends == tuple(states.count(s) for s in (GroupState.DROPPED, GroupState.FAILED, GroupState.CANCELLED))
        for group in groups.values():
            self.check_members(group)
        charged = {name.decode() for name in await client.smembers(job.charged)}
        spent = await members(job.all[9])
        assert charged == {name for name, group in groups.items() if group.state in OUT} | spent
        assert all(groups[name].state is GroupState.ACKED for name in spent)
        leased, fenced = await members(job.leases), {name.decode() for name in await client.hkeys(job.fences)}
        rollouts = {member.rollout_id: member.state for group in groups.values() for member in group.members}
        assert leased == fenced == {name for name, state in rollouts.items() if state == "leased"}
        assert await members(job.pending) == {name for name, state in rollouts.items() if state == "pending"}
        live = [name for batch in await stack.batches.live(stack.job_id) for name in group_ids(batch)]
        assert sorted(live) == sorted(name for name, group in groups.items() if group.state is GroupState.LEASED)

    async def check_books(self, counts: JobCounts, groups: Iterable[GroupRecord]) -> None:
        """Every sampled token is in one place."""
        journaled = await self.stack.store.redis.hgetall(JobKeys(self.stack.job_id).sampled)
        members = [member for group in groups if group.state in OUT for member in group.members]
        assert {name.decode() for name in journaled} <= {member.rollout_id for member in members if member.state in ("pending", "leased")}
        standing = sum(map(int, journaled.values())) + sum(member.sampled_tokens for member in members if member.state == "ended")
        assert counts.tokens_standing == standing
        discarded = together(counts.ledger.discarded)
        assert (counts.ledger.kept.tokens, discarded.tokens) == (counts.tokens_delivered, counts.tokens_discarded)
        for entry in (counts.ledger.kept, *counts.ledger.discarded.values()):
            assert sum(entry.lengths.values()) == entry.rollouts

    def check_members(self, group: GroupRecord) -> None:
        """No group goes on with too few members, and none costs more attempts than its retries and one for each that is left out."""
        states = [member.state for member in group.members]
        assert group.failed_attempts <= self.retries + group.requested_size
        if group.state is GroupState.FAILED:
            assert "failed" in states
            return
        assert group.size >= self.least
        assert states.count("failed") == group.requested_size - group.size
        if group.state in (GroupState.READY, GroupState.LEASED, GroupState.ACKED):
            assert states.count("ended") == group.size

    async def finish_everything(self) -> None:
        """No deadlock: a plain worker and a plain trainer always come to the end of whatever was left behind."""
        stack, job = self.stack, JobKeys(self.stack.job_id)
        for queue in (job.leases, job.batch_leases):
            for name in await stack.store.redis.zrange(queue, 0, -1):
                await stack.store.redis.zadd(queue, {name: 1.0})
        for _ in range(10 * len(self.ids) + 10):
            for number, lease in enumerate(await stack.take()):
                await stack.leases.finish(lease, ended(version=self.version, lineage=self.lineage, reward=float(number)))
            found = await stack.lease(2, allow_fewer=True)
            if isinstance(found, BatchRecord):
                self.version += 1
                await stack.bump(self.version, ack=[found.batch_id])
            elif found.drained:
                return
            else:
                self.version += 1
                await stack.bump(self.version)
        raise AssertionError(f"stuck: {await stack.jobs.counts(stack.job_id)}")


def test_the_gate_keeps_its_promises(fast_valkey_url: str) -> None:
    Gate.url = fast_valkey_url
    checks = list(HealthCheck)
    run_state_machine_as_test(Gate, settings=settings(max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=checks))


@pytest.mark.parametrize("budget", [0, 1, 3])
async def test_the_trainer_always_gets_its_batch(fast_valkey_url: str, budget: int) -> None:
    """case-054: failing, cancelled and lost work gives its place back; 15 steps of one trainer and one clumsy worker."""
    rng = random.Random(7)
    async with open_store(fast_settings(fast_valkey_url)) as store:
        await store.redis.flushall()
        stack = Stack(store, max_attempts=1)
        job_id = await stack.open_job(groups_per_step=4, staleness_budget=budget, backlog_limit=1000)
        await stack.submit(400)
        for step in range(15):
            for _ in range(100):
                for lease in await stack.take():
                    if (await stack.leases.renew(job_id, [lease])).cancelled:
                        continue
                    if rng.random() < 0.3:
                        await stack.leases.restart(lease, "sandbox_lost", retry=True, attempt_counts=rng.random() < 0.3)
                    elif rng.random() < 0.05:
                        await stack.groups.cancel(lease.group_id)
                    else:
                        await stack.leases.finish(lease, ended(version=step))
                counts = await stack.jobs.counts(job_id)
                assert counts.charged <= 4 * (budget + 1)
                found = await stack.lease(4)
                if not isinstance(found, NothingReady):
                    break
            assert not isinstance(found, NothingReady)
            assert max(group.staleness for group in found.groups) <= budget
            await stack.bump(step + 1, ack=[found.batch_id])
        assert (await stack.jobs.counts(job_id)).acked == 60
