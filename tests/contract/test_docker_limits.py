"""Limits that hold: whatever one sandbox does, the machine and the neighbour do not notice, and the one who did it is told."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import pytest_asyncio

from sandboxes.base import ExecResult, Sandbox
from sandboxes.docker import DockerBackend
from tests.sandbox_backends import IMAGE, bash, docker_host, has_engine, named, spec

pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif(not has_engine(), reason=f"no engine that has {IMAGE}"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(90),
]
ANSWER_S = 5.0
"""For a call to the neighbour on a machine of few cores: it may be slow, it is never held up by a limit of another sandbox."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[DockerBackend]:
    async with DockerBackend(deployment_id="test-limits", docker_host=docker_host()) as made:
        yield made
        await made.sweep(keep=frozenset(), older_than_s=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def neighbour(backend: DockerBackend) -> Sandbox:
    return await backend.create(spec(), name=named())


@asynccontextmanager
async def sandbox_of(backend: DockerBackend, **changes: object) -> AsyncIterator[Sandbox]:
    sandbox = await backend.create(spec(**changes), name=named())
    try:
        yield sandbox
    finally:
        await sandbox.destroy()


@dataclass
class Abuse:
    """What a command did, and how a neighbour fared meanwhile (seconds of each of its calls)."""

    result: ExecResult
    answers_s: Sequence[float]


async def abused(sandbox: Sandbox, neighbour: Sandbox, script: str, *, timeout_s: float = 30) -> Abuse:
    answers: list[float] = []

    async def watch() -> None:
        while True:
            began = time.monotonic()
            assert (await bash(neighbour, "echo well > /tmp/w && cat /tmp/w")).stdout == b"well\n"
            answers.append(time.monotonic() - began)
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    try:
        result = await bash(sandbox, script, timeout_s=timeout_s)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return Abuse(result, answers)


async def remove(sandbox: Sandbox, script: str) -> None:
    """Past twice its limit a watched disk may end also what frees it, where that is slow: then it is asked for again."""
    for _ in range(10):
        if (await bash(sandbox, f"{script} && echo gone")).stdout == b"gone\n":
            return
    pytest.fail("the disk was never freed")


async def assert_usable(sandbox: Sandbox) -> None:
    assert await sandbox.poll()
    assert (await bash(sandbox, "echo well")).stdout == b"well\n"


async def test_a_fork_bomb(backend: DockerBackend, neighbour: Sandbox) -> None:
    async with sandbox_of(backend, pids=64) as sandbox:
        seen = await abused(sandbox, neighbour, "bomb() { bomb | bomb & }; bomb; sleep 30", timeout_s=2)
        assert seen.result.timed_out
        assert max(seen.answers_s, default=0) < ANSWER_S
        await assert_usable(sandbox)
        assert (await bash(sandbox, "ls -d /proc/[0-9]* | wc -l")).stdout.strip() in (b"4", b"5"), "nothing of it is left"


async def test_a_bomb_of_sessions_of_its_own(backend: DockerBackend) -> None:
    async with sandbox_of(backend, pids=64) as sandbox:
        script = "for i in $(seq 20); do setsid nohup sh -c 'while :; do setsid sleep 5 & wait; done' >/dev/null 2>&1 & done; sleep 30"
        assert (await bash(sandbox, script, timeout_s=1)).timed_out
        assert (await bash(sandbox, "pgrep -c sleep || true")).stdout.strip() == b"0"


async def test_memory(backend: DockerBackend, neighbour: Sandbox) -> None:
    async with sandbox_of(backend, memory_mib=64) as sandbox:
        seen = await abused(sandbox, neighbour, "python3 -c \"b = b'x' * (1 << 20); k = [b * 2 for _ in range(500)]\"")
        assert seen.result.oom_killed
        assert seen.result.exit_code == 137
        assert max(seen.answers_s, default=0) < ANSWER_S
        await assert_usable(sandbox)
        assert not (await bash(sandbox, "true")).oom_killed, "the next command is not blamed"


async def test_memory_of_a_child_only(backend: DockerBackend) -> None:
    async with sandbox_of(backend, memory_mib=64) as sandbox:
        result = await bash(sandbox, 'python3 -c "k = bytearray(500 << 20)"; echo went on')
        assert (result.oom_killed, result.stdout, result.exit_code) == (True, b"went on\n", 0)


async def test_files_in_memory_are_memory(backend: DockerBackend) -> None:
    async with sandbox_of(backend, memory_mib=64, disk_mib=512) as sandbox:
        result = await bash(sandbox, "head -c 200M /dev/zero > /dev/shm/x; echo done")
        assert b"No space" in result.stderr or result.oom_killed
        await bash(sandbox, "rm -f /dev/shm/x")
        await assert_usable(sandbox)


async def test_one_large_file(backend: DockerBackend) -> None:
    async with sandbox_of(backend, disk_mib=32) as sandbox:
        result = await bash(sandbox, "head -c 200M /dev/zero > /work/x && sleep 15; echo code $?")  # a watch comes after the writing
        assert result.disk_full or b"code 0" not in result.stdout
        await remove(sandbox, "rm -f /work/x")


async def test_a_disk_filled_by_many_files(backend: DockerBackend, neighbour: Sandbox) -> None:
    async with sandbox_of(backend, disk_mib=32, memory_mib=256) as sandbox:
        script = "i=0; while :; do i=$((i+1)); head -c 4M /dev/zero > /work/$i || exit 3; sleep 0.02; done"
        seen = await abused(sandbox, neighbour, script)
        assert seen.result.disk_full
        assert max(seen.answers_s, default=0) < ANSWER_S
        await remove(sandbox, "rm -f /work/*")
        await assert_usable(sandbox)
        assert not (await bash(sandbox, "head -c 1M /dev/zero > /work/small")).disk_full


async def test_a_million_empty_files(backend: DockerBackend, neighbour: Sandbox) -> None:
    async with sandbox_of(backend, disk_mib=32, memory_mib=256) as sandbox:
        script = "import os\nfor i in range(1000000):\n    os.close(os.open(f'/work/{i}', os.O_CREAT))\n"
        seen = await abused(sandbox, neighbour, f'exec python3 -c "{script}"')
        assert seen.result.disk_full
        assert max(seen.answers_s, default=0) < ANSWER_S
        await remove(sandbox, "find /work -type f -delete")


async def test_shared_memory_is_bounded_in_number_too(backend: DockerBackend) -> None:
    async with sandbox_of(backend, disk_mib=16) as sandbox:
        result = await bash(sandbox, "for i in $(seq 5000); do : > /dev/shm/$i || exit 3; done; echo all")
        assert result.exit_code == 3
        assert b"No space" in result.stderr


async def test_endless_output(backend: DockerBackend, neighbour: Sandbox) -> None:
    async with sandbox_of(backend) as sandbox:
        seen = await abused(sandbox, neighbour, "yes")
        assert seen.result.truncated
        assert len(seen.result.stdout) < 70_000
        assert seen.result.exit_code == 137
        assert max(seen.answers_s, default=0) < ANSWER_S
        await assert_usable(sandbox)


async def test_open_files(backend: DockerBackend) -> None:
    async with sandbox_of(backend) as sandbox:
        script = "import os\nk = []\ntry:\n    while True: k.append(os.open('/dev/null', 0))\nexcept OSError as e: print(e.errno)"
        result = await bash(sandbox, f'python3 -c "{script}"')
        assert result.stdout.strip() in (b"24", b"23") or result.oom_killed
        await assert_usable(sandbox)


async def test_a_read_only_sandbox_writes_where_it_may(backend: DockerBackend) -> None:
    async with sandbox_of(backend, read_only=True, disk_mib=16, files={"/work/given": b"x"}) as sandbox:
        for path in ("/work", "/tmp", "/var/tmp", "/run", "/root"):
            assert (await bash(sandbox, f"echo x > {path}/x")).exit_code == 0, path
        assert b"Read-only" in (await bash(sandbox, "echo x > /usr/x")).stderr
        full = await bash(sandbox, "head -c 20M /dev/zero > /work/big")
        assert b"No space" in full.stderr or full.disk_full
        many = await bash(sandbox, "for i in $(seq 5000); do : > /tmp/$i || exit 3; done; echo all")
        assert many.exit_code == 3 or many.disk_full
        await assert_usable(sandbox)


async def test_processor_time(backend: DockerBackend) -> None:
    """Three spinning processes get what one sandbox may have, measured by the kernel and not by the clock."""
    async with sandbox_of(backend, cpus=0.25) as sandbox:
        script = "for i in 1 2 3; do (while :; do :; done) & done; sleep 2; kill %1 %2 %3; wait 2>/dev/null; times | tail -1"
        result = await bash(sandbox, script)
        minutes, _, seconds = result.stdout.decode().split()[0].partition("m")
        assert int(minutes) * 60 + float(seconds.rstrip("s")) < 1.2
