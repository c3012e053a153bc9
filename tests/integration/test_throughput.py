"""Rates, waits, staleness and refusals as the store measures them; over HTTP and for Prometheus."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from service.batches import NothingReady
from service.keys import JobKeys
from service.rates import Rates
from service.throughput import MAX_WINDOW_S, SLOT_S, Figures, Limit
from service.trainer.gateway import open_gateway
from service.trainer.loop import Progress, Trainer
from service.trainer.options import Pace, TrainerOptions
from tests.gateway_play import finish, job_body, task_body, turns
from tests.gateway_stack import KEYS, OPERATOR_KEY, RunningGateway
from tests.standin_stack import standin
from tests.store_stack import Stack, store_at

pytestmark = pytest.mark.redis

SPENT = {"sandbox": 1.0, "generate": 6.0, "tool": 2.0, "verify": 1.0}


@pytest.fixture
async def stack(empty_redis_url: str) -> AsyncIterator[Stack]:
    async with store_at(empty_redis_url) as store:
        yield Stack(store)


async def measured(stack: Stack, window_s: float = 600.0) -> Figures:
    record, counts = await stack.jobs.get(stack.job_id), await stack.jobs.counts(stack.job_id)
    return (await Rates(stack.store).throughput(record, counts, window_s=window_s)).figures


@dataclass(slots=True)
class Watch:
    """How long something took at least and at most, seen from here: from inside and from outside of the two calls around it."""

    before: float = 0.0
    after: float = 0.0

    def bounds(self, end: "Watch") -> tuple[float, float]:
        return end.before - self.after, end.after - self.before


class Clocked(Stack):
    """Each lease call and ack with the time around it."""

    async def asked(self, groups: int, **fields: Any) -> Watch:
        watch = Watch(before=time.monotonic())
        await self.lease(groups, **fields)
        watch.after = time.monotonic()
        return watch

    async def acked(self, batch_id: str) -> Watch:
        watch = Watch(before=time.monotonic())
        await self.batches.ack(batch_id)
        watch.after = time.monotonic()
        return watch


@pytest.fixture
async def clocked(empty_redis_url: str) -> AsyncIterator[Clocked]:
    async with store_at(empty_redis_url) as store:
        yield Clocked(store)


async def live_batch(stack: Stack) -> str:
    return (await stack.batches.live(stack.job_id))[-1].batch_id


# ------------------------------------------------------------------------------------------------------------------ the trainer


async def test_a_step_is_a_wait_and_a_computation(clocked: Clocked) -> None:
    """From the first call that got nothing to the one that got a batch, the pause between them included; then to the ack."""
    await clocked.open_job()
    await clocked.submit(2)
    first = await clocked.asked(2)
    await asyncio.sleep(0.2)
    await clocked.finish_all(await clocked.take())
    got = await clocked.asked(2)
    await asyncio.sleep(0.3)
    done = await clocked.acked(await live_batch(clocked))
    found = await measured(clocked)
    assert found.wait_fraction is not None
    assert found.consumption_samples_per_s is not None
    assert found.consumed_samples_per_s is not None
    computed_s, step_s = 4 / found.consumption_samples_per_s, 4 / found.consumed_samples_per_s
    (least_wait, most_wait), (least_compute, most_compute) = first.bounds(got), got.bounds(done)
    assert least_compute <= computed_s <= most_compute
    assert least_wait <= step_s - computed_s <= most_wait
    assert found.wait_fraction == pytest.approx(1 - computed_s / step_s)
    assert found.rho == pytest.approx(found.accepted_samples_per_s / found.consumption_samples_per_s)


async def test_from_an_ack_to_the_next_call_is_computation_too(clocked: Clocked) -> None:
    await clocked.open_job(staleness_budget=3)
    await clocked.make_ready(4)
    await clocked.asked(2)
    first = await clocked.acked(await live_batch(clocked))
    await asyncio.sleep(0.2)
    await clocked.asked(2)
    second = await clocked.acked(await live_batch(clocked))
    found = await measured(clocked)
    assert found.consumption_samples_per_s is not None
    assert 8 / found.consumption_samples_per_s >= first.bounds(second)[0] >= 0.2
    assert found.wait_fraction is not None
    assert found.wait_fraction < 0.01


async def test_a_trainer_that_prefetches_does_not_wait(stack: Stack) -> None:
    """It asks for the next batch while it holds one: it waits only from the ack of the last one it has."""
    await stack.open_job(staleness_budget=3)
    await stack.make_ready(2)
    held = await stack.batch(2)
    for _ in range(3):
        assert isinstance(await stack.lease(2), NothingReady)
        await asyncio.sleep(0.05)
    assert (await measured(stack)).wait_fraction == 0.0
    await stack.batches.ack(held.batch_id)
    await stack.submit(2)
    await stack.lease(2)
    await asyncio.sleep(0.05)
    await stack.lease(2)
    after = await measured(stack)
    assert after.wait_fraction is not None
    assert 0 < after.wait_fraction < 1


async def test_nothing_to_come_is_no_wait(stack: Stack) -> None:
    await stack.open_job()
    assert await stack.lease(1) == NothingReady(drained=True)
    await asyncio.sleep(0.05)
    assert await stack.lease(1) == NothingReady(drained=True)
    assert (await measured(stack)).wait_fraction is None


@pytest.mark.parametrize("end", ["handed back", "ran out", "rolled back"])
async def test_a_step_without_an_ack_is_nobodys(stack: Stack, end: str) -> None:
    await stack.open_job(staleness_budget=3)
    await stack.make_ready(2)
    batch = await stack.batch(2, lease_s=30.0 if end != "ran out" else 0.01)
    await asyncio.sleep(0.05)
    match end:
        case "handed back":
            await stack.batches.release(batch.batch_id)
        case "ran out":
            await stack.batches.live(stack.job_id)
            await stack.groups.purge(stack.job_id)
        case _:
            await stack.bump(0, rollback=True)
    found = await measured(stack)
    assert (found.wait_fraction, found.consumption_samples_per_s) == (None, None)


async def test_the_same_batch_asked_for_again_is_no_new_wait(stack: Stack) -> None:
    await stack.open_job()
    await stack.make_ready(2)
    await stack.batch(2, request_key="k")
    await stack.batch(2, request_key="k")
    found = await measured(stack)
    assert found.wait_fraction == 0.0
    assert found.staleness.max == 0


# ------------------------------------------------------------------------------------------------------------ rollouts and groups


async def test_what_is_made_and_where_its_time_goes(stack: Stack) -> None:
    await stack.open_job()
    await stack.submit(2)
    leases = await stack.take()
    for lease, generate_s in zip(leases, [6.0, 2.0, 6.0, 2.0], strict=True):
        await stack.finish_all([lease], seconds=SPENT | {"generate": generate_s}, reward=float(lease.index))
    found = await measured(stack)
    assert found.generated_samples_per_s == found.accepted_samples_per_s == pytest.approx(4 / max(1.0, found.window_s), rel=0.1)
    assert found.tail_multiplier == pytest.approx(10 / 8)
    assert (found.time_s.sandbox, found.time_s.generate, found.time_s.tool, found.time_s.verify) == (1.0, 4.0, 2.0, 1.0)
    assert found.time_s.queue == 0.0  # less than it was worked on has passed
    assert found.mean_latency_s is not None
    assert 0 < found.mean_latency_s < 20
    assert (found.queue_groups, found.capacity_groups, found.acceptance, found.zero_variance_share) == (2, 4, 1.0, 0.0)


@pytest.mark.parametrize("policy", ["keep", "drop"])
async def test_groups_of_one_reward_are_counted_whatever_becomes_of_them(stack: Stack, policy: str) -> None:
    await stack.open_job(zero_variance=policy)
    await stack.submit(3)
    for lease in await stack.take():
        varied = lease.group_id.endswith("-g3")
        await stack.finish_all([lease], reward=float(lease.index) if varied else 1.0)
    found = await measured(stack)
    assert found.zero_variance_share == pytest.approx(2 / 3)
    assert found.acceptance == (1.0 if policy == "keep" else pytest.approx(1 / 3))


async def test_what_is_left_to_the_trainer_may_vary(stack: Stack) -> None:
    await stack.open_job()
    await stack.make_ready(1, reward=None)
    assert (await measured(stack)).zero_variance_share == 0.0


async def test_staleness_before_the_queue_and_in_it(stack: Stack) -> None:
    """Two groups begin under 0; one is ready under 1, and both are leased under 3."""
    await stack.open_job(staleness_budget=4)
    await stack.submit(2)
    leases = await stack.take()
    await stack.finish_all(leases[:2])
    await stack.bump(1)
    await stack.finish_all(leases[2:])
    await stack.bump(3)
    await stack.batch(2)
    found = (await measured(stack)).staleness
    assert (found.mean, found.p50, found.p95, found.max) == (3.0, 3, 3, 3)
    assert (found.pre_queue_mean, found.in_queue_mean) == (0.5, 2.5)


async def test_what_the_trainer_never_gets_is_not_accepted(stack: Stack) -> None:
    await stack.open_job(staleness_budget=1)
    await stack.make_ready(2)
    assert (await measured(stack)).acceptance == 1.0
    await stack.bump(2)
    assert isinstance(await stack.lease(2), NothingReady)  # both are run again
    found = await measured(stack)
    assert (found.acceptance, found.accepted_samples_per_s) == (0.0, 0.0)
    assert found.generated_samples_per_s > 0


async def test_what_holds_groups_back(stack: Stack) -> None:
    await stack.open_job(staleness_budget=0)  # two places
    await stack.submit(4)
    await stack.take(2)  # one group, nothing held back
    assert ((await measured(stack)).gated_share, (await measured(stack)).capped_share) == (0.0, 0.0)
    await stack.take()
    assert (await measured(stack)).gated_share == 0.5
    await stack.open_job(name="capped", max_in_flight_rollouts=2)
    await stack.submit(2)
    await stack.take()
    found = await measured(stack)
    assert (found.gated_share, found.capped_share) == (0.0, 1.0)


# ---------------------------------------------------------------------------------------------------------------------- bounds


async def test_what_is_kept_is_bounded_and_goes_with_the_job(stack: Stack) -> None:
    """A slot of an hour ago is begun anew, and is not read as one of now."""
    await stack.open_job()
    rates = JobKeys(stack.job_id).rates
    slots = MAX_WINDOW_S // SLOT_S
    old = int(time.time() // SLOT_S) - slots
    for number in range(old, old + slots):  # a full ring, of which all but the oldest few is inside the window
        await stack.store.redis.hset(rates, str(number % slots), msgspec.msgpack.encode({"at": number - slots, "generated": 1e9}))
    await stack.make_ready(2)
    await stack.batch(2)
    assert await stack.store.redis.hlen(rates) <= slots + 1
    assert 0 < await stack.store.redis.ttl(rates) <= MAX_WINDOW_S
    assert (await measured(stack, MAX_WINDOW_S)).generated_samples_per_s <= 4
    await stack.jobs.delete(stack.job_id)
    assert not await stack.store.redis.exists(rates)


async def test_staleness_of_any_size_takes_few_fields(stack: Stack) -> None:
    """400 values of one batch in one slot: up to 63 as they are, then 32 for each doubling."""
    await stack.open_job(staleness_budget=10_000, stale_policy="pace", group_size=1, max_in_flight_rollouts=1000)
    await stack.submit(400)
    for number, lease in enumerate(await stack.take(400)):
        await stack.finish_all([lease], version=20 * number)
    await stack.bump(8_000)
    await stack.batch(400)
    slots = [msgspec.msgpack.decode(raw) for raw in await stack.store.redis.hvals(JobKeys(stack.job_id).rates)]
    assert len([name for slot in slots for name in slot if name.startswith("staleness:")]) <= 64 + 32 * 7
    found = (await measured(stack)).staleness
    assert found.max is not None
    assert 8_000 * 31 / 32 <= found.max <= 8_000
    assert found.mean == 4_010.0


# ------------------------------------------------------------------------------------------------------------------------ HTTP

NAMES = {
    *"window_s generated_samples_per_s accepted_samples_per_s consumed_samples_per_s consumption_samples_per_s rho".split(),
    *"wait_fraction in_flight_rollouts queue_groups capacity_groups staleness time_s acceptance zero_variance_share".split(),
    *"tail_multiplier mean_latency_s bottleneck limited_by gated_share capped_share".split(),
}


async def test_over_http_and_for_prometheus(gateway: RunningGateway, client: httpx.AsyncClient) -> None:
    job_id = (await client.post("/v1/jobs", json=job_body(name="run"))).json()["job_id"]
    path = f"/v1/jobs/{job_id}/throughput"
    idle = (await client.get(path)).json()
    assert set(idle) == NAMES
    assert set(idle["staleness"]) == {"mean", "p50", "p95", "max", "pre_queue_mean", "in_queue_mean"}
    assert set(idle["time_s"]) == {"queue", "sandbox", "generate", "tool", "verify"}
    assert idle["limited_by"] == Limit.UNKNOWN
    stack = Stack(gateway.store)
    stack.job_id = job_id
    await stack.make_ready(4, seconds=SPENT, reward=1.0)
    await stack.batch(4)
    found = (await client.get(path, params={"window_s": 60})).json()
    assert found["window_s"] <= 60
    assert found["generated_samples_per_s"] > 0
    assert found["time_s"]["generate"] == 6.0
    assert found["staleness"]["p95"] == 0
    assert found["limited_by"] == Limit.BALANCED
    assert found["bottleneck"].endswith(".")
    async with gateway.client(None, Authorization=f"Bearer {OPERATOR_KEY}") as operator:
        text = (await operator.get("/metrics")).text
    for line in (
        'rollway_job_zero_variance_share{job="run",tenant="red"} 1.0',
        'rollway_job_staleness{figure="max",job="run",tenant="red"} 0.0',
        'rollway_job_rollout_time_s{job="run",part="generate",tenant="red"} 6.0',
        'rollway_job_limited_by{job="run",limit="balanced",tenant="red"} 1.0',
    ):
        assert line in text.splitlines()
    assert "rollway_job_consumption_samples_per_s{" not in text  # not measured: no sample


@pytest.mark.timeout(120)
async def test_the_service_and_its_trainer_measure_the_same_wait(
    gateway: RunningGateway, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    """A trainer of 0.8 s a step that gets one rollout each 0.2 s, 8 of which make a batch: it waits about half of its time."""
    async with standin(tmp_path) as generator:
        job = (await client.post("/v1/jobs", json=job_body(generators=[generator], staleness_budget=9))).json()
        job_id = job["job_id"]

        await client.post(f"/v1/jobs/{job_id}/tasks", json={"tasks": [task_body(number) for number in range(60)]})

        async def make() -> None:
            while True:
                for lease in await gateway.leases.take(job_id, "w", n=1):
                    await finish(gateway.leases, lease, turns(1))
                await asyncio.sleep(0.2)

        async with open_gateway(gateway.url, KEYS["red"]) as service, asyncio.timeout(60), asyncio.TaskGroup() as group:
            making = group.create_task(make())
            options = TrainerOptions(url=gateway.url, key=KEYS["red"], job=job_id, pace=Pace(step_s=0.8, time_scale=1.0), steps=6)
            trainer = Trainer(service, await service.job(job_id), options, Progress())
            await trainer.run()
            theirs = await trainer.summary()
            ours = (await client.get(f"/v1/jobs/{job_id}/throughput")).json()
            making.cancel()
    assert 0.1 < theirs.wait_fraction < 0.99
    assert ours["wait_fraction"] == pytest.approx(theirs.wait_fraction, abs=0.15)
    assert ours["consumed_samples_per_s"] == pytest.approx(theirs.samples_per_s, rel=0.25)


@pytest.mark.parametrize("window_s", ["0", "4.9", "3601", "-1", "nan", "soon"])
async def test_a_window_that_is_not_kept_is_refused(client: httpx.AsyncClient, window_s: str) -> None:
    job_id = (await client.post("/v1/jobs", json=job_body())).json()["job_id"]
    refused = await client.get(f"/v1/jobs/{job_id}/throughput", params={"window_s": window_s})
    assert refused.status_code == 422
    assert "window_s" in refused.text


async def test_another_tenants_job_has_no_throughput(gateway: RunningGateway, client: httpx.AsyncClient) -> None:
    job_id = (await client.post("/v1/jobs", json=job_body())).json()["job_id"]
    async with gateway.client("blue") as blue:
        assert (await blue.get(f"/v1/jobs/{job_id}/throughput")).status_code == 404
    await client.delete(f"/v1/jobs/{job_id}")
    assert (await client.get(f"/v1/jobs/{job_id}/throughput")).status_code == 404
