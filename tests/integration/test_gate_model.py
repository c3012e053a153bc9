"""Any order of what clients, workers, trainers and time can do to one job keeps the promises of the gate and the queues.

The machine plays against the real steps on a real Valkey (without an append-only file: the waits for the disk are not what is tested here).
Time is played by moving the end of a lease into the past.
"""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from service import keys
from service.batches import BatchRecord, NothingReady
from service.errors import ConflictError, GoneError, InvalidError, LeaseLostError
from service.groups import GroupRecord
from service.jobs import JobCounts
from service.keys import JobKeys
from service.leases import Lease
from service.ledger import together
from service.records import GroupState, JobPatch
from service.store import open_store
from tests.gate_model import OUT, GateModel
from tests.store_stack import Stack, ended, fast_settings, group_ids

pytestmark = pytest.mark.redis

picks = st.integers(min_value=0, max_value=1000)
ages = st.integers(min_value=0, max_value=2)
budgets = st.sampled_from([0, 0, 1, 2, None])
policies = st.sampled_from(["requeue", "drop", "pace"])
filters = st.sampled_from(["keep", "drop"])


class Gate(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.exit = AsyncExitStack()

    def do(self, call: Any) -> Any:
        return self.runner.run(call)

    @initialize(
        budget=budgets,
        policy=policies,
        zero_variance=filters,
        size=st.sampled_from([1, 2, 3]),
        extra=st.sampled_from([0, 0, 1, 2]),
        retries=st.sampled_from([None, 0, 1]),
        short=st.booleans(),
    )
    def start(self, budget: int | None, policy: str, zero_variance: str, size: int, extra: int, retries: int | None, short: bool) -> None:
        self.model = GateModel(budget=budget, policy=policy)
        self.retries, self.least, self.size, self.extra = 2 * size if retries is None else retries, 1 if short else size, size, extra
        self.held: list[Lease] = []
        self.batches: list[tuple[BatchRecord, int]] = []
        """With the version that must have passed before their places are free."""
        self.fences: dict[str, int] = {}
        self.ids: list[str] = []
        opened = self.do(self.exit.enter_async_context(open_store(fast_settings(self.url))))
        self.do(opened.redis.flushall())
        self.stack = Stack(opened, max_attempts=2)
        fields = {"staleness_budget": budget, "stale_policy": policy, "zero_variance": zero_variance, "max_requeues": 1}
        members = {"group_size": size, "extra_members": extra, "group_retries": retries, "min_group_size": 1 if short else None}
        self.do(self.stack.open_job(**fields, **members))
        self.submit(3)

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.do(self.finish_everything())
        self.do(self.exit.aclose())
        self.runner.close()

    # ---------------------------------------------------------------------------------------------------- clients and workers

    @rule(count=st.integers(min_value=1, max_value=3))
    def submit(self, count: int) -> None:
        self.ids += self.do(self.stack.submit(count))

    @rule(n=st.integers(min_value=1, max_value=6), tokens=st.integers(0, 3), age=ages)
    def take(self, n: int, tokens: int, age: int) -> None:
        """And sample, where that is said."""
        for lease in self.do(self.stack.take(n)):
            assert int(lease.fence) > self.fences.get(lease.rollout_id, 0)
            assert lease.resumed == (len(self.do(self.stack.leases.journal(lease.rollout_id))) > 0)
            self.fences[lease.rollout_id] = int(lease.fence)
            self.held.append(lease)
            if tokens:
                self.do(self.sample(lease, tokens, age))

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
    @rule(pick=picks, reward=st.sampled_from([0.0, 1.0]), age=ages, given_up=st.integers(0, 2))
    def finish(self, pick: int, reward: float, age: int, given_up: int) -> None:
        async def one(lease: Lease) -> None:
            journaled = int(await self.stack.store.redis.hget(JobKeys(self.stack.job_id).sampled, lease.rollout_id) or 0)
            tokens = {"tokens": max(0, journaled - given_up), "discarded_tokens": min(journaled, given_up)}
            fields = {"version": max(0, self.model.version - age), "lineage": self.model.lineage, "reward": reward}
            await self.stack.leases.finish(lease, ended(**fields, **tokens))
            self.model.sampled(lease, max(0, self.model.version - age), exactly=True)

        self.work(pick, one)

    @rule(age=ages)
    def a_good_worker_runs_all_it_can(self, age: int) -> None:
        for number, lease in enumerate(self.do(self.stack.take())):
            self.fences[lease.rollout_id] = int(lease.fence)
            self.do(self.finish_well(lease, number, age=age))

    async def finish_well(self, lease: Lease, number: int, *, age: int = 0) -> None:
        """Unless its group has enough without it."""
        version = max(0, self.model.version - age)
        try:
            await self.stack.leases.finish(lease, ended(version=version, lineage=self.model.lineage, reward=float(number)))
        except LeaseLostError:
            assert self.extra
        else:
            self.model.sampled(lease, version, exactly=True)

    @precondition(lambda self: self.held)
    @rule(pick=picks, tokens=st.integers(min_value=0, max_value=5), age=ages)
    def append(self, pick: int, tokens: int, age: int) -> None:
        self.work(pick, lambda lease: self.sample(lease, tokens, age))

    async def sample(self, lease: Lease, tokens: int, age: int) -> None:
        length, version = len(await self.stack.leases.journal(lease.rollout_id)), max(0, self.model.version - age)
        await self.stack.sample(lease, tokens, at_index=length, version=version, lineage=self.model.lineage)
        if tokens:
            self.model.sampled(lease, version)

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

    @rule(n=st.sampled_from([1, 1, 2, 3]), fewer=st.booleans(), ahead=st.integers(min_value=-1, max_value=2))
    def lease(self, n: int, fewer: bool, ahead: int) -> None:
        trains = None if ahead < 0 else self.model.version + ahead
        try:
            found = self.do(self.stack.lease(n, allow_fewer=fewer, trains_version=trains))
        except InvalidError:
            assert self.model.capacity is not None
            assert n > self.model.capacity
            return
        assert self.model.capacity is None or n <= self.model.capacity
        if isinstance(found, NothingReady):
            return
        assert len(found.groups) == n or (fewer and found.groups)
        assert all(len(group.rollouts) == group.size >= self.least for group in found.groups)
        runs = [self.do(self.stack.groups.get(group)).requeues for group in group_ids(found)]
        self.batches.append((found, self.model.leased(found, runs, trains)))

    @rule(ahead=st.integers(min_value=-1, max_value=1), step=st.integers(min_value=0, max_value=1))
    def a_good_trainer_takes_and_acks(self, ahead: int, step: int) -> None:
        before = len(self.batches)
        self.lease(1, False, ahead)
        if len(self.batches) > before:
            self.ack(before, step)

    @precondition(lambda self: self.batches)
    @rule(pick=picks)
    def trainer_dies(self, pick: int) -> None:
        key, batch = JobKeys(self.stack.job_id).batch_leases, self.batches[pick % len(self.batches)][0].batch_id
        self.do(self.stack.store.redis.zadd(key, {batch: 1.0}, xx=True))

    @precondition(lambda self: self.batches)
    @rule(pick=picks)
    def release_batch(self, pick: int) -> None:
        try:
            self.do(self.stack.batches.release(self.batches[pick % len(self.batches)][0].batch_id))
        except ConflictError:
            pass  # it was acked

    @precondition(lambda self: self.batches)
    @rule(pick=picks, step=st.integers(min_value=0, max_value=2))
    def ack(self, pick: int, step: int) -> None:
        """Alone, or together with a later version."""
        batch, until = self.batches[pick % len(self.batches)]
        try:
            if step:
                self.publish(self.model.version + step, ack=[batch.batch_id])
            else:
                self.do(self.stack.batches.ack(batch.batch_id))
        except GoneError:
            return
        ends = [group for group in group_ids(batch) if self.do(self.stack.groups.get(group)).state is GroupState.ACKED]
        self.model.acked(ends, until)

    @rule(step=st.sampled_from([0, 1, 1, 1, 2, 3]))
    def bump(self, step: int) -> None:
        """A trainer may skip versions, and say the same one twice."""
        self.publish(self.model.version + step)

    @precondition(lambda self: self.model.version > 0)
    @rule()
    def a_lower_version_is_refused(self) -> None:
        with pytest.raises(ConflictError):
            self.do(self.stack.bump(self.model.version - 1))

    @rule(back=st.integers(min_value=0, max_value=2))
    def rollback(self, back: int) -> None:
        self.publish(max(0, self.model.version - back), rollback=True)

    def publish(self, version: int, *, ack: Sequence[str] = (), rollback: bool = False) -> None:
        model, old = self.model, (self.model.version, self.model.lineage)
        model.version, model.lineage = version, model.lineage + rollback
        try:
            self.do(self.stops(self.stack.bump(version, ack=ack, rollback=rollback)))
        except GoneError:
            model.version, model.lineage = old
            raise
        if rollback:
            model.free_all()

    @rule(budget=budgets, policy=policies, zero_variance=filters, per_step=st.integers(1, 3), steps=st.integers(1, 2))
    def patch(self, budget: int | None, policy: str, zero_variance: str, per_step: int, steps: int) -> None:
        model = self.model
        model.budget, model.policy, model.per_step, model.steps = budget, policy, per_step, steps
        gate = {"staleness_budget": budget, "groups_per_step": per_step, "steps_per_version": steps}
        changed = JobPatch(**gate, stale_policy=policy, zero_variance=zero_variance)
        self.do(self.stops(self.stack.jobs.patch(self.stack.job_id, changed)))
        if budget is None:
            model.free_all()
        model.most = max(self.do(self.stack.charged()), model.capacity or 0)

    @precondition(lambda self: self.held)
    @rule()
    def renew(self) -> None:
        """Finds what sampled old tokens since the last version came."""
        self.do(self.stops(self.stack.leases.renew(self.stack.job_id, self.held)))

    async def stops(self, change: Awaitable[Any]) -> None:
        """Make this change: it stops the groups that can no longer be in time, and no other."""
        before = await self.stack.groups.list(self.stack.job_id, limit=1000)
        await change
        for group in before:
            after = await self.stack.groups.get(group.group_id)
            dropped = after.state is GroupState.DROPPED and group.state is not GroupState.DROPPED
            assert (after.requeues > group.requeues or dropped) == self.model.too_late(group, after.state), (group, after)

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
        assert counts.capacity == self.model.capacity
        assert self.model.within(counts.charged), "over capacity"
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
        assert charged == self.model.holds(groups.values())
        assert await members(job.all[9]) == self.model.waiting()
        aged = {keys.group_of(name) if "-r" in name else name for name in await members(job.oldest)}
        assert aged <= {name for name, group in groups.items() if group.state in (GroupState.RUNNING, GroupState.READY)}
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
        assert len(states) == self.size + self.extra
        assert group.failed_attempts <= self.retries + len(states)
        if group.state is GroupState.FAILED:
            assert "failed" in states
        elif group.state in (GroupState.READY, GroupState.LEASED, GroupState.ACKED):
            assert self.least <= group.size == states.count("ended") <= group.requested_size
        elif group.state in (GroupState.QUEUED, GroupState.RUNNING):
            assert group.size == len(states) - states.count("failed") >= self.least

    async def finish_everything(self) -> None:
        """No deadlock, whatever was left behind: a trainer that asks for exactly groups_per_step, and publishes a version only after its
        batches, always gets them; and where nothing more is submitted, one that takes fewer comes to the end."""
        stack, job = self.stack, JobKeys(self.stack.job_id)
        for queue in (job.leases, job.batch_leases):
            for name in await stack.store.redis.zrange(queue, 0, -1):
                await stack.store.redis.zadd(queue, {name: 1.0})
        waited = [*self.model.until.values(), *(until for _, until in self.batches)]
        self.model.version = max([self.model.version, *waited]) + 1  # what was acked is trained on
        await stack.bump(self.model.version)
        for _ in range(2):
            acks = [await self.next_batch() for _ in range(self.model.steps)]
            self.model.version += 1
            await stack.bump(self.model.version, ack=acks)
        for _ in range(10 * len(self.ids) + 10):
            await self.work_off()
            found = await stack.lease(min(2, self.model.capacity or 2), allow_fewer=True)
            if isinstance(found, BatchRecord):
                self.model.version += 1
                await stack.bump(self.model.version, ack=[found.batch_id])
            elif found.drained:
                return
            else:
                self.model.version += 1
                await stack.bump(self.model.version)
        raise AssertionError(f"stuck: {await stack.jobs.counts(stack.job_id)}")

    async def work_off(self) -> None:
        for number, lease in enumerate(await self.stack.take()):
            await self.finish_well(lease, number)

    async def next_batch(self) -> str:
        """The next full one, with workers that work and a client that always has more."""
        for _ in range(10):
            self.ids += await self.stack.submit(self.model.per_step)
            await self.work_off()
            found = await self.stack.lease(self.model.per_step)
            if isinstance(found, BatchRecord):
                return found.batch_id
        raise AssertionError(f"deadlock: {await self.stack.jobs.counts(self.stack.job_id)}")


@pytest.mark.timeout(240)
def test_the_gate_keeps_its_promises(fast_valkey_url: str) -> None:
    Gate.url = fast_valkey_url
    checks = list(HealthCheck)
    run_state_machine_as_test(Gate, settings=settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=checks))
