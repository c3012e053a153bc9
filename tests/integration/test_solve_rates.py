"""Solve rates by task: counted also for groups that are dropped, bounded, paged by what changed last, gone with the job."""

from collections.abc import AsyncIterator

import httpx
import pytest

from service.keys import JobKeys
from service.solve_rates import SolveRate, changed_since, of_task
from service.store import open_store
from tests.gateway_play import job_body
from tests.gateway_stack import RunningGateway
from tests.store_stack import Stack, ended, fast_settings

pytestmark = pytest.mark.redis


@pytest.fixture
async def stack(fast_valkey_url: str) -> AsyncIterator[Stack]:
    async with open_store(fast_settings(fast_valkey_url)) as store:
        await store.redis.flushall()
        yield Stack(store)


async def attempt(stack: Stack, *rewards: float | None) -> None:
    """One group of task t0 ends with these rewards."""
    await stack.submit(1)
    for lease, reward in zip(await stack.take(), rewards, strict=True):
        await stack.leases.finish(lease, ended(reward=reward))


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        pytest.param([(1.0, 0.0)], (1, 2, 2, 1, 0.5, 0.5), id="one-of-two"),
        pytest.param([(1.0, 1.0), (1.0, 0.0)], (2, 4, 4, 3, 0.75, 0.75), id="dropped-groups-count"),
        pytest.param([(0.0, 0.0)], (1, 2, 2, 0, 0.0, 0.0), id="never"),
        pytest.param([(0.5, -1.0)], (1, 2, 2, 0, 0.0, -0.25), id="part-of-a-reward-solves-nothing"),
        pytest.param([(None, 1.0)], (1, 2, 1, 1, 1.0, 1.0), id="what-is-left-to-the-trainer-is-no-reward"),
        pytest.param([(None, None)], (1, 2, 0, 0, None, None), id="no-reward-at-all"),
    ],
)
async def test_solve_rates(stack: Stack, attempts: list[tuple[float | None, ...]], expected: tuple[float | None, ...]) -> None:
    await stack.open_job(zero_variance="drop")
    for rewards in attempts:
        await attempt(stack, *rewards)
    found = await of_task(stack.store, stack.job_id, "t0")
    assert found is not None
    assert (found.groups, found.rollouts, found.rewarded, found.solved, found.solve_rate, found.mean_reward) == expected
    assert await of_task(stack.store, stack.job_id, "t1") is None


async def test_what_has_changed_since(stack: Stack) -> None:
    await stack.open_job(staleness_budget=3)
    await stack.make_ready(3, reward=1.0)

    async def tasks(after: int, limit: int = 10) -> list[SolveRate]:
        return await changed_since(stack.store, stack.job_id, after=after, limit=limit)

    first = await tasks(0, limit=2)
    assert [(rate.task_id, rate.groups) for rate in first] == [("t0", 1), ("t1", 1)]
    await attempt(stack, 1.0, 1.0)  # t0 once more
    rest = await tasks(first[-1].change)
    assert [(rate.task_id, rate.groups) for rate in rest] == [("t2", 1), ("t0", 2)]
    assert await tasks(rest[-1].change) == []


async def test_the_longest_unattempted_task_is_forgotten_beyond_the_bound(stack: Stack) -> None:
    await stack.open_job()
    job = JobKeys(stack.job_id)
    await stack.store.redis.zadd(job.solve_order, {f"old{number}": -number for number in range(100_000)})
    await stack.store.redis.hset(job.solve_rates, "old99999", b"")
    await attempt(stack, 1.0, 0.0)
    assert await stack.store.redis.zcard(job.solve_order) == 100_000
    assert await stack.store.redis.hkeys(job.solve_rates) == [b"t0"]
    await stack.jobs.delete(stack.job_id)
    assert await stack.job_keys() == {"job"}


async def test_over_http(gateway: RunningGateway, client: httpx.AsyncClient) -> None:
    job = (await client.post("/v1/jobs", json=job_body())).json()
    stack = Stack(gateway.store)
    stack.job_id = job["job_id"]
    await stack.submit(2, prefix="quixbugs/g")
    for number, lease in enumerate(await stack.take()):
        await stack.leases.finish(lease, ended(reward=float(number % 2)))
    url = f"/v1/jobs/{stack.job_id}/solve_rates"
    page = (await client.get(url, params={"limit": 1})).json()
    assert [rate["task_id"] for rate in page["tasks"]] == ["quixbugs/g0"]
    rest = (await client.get(url, params={"after": page["next"]})).json()
    assert [rate["task_id"] for rate in rest["tasks"]] == ["quixbugs/g1"]
    assert (await client.get(url, params={"after": rest["next"]})).json() == {"tasks": [], "next": rest["next"]}
    one = (await client.get(url, params={"task_id": "quixbugs/g1"})).json()
    assert one["tasks"] == rest["tasks"]
    for wrong in ({"limit": 0}, {"after": -1}, {"after": 2**53}, {"task_id": ""}):
        refused = await client.get(url, params=wrong)
        assert refused.status_code == 422
        assert refused.json()["fields"][0]["field"] == f"query.{next(iter(wrong))}"
    assert (await client.get(url.replace("j", "k", 1))).status_code == 404
    async with gateway.client("blue") as blue:
        assert (await blue.get(url)).status_code == 404
