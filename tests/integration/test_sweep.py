"""The sweep: sandboxes of dead owners go, those of live rollouts and of other deployments stay."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from pydantic import SecretStr

from sandboxes.docker import DockerBackend
from service.settings import Settings
from service.weight_store import WeightStore
from tests.sandbox_backends import DEPLOYMENT, IMAGE, docker_host, has_engine, spec
from tests.store_stack import Stack, store_at
from workers.owners import sandbox_name
from workers.resources import JobContexts, Resources
from workers.worker import Worker

pytestmark = [
    pytest.mark.redis,
    pytest.mark.docker,
    pytest.mark.skipif(not has_engine(), reason=f"no engine that has {IMAGE}"),
    pytest.mark.timeout(60),
]

OURS, THEIRS = f"{DEPLOYMENT}-ours", f"{DEPLOYMENT}-theirs"


@pytest.fixture
async def stack(empty_redis_url: str) -> AsyncIterator[Stack]:
    async with store_at(empty_redis_url) as store:
        yield Stack(store)


def resources(stack: Stack, backend: DockerBackend, contexts: JobContexts, http: aiohttp.ClientSession, settings: Settings) -> Resources:
    return Resources(
        settings=settings,
        deployment_id=OURS,
        worker="w1",
        leases=stack.leases,
        groups=stack.groups,
        contexts=contexts,
        backends={backend.name: backend},
        http=http,
        verifying=asyncio.Semaphore(1),
        stopping=asyncio.Event(),
    )


async def names(backend: DockerBackend) -> set[str]:
    return {info.name for info in await backend.list()}


async def test_case_035_only_the_sandboxes_of_live_rollouts_stay(stack: Stack, empty_redis_url: str) -> None:
    await stack.open_job(group_size=2)
    await stack.submit(1)
    held, failed = await stack.take()
    await stack.leases.restart(failed, "sandbox: its worker is gone", retry=True)
    kept = {sandbox_name(OURS, held.rollout_id, 1), f"{sandbox_name(OURS, held.rollout_id, 1)}-v", sandbox_name(OURS, failed.rollout_id, 2)}
    ownerless = {sandbox_name(OURS, failed.rollout_id, 1), sandbox_name(OURS, f"{stack.job_id}-g9-r0", 1)}
    theirs = sandbox_name(THEIRS, f"{stack.job_id}-g9-r0", 1)
    settings = Settings(redis_url=SecretStr(empty_redis_url))
    async with (
        DockerBackend(deployment_id=OURS, docker_host=docker_host()) as backend,
        DockerBackend(deployment_id=THEIRS, docker_host=docker_host()) as other,
        JobContexts(settings, stack.jobs, WeightStore(stack.store)) as contexts,
        aiohttp.ClientSession() as http,
    ):
        try:
            await asyncio.gather(other.create(spec(), name=theirs), *(backend.create(spec(), name=name) for name in kept | ownerless))
            worker = Worker(stack.store, stack.jobs, resources(stack, backend, contexts, http, settings))
            assert await worker.sweep() == 0, "all are too young to be called ownerless"
            assert await worker.sweep(older_than_s=0) == len(ownerless)
            assert await names(backend) == kept
            assert await names(other) == {theirs}
            await stack.jobs.delete(stack.job_id)
            assert await worker.sweep(older_than_s=0) == len(kept)
        finally:
            for each in (backend, other):
                await each.sweep(keep=frozenset(), older_than_s=0)
