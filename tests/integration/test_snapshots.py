"""Snapshots on a real engine: a rollout whose sandbox is lost with its worker goes on from the last one, or begins anew and says why."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sandboxes.channel_attachment import Patience
from sandboxes.docker import DockerBackend
from service.journal import (
    AnyEntry,
    Call,
    Extended,
    Generated,
    Observed,
    Opened,
    Prompted,
    Replied,
    Restored,
    SandboxOpened,
    Snapshotted,
    pack_ids,
    pack_logprobs,
)
from service.leases import Lease
from service.progress import Progress
from service.records import Message, SandboxFields, SnapshotFields, TaskSpec
from tests.integration.test_worker import resources_of
from tests.sandbox_backends import IMAGE, bash, docker_host, has_engine, make
from tests.store_stack import Stack, store_at
from workers.attempt_sandbox import AttemptSandbox
from workers.resources import Resources
from workers.rollout import Hold, drive
from workers.tools import run_call

pytestmark = [pytest.mark.redis, pytest.mark.docker, pytest.mark.timeout(60)]

DEPLOYMENT = "test"
TASK = TaskSpec(
    task_id="t",
    messages=[Message(role="user", content="hi")],
    tools=["bash"],
    sandbox=SandboxFields(image=IMAGE, memory_mib=64, shell="per_call", snapshot=SnapshotFields(every_turns=1)),
)


def sampled() -> Generated:
    ids, logprobs = pack_ids([5, 6, 7]), pack_logprobs([-0.5] * 3)
    return Generated(at=1.0, token_ids=ids, logprobs=logprobs, spans=[(0, 0, 0, 3)], finish="stop", generator="g", seconds=0.1)


@dataclass
class Attempt:
    """A worker's attempt, made turn by turn: `entries` is its journal."""

    stack: Stack
    lease: Lease
    sandbox: AttemptSandbox
    entries: list[AnyEntry] = field(default_factory=list)

    async def open(self) -> None:
        box = await self.sandbox.create()
        self.entries += [Opened(at=1.0, attempt=1, worker="w0"), Prompted(at=1.0, token_ids=pack_ids([1, 2]))]
        self.entries.append(SandboxOpened(at=1.0, id=box.id, seconds=0.1, boot_id=box.boot_id))

    async def turn(self, command: str) -> Observed:
        number = Progress(self.entries).turns
        call = Call(id=f"call_{number}", name="bash", arguments=f'{{"command": "{command}"}}')
        assert self.sandbox.live is not None
        observed = await run_call(self.sandbox.live, TASK, call, call_id=self.sandbox.call_id(call.id))
        self.entries += [
            sampled(),
            Replied(at=1.0, content="", calls=[call]),
            observed,
            Extended(at=1.0, token_ids=pack_ids([8, 9])),
        ]
        return observed

    async def snapshot(self) -> Snapshotted:
        taken = await self.sandbox.snapshot(Progress(self.entries))
        self.entries.append(taken)
        return taken

    def kill(self) -> None:
        assert self.sandbox.live is not None
        subprocess.run(["docker", "kill", self.sandbox.live.id], check=True, capture_output=True)

    async def lost(self) -> Lease:
        """The worker and the sandbox die; the lease of who comes next."""
        lease = await self.left()
        self.kill()
        return lease

    async def left(self) -> Lease:
        """The worker dies; the lease of who comes next."""
        assert self.sandbox.live is not None
        await self.stack.leases.append(self.lease, self.entries, at_index=0)
        await self.sandbox.live.detach()
        await self.stack.store.redis.zadd(f"rw:{{{self.stack.job_id}}}:leases", {self.lease.rollout_id: 1})  # as time does
        return await self.stack.one()


@pytest.fixture
async def stack(empty_redis_url: str) -> AsyncIterator[Stack]:
    if not has_engine():
        pytest.skip("no docker sandboxes here")
    async with store_at(empty_redis_url) as store:
        yield Stack(store)


@asynccontextmanager
async def scene(stack: Stack, tokenizer: Path) -> AsyncIterator[tuple[Attempt, DockerBackend, Resources]]:
    await stack.open_job(group_size=1, model={"tokenizer": str(tokenizer), "renderer": "qwen3", "context_tokens": 1000})
    await stack.groups.submit(stack.job_id, [TASK])
    lease = await stack.one()
    backend = make("docker", tokenizer, deployment_id=DEPLOYMENT)
    assert isinstance(backend, DockerBackend)
    async with backend, resources_of(stack, tokenizer, docker=backend) as resources:
        attempt = Attempt(stack, lease, AttemptSandbox(lease, TASK, resources))
        try:
            await attempt.open()
            yield attempt, backend, resources
        finally:
            await backend.sweep(keep=frozenset(), older_than_s=0)
            for snapshot in await snapshots(backend):
                await backend.forget_snapshot(snapshot)


async def snapshots(backend: DockerBackend) -> list[str]:
    return [name for name in await backend.images() if name.startswith("rollway-snapshot:")]


async def test_the_next_worker_goes_on_from_the_snapshot(stack: Stack, qwen3_dir: Path) -> None:
    async with scene(stack, qwen3_dir) as (attempt, backend, resources):
        await attempt.turn("echo one > kept; cd /tmp; x=1")
        assert (await attempt.turn("pwd; echo ${x-unset}")).text == "/work\nunset\n"  # each call has a shell of its own
        taken = await attempt.snapshot()
        assert (taken.live, taken.turns, taken.id != "") == (False, 2, True)
        before = len(attempt.entries)
        await attempt.turn("echo two > later")
        await attempt.turn("rm kept")
        lease = await attempt.lost()
        driving = asyncio.create_task(drive(lease, resources, Hold()))
        async with asyncio.timeout(30):
            while not isinstance(last := (await stack.leases.journal(lease.rollout_id))[-1], Restored):
                await asyncio.sleep(0.05)
        assert last.cut_to == before - 1
        progress = Progress(await stack.leases.journal(lease.rollout_id))
        assert (progress.turns, progress.tool_calls, progress.sampled, progress.discarded) == (2, 2, 6, 6)
        assert (await stack.groups.rollout(lease.rollout_id)).sandbox_id == last.id
        box = await backend.attach(last.id, name=attempt.sandbox.name, fence=int(lease.fence), boot_id=last.boot_id)
        assert (await bash(box, "cd /work && cat kept; ls")).stdout == b"one\nkept\n"
        await box.detach()
        driving.cancel()
        await asyncio.gather(driving, return_exceptions=True)
        assert await snapshots(backend) == [taken.id]


async def test_a_worker_whose_sandbox_is_killed_goes_on_from_the_snapshot(stack: Stack, qwen3_dir: Path) -> None:
    async with scene(stack, qwen3_dir) as (attempt, backend, resources):
        await attempt.turn("echo one > kept")
        await attempt.snapshot()
        call = Call(id="call_1", name="bash", arguments='{"command": "echo two > later; sleep 50"}')
        attempt.entries += [sampled(), Replied(at=1.0, content="", calls=[call])]
        lease = await attempt.left()
        driving = asyncio.create_task(drive(lease, resources, Hold()))
        assert attempt.sandbox.live is not None
        async with asyncio.timeout(30):
            while "sleep 50" not in subprocess.run(["docker", "top", attempt.sandbox.live.id], capture_output=True, text=True).stdout:
                await asyncio.sleep(0.05)
            attempt.kill()
            while not isinstance(last := (await stack.leases.journal(lease.rollout_id))[-1], Restored):
                await asyncio.sleep(0.05)
        box = await backend.attach(last.id, name=attempt.sandbox.name, fence=int(lease.fence), boot_id=last.boot_id)
        assert (await bash(box, "ls /work")).stdout == b"kept\n"
        await box.detach()
        driving.cancel()
        await asyncio.gather(driving, return_exceptions=True)


async def test_a_process_that_lives_is_in_no_snapshot(stack: Stack, qwen3_dir: Path) -> None:
    async with scene(stack, qwen3_dir) as (attempt, backend, resources):
        await attempt.turn("sleep 1000 > /dev/null 2>&1 &")
        taken = await attempt.snapshot()
        assert (taken.live, taken.id) == (True, "")
        lease = await attempt.lost()
        await drive(lease, resources, Hold())
        record = await stack.groups.rollout(lease.rollout_id)
        assert record.attempt == 2
        assert "set sandbox.shell to per_call" in record.failures[0]
        assert await snapshots(backend) == []


async def test_a_snapshot_that_is_gone_ends_the_attempt(stack: Stack, qwen3_dir: Path) -> None:
    async with scene(stack, qwen3_dir) as (attempt, backend, resources):
        await attempt.turn("echo one > kept")
        await backend.forget_snapshot((await attempt.snapshot()).id)
        lease = await attempt.lost()
        await drive(lease, resources, Hold())
        record = await stack.groups.rollout(lease.rollout_id)
        assert record.attempt == 2
        assert "is gone, or past its time" in record.failures[0]


async def test_one_that_fails_costs_no_more_than_itself(stack: Stack, qwen3_dir: Path) -> None:
    async with scene(stack, qwen3_dir) as (attempt, backend, _):
        await attempt.turn("echo one > kept")
        assert attempt.sandbox.live is not None
        await backend.sweep(keep=frozenset(), older_than_s=0)
        failed = await attempt.snapshot()
        assert (failed.id, failed.live) == ("", False)


async def test_a_worker_that_takes_over_while_a_snapshot_is_taken_waits_for_it(stack: Stack, qwen3_dir: Path) -> None:
    """The engine stops a sandbox for that long, whatever the patience is with one that runs; its silence is no death."""
    hasty = DockerBackend(deployment_id=DEPLOYMENT, docker_host=docker_host(), patience=Patience(connect_s=0.3, reconnect_s=0.5))
    async with scene(stack, qwen3_dir) as (attempt, _, _), hasty:
        assert attempt.sandbox.live is not None
        box = attempt.sandbox.live
        await box.detach()
        subprocess.run(["docker", "pause", box.id], check=True, capture_output=True)
        attaching = asyncio.create_task(hasty.attach(box.id, fence=2**53, boot_id=box.boot_id))
        await asyncio.sleep(2)
        assert not attaching.done()
        subprocess.run(["docker", "unpause", box.id], check=True, capture_output=True)
        again = await attaching
        assert (await bash(again, "echo here")).stdout == b"here\n"
        await again.detach()
