"""The pool over real backends: what is claimed is as good as new, and nobody gets what another one left."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from sandboxes.base import Sandbox, SandboxSpec, SandboxSpecError
from sandboxes.pool import SandboxPool
from tests.sandbox_backends import DEPLOYMENT, bash, count, make, named, spec

pytestmark = pytest.mark.timeout(120)

DIRTY = (
    "echo secret > /tmp/left; echo 'alias ls=true' >> ~/.bashrc; (sleep 900 &) ; git config --global core.hooksPath /tmp/h; "
    "mkdir -p ~/.cache/x; touch /work/.hidden"
)
LEFT = "ls -A /tmp /work ~; cat ~/.bashrc ~/.gitconfig 2>&1; env | sort; id; pwd; hostname; ls /proc/self/fd"


@pytest_asyncio.fixture
async def pool(kind: str, root: Path) -> AsyncIterator[SandboxPool]:
    backend = make(kind, root)
    async with SandboxPool(backend, deployment_id=DEPLOYMENT, worker="w", size=2) as made:
        yield made
        await made.sweep(keep=frozenset(), older_than_s=0)
        left = await made.list()
        assert all(info.name.startswith(made.prefix) for info in left), "a sweep takes all but what is warm"
    async with make(kind, root) as after:
        assert await after.list() == [], "a closed pool leaves nothing"


async def warm(pool: SandboxPool, wanted: SandboxSpec) -> Sandbox:
    """A cold start, and a warm sandbox of the same kind after it."""
    first = await pool.create(wanted, name=named())
    await until_warm(pool)
    return first


async def until_warm(pool: SandboxPool) -> None:
    async with asyncio.timeout(30):
        while not pool.counts.warm:
            await asyncio.sleep(0.02)


async def test_case_039_a_sandbox_given_back_leaves_nothing_for_the_next(pool: SandboxPool) -> None:
    wanted = spec()
    fresh = await warm(pool, wanted)
    expected = (await bash(fresh, LEFT)).stdout
    first = await pool.create(wanted, name=named(), fence=1)
    assert (await bash(first, DIRTY)).exit_code == 0
    assert await count(first, "^sleep 900") == 1
    await first.destroy()
    await until_warm(pool)
    second = await pool.create(wanted, name=named(), fence=1)
    assert pool.counts.claimed == 2
    assert second.id != first.id
    assert (await bash(second, LEFT)).stdout == expected
    assert await count(second, "^sleep 900") == 0


async def test_a_claim_brings_name_files_setup_environment_and_fence(pool: SandboxPool) -> None:
    wanted = spec()
    await (await warm(pool, wanted)).destroy()
    name = named()
    claimed = await pool.create(
        replace(wanted, files={"/work/a.txt": b"a"}, setup=("cat a.txt > b.txt", 'echo "$WHO" >> b.txt'), env={"WHO": "me"}),
        name=name,
        fence=7,
    )
    assert (await bash(claimed, "cat /work/b.txt; echo $WHO")).stdout == b"ame\nme\n"
    assert (pool.counts.claimed, pool.counts.cold) == (1, 1)
    assert 0 < claimed.start_seconds < 5
    assert name in {info.name for info in await pool.list()}
    await claimed.detach()
    again = await pool.attach(claimed.id, fence=7, boot_id=claimed.boot_id)
    assert (await bash(again, "cat b.txt")).stdout == b"ame\n"


async def test_a_failed_setup_at_the_claim_leaves_nothing(pool: SandboxPool) -> None:
    wanted, name = spec(), named()
    await (await warm(pool, wanted)).destroy()
    with pytest.raises(SandboxSpecError, match="no such thing"):
        await pool.create(replace(wanted, setup=("echo no such thing; exit 1",)), name=name)
    assert (pool.counts.claimed, pool.counts.cold, pool.counts.dead_at_claim) == (0, 1, 0)
    assert name not in {info.name for info in await pool.list()}


async def test_a_warm_one_that_died_is_not_given_out(pool: SandboxPool) -> None:
    wanted = spec()
    await (await warm(pool, wanted)).destroy()
    (dead,) = [info for info in await pool.list() if info.name.startswith(pool.prefix)]
    await (await pool.attach(dead.id)).destroy()
    claimed = await pool.create(wanted, name=named())
    assert claimed.id != dead.id
    assert (await bash(claimed, "echo well")).stdout == b"well\n"
    assert pool.counts.dead_at_claim == 1


async def test_a_cancelled_claim_leaves_nothing(pool: SandboxPool) -> None:
    wanted, name = spec(), named()
    await (await warm(pool, wanted)).destroy()
    claim = asyncio.create_task(pool.create(replace(wanted, setup=("sleep 30",)), name=name))
    async with asyncio.timeout(10):
        while name not in {info.name for info in await pool.list()}:
            await asyncio.sleep(0.02)
    claim.cancel()
    await asyncio.wait({claim})
    assert claim.cancelled()
    assert name not in {info.name for info in await pool.list()}


async def test_claims_and_starts_cancelled_at_any_time_leave_no_orphan(pool: SandboxPool) -> None:
    await (await warm(pool, spec())).destroy()
    chance = random.Random(5)
    names = [named() for _ in range(24)]
    tasks = [asyncio.create_task(pool.create(spec(), name=name)) for name in names]
    for task in tasks[::2]:
        await asyncio.sleep(chance.random() * 0.02)
        task.cancel()
    async with asyncio.timeout(60):
        await asyncio.wait(tasks)
    made = frozenset(name for name, task in zip(names, tasks, strict=True) if not task.cancelled() and task.result())
    assert len(made) >= 12
    assert await pool.sweep(keep=made, older_than_s=0) == 0


async def test_another_workers_sweep_keeps_what_is_warm_by_its_prefix_and_a_dead_workers_goes(
    pool: SandboxPool, kind: str, root: Path
) -> None:
    await (await warm(pool, spec())).destroy()
    async with make(kind, root) as other:
        assert await other.sweep(keep=frozenset(), older_than_s=0, keep_prefixes=(pool.prefix,)) == 0
        assert pool.counts.warm == 1
        assert await other.sweep(keep=frozenset(), older_than_s=0) == 1
