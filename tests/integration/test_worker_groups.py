"""What ends rollouts from outside, as a real worker sees it, with a stand-in generator at a given speed: enough siblings, and old age."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import SecretStr

from service.groups import GroupRecord
from service.records import GroupState, ModelFields
from service.settings import Settings
from service.standin.lengths import Length
from service.standin.policy import Candidate, Policy
from service.weight_store import WeightStore
from tests.standin_stack import standin
from tests.store_stack import Stack, store_at
from workers.resources import JobContexts, Resources
from workers.worker import Worker

pytestmark = [pytest.mark.redis, pytest.mark.timeout(180)]

LENGTHS = Policy(default=[[Candidate("and so on ", length=Length(mean=60, sigma=1.0))]])
LEASE_S = 9.0
"""A sixth of it passes until a worker hears; all of it, and a machine that stalled has lost its leases."""


@asynccontextmanager
async def working(redis_url: str, folder: Path, *, tokens_per_s: float, **job: Any) -> AsyncIterator[tuple[Stack, str]]:
    """A worker at work on one job whose replies, each one whole rollout, are of very different lengths; and the generator's URL."""
    settings = Settings(redis_url=SecretStr(redis_url), tokenizer_roots=[folder], lease_s=LEASE_S, grace_s=1.0)
    async with (
        store_at(redis_url) as store,
        standin(folder, LENGTHS, tokens_per_s=tokens_per_s, seed=3) as url,
        JobContexts(settings, (stack := Stack(store, lease_s=LEASE_S)).jobs, WeightStore(store)) as contexts,
        aiohttp.ClientSession() as http,
        asyncio.TaskGroup() as group,
    ):
        resources = Resources(
            settings=settings,
            worker="w1",
            deployment_id="test",
            leases=stack.leases,
            groups=stack.groups,
            contexts=contexts,
            backends={},
            http=http,
            verifying=asyncio.Semaphore(1),
            stopping=asyncio.Event(),
        )
        model = ModelFields(tokenizer="tiny", renderer="chatml", context_tokens=4000)
        await stack.open_job(model=model, generators=[url], **job)
        group.create_task(Worker(store, stack.jobs, resources).run())
        try:
            yield stack, url
        finally:
            resources.stopping.set()


async def until(condition: Callable[[], Awaitable[bool]], *, every_s: float = 0.05) -> None:
    async with asyncio.timeout(80):
        while not await condition():
            await asyncio.sleep(every_s)


async def nobody_works(stack: Stack) -> bool:
    info = await stack.store.workers()
    return bool(info) and info[0]["rollouts"] == 0


async def test_a_group_that_has_enough_stops_the_others_at_their_worker(empty_redis_url: str, tmp_path: Path) -> None:
    async with working(empty_redis_url, tmp_path, tokens_per_s=60, group_size=2, extra_members=4) as (stack, _):
        [group] = await stack.submit(1)

        async def ready() -> bool:
            return await stack.state(group) is GroupState.READY

        await until(ready)
        record = await stack.groups.get(group)
        assert sorted(member.stop_reason or "" for member in record.members) == ["answered"] * 2 + ["surplus"] * 4
        await until(lambda: nobody_works(stack))
        [taken] = (await stack.batch(1)).groups
        assert [member.index for member in taken.rollouts] == [member.index for member in record.members if member.state == "ended"]
        assert (await stack.jobs.counts(stack.job_id)).surplus_rollouts == 4


async def test_a_bump_stops_what_is_too_old_at_its_worker_and_runs_it_again(empty_redis_url: str, tmp_path: Path) -> None:
    async with working(empty_redis_url, tmp_path, tokens_per_s=3, group_size=2, staleness_budget=0) as (stack, url):
        [group] = await stack.submit(1)

        async def record() -> GroupRecord:
            return await stack.groups.get(group)

        async def running() -> bool:
            return all(member.state == "leased" for member in (await record()).members)

        async def sampled() -> bool:
            """Cut short, the turns are journaled so far, and go on."""
            async with aiohttp.ClientSession() as http, http.post(f"{url}/abort_request", json={"abort_all": True}) as reply:
                assert reply.ok
            return (await stack.jobs.counts(stack.job_id)).tokens_standing > 0

        await until(running)
        await until(sampled, every_s=1.0)  # a few tokens later
        await stack.bump(1)
        assert (await record()).requeues == 1
        assert set((await stack.jobs.counts(stack.job_id)).ledger.discarded) == {"requeued"}

        async def again() -> bool:
            return [member.attempt for member in (await record()).members] == [2, 2] and await running()

        await until(again)
        assert (await stack.jobs.counts(stack.job_id)).charged == 1
