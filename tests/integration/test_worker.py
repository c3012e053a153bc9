"""A worker's own life, on a real store: what ends it, and what it leaves to others when it goes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from pydantic import SecretStr

from sandboxes.base import Sandbox, SandboxSpec, SandboxStartError
from sandboxes.docker import DockerBackend
from service.journal import AnyEntry, Call, Opened, Prompted, Replied, SandboxOpened, pack_ids
from service.records import GroupState, Message, SandboxFields, TaskSpec
from service.settings import Settings
from service.store import Store
from tests.store_stack import Stack, store_at
from workers.resources import JobContexts, Resources
from workers.rollout import MAX_EXPIRIES, Hold, drive
from workers.worker import Worker

pytestmark = pytest.mark.redis


@pytest.fixture
async def stack(empty_redis_url: str) -> AsyncIterator[Stack]:
    async with store_at(empty_redis_url) as store:
        yield Stack(store, lease_s=1.5)


@asynccontextmanager
async def resources_of(stack: Stack, tokenizer: Path, **backends: Any) -> AsyncIterator[Resources]:
    settings = Settings(redis_url=SecretStr(stack.store.url), tokenizer_roots=[tokenizer.parent], lease_s=1.5, grace_s=1.0)
    async with JobContexts(settings, stack.jobs) as contexts, aiohttp.ClientSession() as http:
        yield Resources(
            settings=settings,
            worker="w1",
            deployment_id="test",
            leases=stack.leases,
            groups=stack.groups,
            contexts=contexts,
            backends=backends,
            http=http,
            verifying=asyncio.Semaphore(1),
            stopping=asyncio.Event(),
        )


class StuckBackend(DockerBackend):
    """Starts nothing, and takes for ever to clean up after that."""

    def __init__(self) -> None:
        super().__init__(deployment_id="stuck")
        self.starting = asyncio.Event()
        self.cleaned = asyncio.Event()

    async def create(self, spec: SandboxSpec, *, name: str) -> Sandbox:
        self.starting.set()
        try:
            await asyncio.Event().wait()
        finally:
            await self.cleaned.wait()
        raise SandboxStartError("never")


class Attached:
    """A sandbox that another worker opened."""

    id = "s1"
    destroyed = False

    async def destroy(self) -> None:
        self.destroyed = True


class AttachingBackend(DockerBackend):
    def __init__(self) -> None:
        super().__init__(deployment_id="attaching")
        self.sandbox = Attached()

    async def attach(self, sandbox_id: str) -> Sandbox:
        assert sandbox_id == self.sandbox.id
        return cast(Sandbox, self.sandbox)


class BrokenHeart(Store):
    async def heartbeat(self, worker: str, info: dict[str, Any], ttl_s: float) -> None:
        raise ZeroDivisionError("a bug of ours")


async def test_an_attempt_that_may_kill_its_workers_is_ended_before_it_is_driven(stack: Stack, qwen3_dir: Path) -> None:
    await stack.open_job(group_size=1)
    [group] = await stack.submit(1)
    async with resources_of(stack, qwen3_dir) as resources:
        for _ in range(3):
            lease = await stack.one()
            for _ in range(MAX_EXPIRIES):
                await stack.store.redis.zadd(f"rw:{{{stack.job_id}}}:leases", {lease.rollout_id: 1})  # as time does
                lease = await stack.one()
            await drive(lease, resources, Hold())
    assert (await stack.groups.get(group)).reason == "worker_lost: 10 leases of this attempt ran out"
    assert (await stack.jobs.counts(stack.job_id)).failed == {"worker_lost": 1}


async def test_a_bug_in_a_background_loop_ends_the_worker(stack: Stack, qwen3_dir: Path) -> None:
    store = BrokenHeart(stack.store.redis, stack.store.url)
    async with resources_of(stack, qwen3_dir) as resources:
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(20):
                await Worker(store, stack.jobs, resources).run()
    assert caught.group_contains(ZeroDivisionError)


async def test_a_teardown_that_hangs_does_not_hold_up_the_release(stack: Stack, qwen3_dir: Path) -> None:
    await stack.open_job(group_size=1, model={"tokenizer": str(qwen3_dir), "renderer": "qwen3", "context_tokens": 1000})
    task = TaskSpec(task_id="t", messages=[Message(role="user", content="hi")], tools=["bash"], sandbox=SandboxFields(lazy=False))
    await stack.groups.submit(stack.job_id, [task])
    backend = StuckBackend()
    async with resources_of(stack, qwen3_dir, docker=backend) as resources:
        async with asyncio.timeout(20):
            worker = asyncio.create_task(Worker(stack.store, stack.jobs, resources).run())
            await backend.starting.wait()
            resources.stopping.set()
            await worker
        [again] = await stack.take(worker="w2")
        assert (again.expiries, again.attempt, again.resumed) == (0, 1, True)
        backend.cleaned.set()
        await asyncio.sleep(0.1)
    await backend.aclose()


@pytest.mark.parametrize(("crashed", "attempts"), [(True, 3), (False, 4)], ids=["crashed", "left-in-order"])
async def test_an_attempt_given_up_at_take_over_leaves_no_sandbox(stack: Stack, qwen3_dir: Path, crashed: bool, attempts: int) -> None:
    """A call of unknown outcome begins anew, at once without its sandbox; a worker that left in order costs the rollout no attempt."""
    await stack.open_job(group_size=1, model={"tokenizer": str(qwen3_dir), "renderer": "qwen3", "context_tokens": 1000})
    task = TaskSpec(task_id="t", messages=[Message(role="user", content="hi")], tools=["bash"])
    [(_, group)] = (await stack.groups.submit(stack.job_id, [task])).groups
    call = Call(id="c", name="bash", arguments='{"command":"ls"}')
    for attempt in range(1, attempts + 1):
        lease = await stack.one()
        opened = Opened(at=1.0, attempt=attempt, worker="w1")
        entries: list[AnyEntry] = [opened, Prompted(at=1.0, token_ids=pack_ids([1])), Replied(at=1.0, content="", calls=[call])]
        await stack.leases.append(lease, [*entries, SandboxOpened(at=1.0, id="s1", seconds=0.1)], at_index=0)
        if crashed:
            await stack.store.redis.zadd(f"rw:{{{stack.job_id}}}:leases", {lease.rollout_id: 1})  # as time does
        else:
            await stack.leases.release(lease)
        backend = AttachingBackend()
        async with resources_of(stack, qwen3_dir, docker=backend) as resources:
            await drive(await stack.one(), resources, Hold())
        assert backend.sandbox.destroyed
        await backend.aclose()
    assert await stack.state(group) is (GroupState.FAILED if crashed else GroupState.RUNNING)
