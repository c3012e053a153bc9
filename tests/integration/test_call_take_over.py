"""P5 on real sandboxes: whatever a dead worker left of a call, the next one shows the model what that one call did."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import SecretStr

from sandboxes.base import Sandbox, SandboxBackend, SandboxFencedError
from service.journal import AnyEntry, Call, Observed, Opened, Prompted, Replied, SandboxOpened, encode, pack_ids
from service.keys import JobKeys
from service.leases import Lease
from service.records import Limits, Message, SandboxFields, TaskSpec
from service.settings import Settings
from service.weight_store import WeightStore
from tests.sandbox_backends import IMAGE, bash, has_engine, has_namespaces, make
from tests.store_stack import Stack, store_at
from workers.attempt_sandbox import AttemptSandbox
from workers.owners import sandbox_name
from workers.resources import JobContexts, Resources
from workers.rollout import Hold, drive
from workers.tools import run_call, sandbox_spec

pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]

DEPLOYMENT = "take-over"
COUNTED = "echo x >> /work/log; sleep {s}; wc -l < /work/log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    """A rollout whose worker is gone: what it had, and the lease of who comes next."""

    task: TaskSpec
    call: Call
    call_id: str
    sandbox: Sandbox
    lease: Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Two workers' views of one machine: `first` is the one that dies, `resources` are the second's."""

    kind: str
    stack: Stack
    first: SandboxBackend
    resources: Resources

    async def left(self, call: Call) -> Dead:
        """A worker opened the sandbox and journaled the call; the rest is the test's."""
        task = TaskSpec(
            task_id="t",
            messages=[Message(role="user", content="hi")],
            tools=["bash", "edit_file"],
            sandbox=SandboxFields(backend=self.kind, image=IMAGE, memory_mib=64, files={"/work/f": "one\n"}),  # type: ignore[arg-type]
            limits=Limits(tool_s=20.0),
        )
        await self.stack.groups.submit(self.stack.job_id, [task])
        lease = await self.stack.one()
        name = sandbox_name(DEPLOYMENT, lease.rollout_id, 1)
        sandbox = await self.first.create(sandbox_spec(task, labels={}, start_s=30), name=name, fence=int(lease.fence))
        entries: list[AnyEntry] = [Opened(at=1.0, attempt=1, worker="w1"), Prompted(at=1.0, token_ids=pack_ids([1]))]
        entries.append(Replied(at=1.0, content="", calls=[call]))
        await self.stack.leases.append(
            lease, [*entries, SandboxOpened(at=1.0, id=sandbox.id, seconds=0.1, boot_id=sandbox.boot_id)], at_index=0
        )
        call_id = AttemptSandbox(lease, task, self.resources).call_id(call.id)
        await self.stack.store.redis.zadd(f"rw:{{{self.stack.job_id}}}:leases", {lease.rollout_id: 1})  # as time does
        return Dead(task=task, call=call, call_id=call_id, sandbox=sandbox, lease=await self.stack.one())

    @asynccontextmanager
    async def taken_over(self, dead: Dead) -> AsyncIterator[Observed]:
        """The next worker's answer to the call, as journaled; its sandbox lives in the body."""
        driving = asyncio.create_task(drive(dead.lease, self.resources, Hold()))
        try:
            async with asyncio.timeout(30):
                while not (found := await self._observed(dead.lease)):
                    await asyncio.sleep(0.05)
            yield found[0]
        finally:
            driving.cancel()
            await asyncio.gather(driving, return_exceptions=True)

    async def _observed(self, lease: Lease) -> list[Observed]:
        return [entry for entry in await self.stack.leases.journal(lease.rollout_id) if isinstance(entry, Observed)]


@pytest.fixture(params=[pytest.param("docker", marks=pytest.mark.docker), pytest.param("process", marks=pytest.mark.process)])
async def scene(request: pytest.FixtureRequest, empty_redis_url: str, tmp_path: Path, qwen3_dir: Path) -> AsyncIterator[Scene]:
    kind: str = request.param
    if not (has_engine() if kind == "docker" else has_namespaces()):
        pytest.skip(f"no {kind} sandboxes here")
    settings = Settings(redis_url=SecretStr(empty_redis_url), tokenizer_roots=[qwen3_dir.parent])
    first, second = (make(kind, tmp_path, deployment_id=DEPLOYMENT) for _ in range(2))
    async with store_at(empty_redis_url) as store, aiohttp.ClientSession() as http, first, second:
        stack = Stack(store)
        await stack.open_job(group_size=1, model={"tokenizer": str(qwen3_dir), "renderer": "qwen3", "context_tokens": 1000})
        async with JobContexts(settings, stack.jobs, WeightStore(stack.store)) as contexts:
            resources = Resources(
                settings=settings,
                worker="w2",
                deployment_id=DEPLOYMENT,
                leases=stack.leases,
                groups=stack.groups,
                contexts=contexts,
                backends={kind: second},
                http=http,
                verifying=asyncio.Semaphore(1),
                stopping=asyncio.Event(),
            )
            try:
                yield Scene(kind=kind, stack=stack, first=first, resources=resources)
            finally:
                await second.sweep(keep=frozenset(), older_than_s=0)


def bash_call(command: str) -> Call:
    return Call(id="call_1_0_ab", name="bash", arguments=json.dumps({"command": command}))


async def lines(sandbox: Sandbox) -> bytes:
    return (await bash(sandbox, "cat /work/log")).stdout


async def test_a_call_that_ended_before_its_journal_entry_case_065(scene: Scene) -> None:
    dead = await scene.left(bash_call(COUNTED.format(s=0)))
    seen = await run_call(dead.sandbox, dead.task, dead.call, call_id=dead.call_id)
    await dead.sandbox.detach()
    async with scene.taken_over(dead) as observed:
        assert (observed.text, observed.seconds) == (seen.text, seen.seconds) == ("1\n", seen.seconds)


@pytest.mark.parametrize("how", ["killed", "cancelled"])
async def test_a_call_that_still_runs_case_065(scene: Scene, how: str) -> None:
    """`killed`: the worker's connection is gone. `cancelled`: it left in order, without waiting for the command's end."""
    dead = await scene.left(bash_call(COUNTED.format(s=2)))
    running = asyncio.create_task(run_call(dead.sandbox, dead.task, dead.call, call_id=dead.call_id))
    while not await lines(dead.sandbox):
        await asyncio.sleep(0.05)
    if how == "cancelled":
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await dead.sandbox.detach()
    await asyncio.gather(running, return_exceptions=True)
    async with scene.taken_over(dead) as observed:
        assert observed.text == "1\n"
        assert observed.seconds >= 2.0
    assert (await scene.resources.groups.rollout(dead.lease.rollout_id)).attempt == 1


async def test_a_call_that_never_ran_case_065(scene: Scene) -> None:
    dead = await scene.left(bash_call(COUNTED.format(s=0)))
    await dead.sandbox.detach()
    async with scene.taken_over(dead) as observed:
        assert observed.text == "1\n"


async def test_an_edit_is_made_once_case_065(scene: Scene) -> None:
    """Made again it would find the old passage in what it wrote."""
    arguments: dict[str, Any] = {"path": "/work/f", "old_text": "one", "new_text": "two one"}
    dead = await scene.left(Call(id="call_1_0_ab", name="edit_file", arguments=json.dumps(arguments)))
    await run_call(dead.sandbox, dead.task, dead.call, call_id=dead.call_id)
    await dead.sandbox.detach()
    async with scene.taken_over(dead) as observed:
        assert observed.text == "replaced 1 passage in /work/f"
        again = await scene.first.attach(dead.sandbox.id, fence=int(dead.lease.fence))
        assert (await bash(again, "cat /work/f")).stdout == b"two one\n"


async def test_the_worker_before_can_do_nothing_any_more(scene: Scene) -> None:
    dead = await scene.left(bash_call(COUNTED.format(s=0)))
    async with scene.taken_over(dead) as observed:
        assert observed.text == "1\n"
        with pytest.raises(SandboxFencedError):
            await bash(dead.sandbox, "echo x >> /work/log", call_id="late")
        with pytest.raises(SandboxFencedError):
            await scene.first.attach(dead.sandbox.id, fence=int(dead.lease.fence) - 1)
        again = await scene.first.attach(dead.sandbox.id, fence=int(dead.lease.fence))
        assert await lines(again) == b"x\n"


async def test_a_journal_that_names_somebody_elses_sandbox(scene: Scene) -> None:
    """That attempt begins anew; whoever holds the sandbox is not even fenced."""
    mine = await scene.left(bash_call(COUNTED.format(s=0)))
    theirs = await scene.first.create(
        sandbox_spec(mine.task, labels={}, start_s=30), name=sandbox_name(DEPLOYMENT, f"{scene.stack.job_id}-g9-r0", 1), fence=1
    )
    await mine.sandbox.detach()
    opened = SandboxOpened(at=1.0, id=theirs.id, seconds=0.1, boot_id=theirs.boot_id)
    await scene.stack.store.redis.lset(JobKeys(scene.stack.job_id).journal(mine.lease.rollout_id), 3, encode(opened))
    await drive(mine.lease, scene.resources, Hold())
    [failure] = (await scene.resources.groups.rollout(mine.lease.rollout_id)).failures
    assert failure.startswith("sandbox: lost with its worker: ")
    assert "-g9-r0-a1, not " in failure
    assert (await bash(theirs, "cat /work/f")).stdout == b"one\n"
