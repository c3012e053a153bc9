"""Jobs share workers, on a real store with time played: case 058, weights, and no slot that stays free."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from service.fair_share import fill
from service.leases import Lease
from service.records import JobPatch
from service.store import open_store
from tests.store_stack import Stack, ended, fast_settings

pytestmark = pytest.mark.redis


@pytest.fixture
async def stack(fast_valkey_url: str) -> AsyncIterator[Stack]:
    async with open_store(fast_settings(fast_valkey_url)) as store:
        await store.redis.flushall()
        yield Stack(store)


@dataclass
class PlayedWorker:
    """Takes leases as a worker does, and finishes each after its job's `work_s` of played time."""

    stack: Stack
    name: str
    slots: int
    work_s: dict[str, float]
    held: list[tuple[float, Lease]] = field(default_factory=list)

    async def at(self, now: float) -> list[Lease]:
        """What it does at this time; the leases that it takes."""
        for due, lease in [work for work in self.held if work[0] <= now]:
            self.held.remove((due, lease))
            await self.stack.leases.finish(lease, ended())
        taken: list[Lease] = []

        async def take(job_id: str, n: int) -> int:
            found = await self.stack.leases.take(job_id, self.name, n=n)
            taken.extend(found)
            return len(found)

        await fill(self.slots - len(self.held), await self.stack.leases.loads(await self.stack.jobs.ids()), take)
        self.held += [(now + self.work_s[lease.job_id], lease) for lease in taken]
        return taken


async def open_jobs(stack: Stack, **groups: int) -> dict[str, str]:
    """One job by each name, with so many groups of 8."""
    jobs = {}
    for name, count in groups.items():
        jobs[name] = await stack.open_job(name=name, group_size=8, staleness_budget=None, max_in_flight_rollouts=10_000)
        await stack.submit(count)
    return jobs


def in_flight(workers: list[PlayedWorker], job_id: str) -> int:
    return sum(lease.job_id == job_id for worker in workers for _, lease in worker.held)


@pytest.mark.parametrize("slots", [[16], [8, 8], [1] * 16], ids=["one-worker", "two-workers", "sixteen-workers"])
async def test_case_058_a_small_job_is_not_stuck_behind_a_big_one(stack: Stack, slots: list[int]) -> None:
    jobs = await open_jobs(stack, big=100)
    big = jobs["big"]
    work_s = {big: 60.0}
    workers = [PlayedWorker(stack, f"w{number}", count, work_s) for number, count in enumerate(slots)]
    for worker in workers:
        await worker.at(0)
    assert in_flight(workers, big) == 16  # alone it uses them all
    small = (await open_jobs(stack, small=2))["small"]
    work_s[small] = 10.0
    first_start: float | None = None
    for now in range(5, 145, 5):
        for worker in workers:
            if any(lease.job_id == small for lease in await worker.at(now)) and first_start is None:
                first_start = now
        assert in_flight(workers, big) + in_flight(workers, small) == 16
    assert first_start is not None
    assert first_start <= 70
    assert (await stack.jobs.counts(small)).ready == 2
    assert in_flight(workers, big) == 16


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        pytest.param((1.0, 1.0), (8, 8), id="equal"),
        pytest.param((3.0, 1.0), (12, 4), id="three-to-one"),
        pytest.param((0.5, 1.5), (4, 12), id="fractions"),
    ],
)
async def test_shares_follow_the_weights(stack: Stack, weights: tuple[float, float], expected: tuple[int, int]) -> None:
    """Also of weights that are changed while the jobs run."""
    jobs = await open_jobs(stack, one=100, two=100)
    workers = [PlayedWorker(stack, f"w{number}", 8, dict.fromkeys(jobs.values(), 10.0)) for number in range(2)]
    for worker in workers:
        await worker.at(0)
    assert [in_flight(workers, job) for job in jobs.values()] == [8, 8]
    for job, weight in zip(jobs.values(), weights, strict=True):
        await stack.jobs.patch(job, JobPatch(weight=weight))
    for now in range(1, 40):
        for worker in workers:
            await worker.at(now)
    assert tuple(in_flight(workers, job) for job in jobs.values()) == expected


async def test_what_a_job_has_no_work_for_the_others_have(stack: Stack) -> None:
    jobs = await open_jobs(stack, idle=0, small=1, big=10)
    worker = PlayedWorker(stack, "w", 32, dict.fromkeys(jobs.values(), 10.0))
    await worker.at(0)
    assert [in_flight([worker], job) for job in jobs.values()] == [0, 8, 24]
