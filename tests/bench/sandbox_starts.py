"""From nothing to the first answered command, by each way to start; taking turns."""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable

from sandboxes.base import Sandbox
from sandboxes.docker import DockerBackend
from sandboxes.pool import SandboxPool
from tests.bench.sandbox_variants import CAP, SPEC, Fleet, in_thread

COLD, POOLED, BARE_START, DOCKER_PY_START = "ours, cold", "ours, from the pool", "bare agent, shared network", "docker-py create+start+exec"
CLAIM = "ours, the claim alone"
TRUE = ["sh", "-c", "true"]
WARM_WITHIN_S = 20.0

Removal = Awaitable[None]
Times = dict[str, list[float]]


async def measure_starts(fleet: Fleet, count: int) -> Times:
    """Milliseconds, `count` of each; what was started is removed outside the time taken. The first of each warms up and does not count."""
    times: Times = defaultdict(list)
    backend = DockerBackend(deployment_id=fleet.bench_id)
    async with SandboxPool(backend, deployment_id=fleet.bench_id, worker="bench", size=1) as pool:
        first = await pool.create(SPEC, name=fleet.name())  # a pool warms what was asked for
        await first.destroy()
        await until_warm(pool)
        ways: dict[str, Callable[[], Awaitable[Removal]]] = {
            COLD: lambda: cold(fleet),
            BARE_START: lambda: bare(fleet),
            DOCKER_PY_START: lambda: docker_py(fleet),
            POOLED: lambda: pooled(fleet, pool, times),
        }
        for number in range(count + 1):
            for name in random.sample(list(ways), len(ways)):
                began = time.perf_counter()
                removal = await ways[name]()
                times[name].append((time.perf_counter() - began) * 1000)
                await removal
            if number == 0:
                times.clear()
    return dict(times)


async def cold(fleet: Fleet) -> Removal:
    sandbox = await fleet.backend.create(SPEC, name=fleet.name())
    await first_call(sandbox)
    return sandbox.destroy()


async def pooled(fleet: Fleet, pool: SandboxPool, times: Times) -> Removal:
    began = time.perf_counter()
    sandbox = await pool.create(SPEC, name=fleet.name())
    times[CLAIM].append((time.perf_counter() - began) * 1000)
    await first_call(sandbox)

    async def remove() -> None:
        await sandbox.destroy()
        await until_warm(pool)

    return remove()


async def until_warm(pool: SandboxPool) -> None:
    """So that a refill is in nobody's way."""
    async with asyncio.timeout(WARM_WITHIN_S):
        while pool.counts.warm == 0:
            await asyncio.sleep(0.02)


async def bare(fleet: Fleet) -> Removal:
    container_id, client = await fleet.start_bare()
    await client.run(TRUE)
    client.close()
    return fleet.remove(container_id)


async def docker_py(fleet: Fleet) -> Removal:
    container = await in_thread(fleet.threads, fleet.start_docker_py)
    await in_thread(fleet.threads, lambda: container.exec_run(TRUE))
    assert container.id is not None
    return fleet.remove(container.id)


async def first_call(sandbox: Sandbox) -> None:
    await sandbox.exec(TRUE, timeout_s=60, max_output_bytes=CAP)
