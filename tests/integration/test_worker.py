"""A worker's own life, on a real store: what ends it, and what it leaves to others when it goes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from pydantic import SecretStr

from sandboxes.agent_sandbox import AgentSandbox
from sandboxes.base import ExecResult, Sandbox, SandboxError, SandboxFencedError, SandboxLostError, SandboxSpec, SandboxStartError
from sandboxes.docker import DockerBackend
from service.journal import AnyEntry, Call, Opened, Prompted, Replied, SandboxOpened, Stopped, Verifying, encode, pack_ids
from service.keys import JobKeys
from service.leases import Lease
from service.records import GroupState, Message, SandboxFields, TaskSpec
from service.settings import Settings
from service.store import Store
from service.weight_store import WeightStore
from tests.e2e.stack import end, spawn
from tests.hostile_generator import HostileGenerator, serving
from tests.store_stack import Stack, store_at
from workers.resources import JobContexts, Resources
from workers.rollout import MAX_EXPIRIES, Hold, drive
from workers.worker import Worker

pytestmark = pytest.mark.redis


@pytest.fixture
async def stack(empty_redis_url: str) -> AsyncIterator[Stack]:
    async with store_at(empty_redis_url) as store:
        yield Stack(store)


@asynccontextmanager
async def resources_of(stack: Stack, tokenizer: Path, **backends: Any) -> AsyncIterator[Resources]:
    settings = Settings(redis_url=SecretStr(stack.store.url), tokenizer_roots=[tokenizer.parent], grace_s=1.0)
    async with JobContexts(settings, stack.jobs, WeightStore(stack.store)) as contexts, aiohttp.ClientSession() as http:
        resources = Resources(
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
        try:
            yield resources
        finally:
            for backend in backends.values():
                await backend.aclose()


class StuckBackend(DockerBackend):
    """Starts nothing, and takes for ever to clean up after that."""

    def __init__(self) -> None:
        super().__init__(deployment_id="stuck")
        self.starting = asyncio.Event()
        self.cleaned = asyncio.Event()

    async def create(self, spec: SandboxSpec, *, name: str, fence: int = 0) -> AgentSandbox:
        self.starting.set()
        try:
            await asyncio.Event().wait()
        finally:
            await self.cleaned.wait()
        raise SandboxStartError("never")


GONE = SandboxLostError("no such container")


class Attached(Sandbox):
    """A sandbox that another worker opened, and that answers every call with `error`; `ended` says how we left it."""

    def __init__(self, error: SandboxError) -> None:
        self.error = error
        self.asked: list[str | None] = []
        self.ended: list[str] = []

    async def exec(self, argv: Sequence[str], *, call_id: str | None = None, **more: Any) -> ExecResult:
        self.asked.append(call_id)
        raise self.error

    async def destroy(self) -> None:
        self.ended.append("destroyed")

    async def detach(self) -> None:
        self.ended.append("detached")


class AttachingBackend(DockerBackend):
    """Has one sandbox, in its life `boot_id`."""

    def __init__(self, error: SandboxError = GONE, *, boot_id: str = "b1") -> None:
        super().__init__(deployment_id="attaching")
        self.boot_id = boot_id
        self.sandbox = Attached(error)
        self.fences: list[int] = []

    async def attach(self, sandbox_id: str, *, name: str | None = None, fence: int = 0, boot_id: str | None = None) -> AgentSandbox:
        assert sandbox_id == "s1"
        self.fences.append(fence)
        if boot_id != self.boot_id:
            raise SandboxLostError("it was restarted: what ran in it is gone")
        return cast(AgentSandbox, self.sandbox)


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
    reason = (await stack.groups.get(group)).reason
    assert reason is not None
    assert reason.startswith("worker_lost: 10 leases of this attempt ran out; ")
    assert (await stack.jobs.counts(stack.job_id)).failed == {"worker_lost": 1}


async def test_a_bug_in_a_background_loop_ends_the_worker(stack: Stack, qwen3_dir: Path) -> None:
    store = BrokenHeart(stack.store.redis, stack.store.url)
    async with resources_of(stack, qwen3_dir) as resources:
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(40):
                await Worker(store, stack.jobs, resources).run()
    assert caught.group_contains(ZeroDivisionError)


async def test_a_teardown_that_hangs_does_not_hold_up_the_release(stack: Stack, qwen3_dir: Path) -> None:
    await stack.open_job(group_size=1, model={"tokenizer": str(qwen3_dir), "renderer": "qwen3", "context_tokens": 1000})
    task = TaskSpec(task_id="t", messages=[Message(role="user", content="hi")], tools=["bash"], sandbox=SandboxFields(lazy=False))
    await stack.groups.submit(stack.job_id, [task])
    backend = StuckBackend()
    async with resources_of(stack, qwen3_dir, docker=backend) as resources:
        async with asyncio.timeout(40):
            worker = asyncio.create_task(Worker(stack.store, stack.jobs, resources).run())
            await backend.starting.wait()
            resources.stopping.set()
            await worker
        [again] = await stack.take(worker="w2")
        assert (again.expiries, again.attempt, again.resumed) == (0, 1, True)
        backend.cleaned.set()
        await asyncio.sleep(0.1)


async def test_leases_are_handed_back_however_short_the_grace_time_is(stack: Stack, qwen3_dir: Path, tmp_path: Path) -> None:
    generator = HostileGenerator("hang")
    settings = {
        "ROLLWAY_REDIS_URL": stack.store.url,
        "ROLLWAY_TOKENIZER_ROOTS": str(qwen3_dir.parent),
        "ROLLWAY_SANDBOX_POOL": "0",
        "ROLLWAY_GRACE_S": "0.01",
    }
    async with serving(generator) as url:
        model = {"tokenizer": str(qwen3_dir), "renderer": "qwen3", "context_tokens": 1000}
        await stack.open_job(group_size=1, generators=[url], model=model)
        await stack.submit(1)
        worker = await spawn("worker", env=settings, log=tmp_path / "worker.log")
        try:
            async with asyncio.timeout(50):
                while not generator.hanging:
                    await asyncio.sleep(0.05)
            await stack.store.redis.client_pause(200)  # a store that is a little slow
        finally:
            status = await end(worker)
    [again] = await stack.take(worker="w2")
    assert (status, again.expiries, again.attempt, again.resumed) == (0, 0, 1, True)


TOOL_TASK = TaskSpec(task_id="t", messages=[Message(role="user", content="hi")], tools=["bash"])
CALL = Call(id="c", name="bash", arguments='{"command":"ls"}')


async def left_in_a_call(stack: Stack, *, boot_id: str) -> Lease:
    """The next lease of the rollout; its worker before is gone, and nobody saw the call's end."""
    lease = await stack.one()
    opened = Opened(at=1.0, attempt=lease.attempt, worker="w1")
    entries: list[AnyEntry] = [opened, Prompted(at=1.0, token_ids=pack_ids([1])), Replied(at=1.0, content="", calls=[CALL])]
    await stack.leases.append(lease, [*entries, SandboxOpened(at=1.0, id="s1", seconds=0.1, boot_id=boot_id)], at_index=0)
    await stack.store.redis.zadd(f"rw:{{{stack.job_id}}}:leases", {lease.rollout_id: 1})  # as time does
    return await stack.one()


async def open_tool_job(stack: Stack, tokenizer: Path) -> str:
    """The id of the one rollout's group."""
    await stack.open_job(group_size=1, model={"tokenizer": str(tokenizer), "renderer": "qwen3", "context_tokens": 1000})
    [(_, group)] = (await stack.groups.submit(stack.job_id, [TOOL_TASK])).groups
    return group


async def test_a_call_is_asked_for_again_by_its_id_case_065(stack: Stack, qwen3_dir: Path) -> None:
    await open_tool_job(stack, qwen3_dir)
    lease = await left_in_a_call(stack, boot_id="b1")
    backend = AttachingBackend()
    async with resources_of(stack, qwen3_dir, docker=backend) as resources:
        await drive(lease, resources, Hold())
    assert backend.sandbox.asked == [f"{lease.rollout_id}/a1/c/shell"]
    assert backend.fences == [int(lease.fence)]
    assert backend.sandbox.ended == ["destroyed"]
    await backend.aclose()


@pytest.mark.parametrize("journaled", ["b0", ""], ids=["another-boot", "older-version"])
async def test_in_another_life_of_its_sandbox_an_attempt_begins_anew(stack: Stack, qwen3_dir: Path, journaled: str) -> None:
    group = await open_tool_job(stack, qwen3_dir)
    lease = await left_in_a_call(stack, boot_id=journaled)
    backend = AttachingBackend()
    async with resources_of(stack, qwen3_dir, docker=backend) as resources:
        await drive(lease, resources, Hold())
    assert backend.sandbox.asked == []
    assert (await stack.one()).attempt == 2
    assert await stack.state(group) is GroupState.RUNNING
    await backend.aclose()


UNREADABLE = {
    "undecodable": (b"\xc1\x00", "journal: an entry cannot be decoded"),
    "cannot-follow": (encode(Replied(at=1.0, content="", calls=[])), "journal: entry 4 (replied) replies to no turn"),
    "newer": (encode(Opened(at=1.0, attempt=1, worker="w", version=9)), "journal: entry 0 (opened) is of wire version 9"),
}


@pytest.mark.parametrize("what", UNREADABLE)
async def test_a_journal_that_cannot_be_read_costs_its_attempt_and_nothing_else(stack: Stack, qwen3_dir: Path, what: str) -> None:
    await open_tool_job(stack, qwen3_dir)
    lease = await left_in_a_call(stack, boot_id="b1")
    entry, reason = UNREADABLE[what]
    name = JobKeys(stack.job_id).journal(lease.rollout_id)
    await (stack.store.redis.lset(name, 0, entry) if what == "newer" else stack.store.redis.rpush(name, entry))
    backend = AttachingBackend()
    async with resources_of(stack, qwen3_dir, docker=backend) as resources:
        await drive(lease, resources, Hold())
    assert (backend.sandbox.asked, backend.sandbox.ended) == ([], [])
    again = await stack.one()
    assert (again.attempt, again.resumed) == (2, False)
    [failure] = (await stack.groups.rollout(lease.rollout_id)).failures
    assert failure.startswith(reason)
    await backend.aclose()


async def test_a_fenced_worker_changes_nothing_and_destroys_nothing(stack: Stack, qwen3_dir: Path) -> None:
    group = await open_tool_job(stack, qwen3_dir)
    lease = await left_in_a_call(stack, boot_id="b1")
    written = await stack.leases.journal(lease.rollout_id)
    backend = AttachingBackend(SandboxFencedError("the holder of another lease attached to it"))
    async with resources_of(stack, qwen3_dir, docker=backend) as resources:
        await drive(lease, resources, Hold())
    assert backend.sandbox.ended == ["detached"]
    assert await stack.leases.journal(lease.rollout_id) == written
    record = await stack.groups.rollout(lease.rollout_id)
    assert (record.attempt, record.state, await stack.state(group)) == (1, "leased", GroupState.RUNNING)
    await backend.aclose()


async def test_a_verification_in_the_agents_own_sandbox_is_not_gone_on_with(stack: Stack, qwen3_dir: Path) -> None:
    """What the verifier that died did there is not known; in a fresh sandbox it would simply run again."""
    await stack.open_job(group_size=1, model={"tokenizer": str(qwen3_dir), "renderer": "qwen3", "context_tokens": 1000})
    verifier = {"command": "true", "sandbox": "same"}
    await stack.groups.submit(stack.job_id, [TOOL_TASK.model_validate(TOOL_TASK.model_dump() | {"verifier": verifier})])
    lease = await stack.one()
    entries: list[AnyEntry] = [Opened(at=1.0, attempt=1, worker="w1"), Prompted(at=1.0, token_ids=pack_ids([1]))]
    entries.append(Stopped(at=1.0, reason="answered"))
    await stack.leases.append(lease, [*entries, Verifying(at=1.0)], at_index=0)
    await stack.store.redis.zadd(f"rw:{{{stack.job_id}}}:leases", {lease.rollout_id: 1})  # as time does
    async with resources_of(stack, qwen3_dir) as resources:
        await drive(await stack.one(), resources, Hold())
    record = await stack.groups.rollout(lease.rollout_id)
    assert (record.attempt, record.failures) == (2, ["verification in the rollout's own sandbox was interrupted"])


async def test_a_sandbox_that_the_model_destroys_twice_is_its_answer(stack: Stack, qwen3_dir: Path) -> None:
    group = await open_tool_job(stack, qwen3_dir)
    for _ in range(2):
        lease = await left_in_a_call(stack, boot_id="b1")
        backend = AttachingBackend(SandboxLostError("exited while a command ran in it", by_command=True))
        async with resources_of(stack, qwen3_dir, docker=backend) as resources:
            await drive(lease, resources, Hold())
        await backend.aclose()
    record = await stack.groups.rollout(lease.rollout_id)
    assert (record.attempt, record.stop_reason, record.reward) == (2, "sandbox_destroyed", 0.0)
    assert list(record.failures) == ["sandbox_destroyed"]
    assert await stack.state(group) is GroupState.READY
