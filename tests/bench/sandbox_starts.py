"""From nothing to the first answered command, by each way to start; taking turns."""

import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable

from sandboxes.base import Sandbox
from tests.bench.sandbox_variants import CAP, SPEC, Fleet, in_thread

COLD, POOLED, BARE_START, DOCKER_PY_START = "ours, cold", "ours, from the pool", "bare agent, shared network", "docker-py create+start+exec"
TRUE = ["sh", "-c", "true"]

Removal = Awaitable[None]


async def measure_starts(fleet: Fleet, count: int) -> dict[str, list[float]]:
    """Milliseconds, `count` of each; what was started is removed outside the time taken. The first of each warms up and does not count."""
    ways: dict[str, Callable[[], Awaitable[Removal]]] = {
        COLD: lambda: cold(fleet),
        BARE_START: lambda: bare(fleet),
        DOCKER_PY_START: lambda: docker_py(fleet),
    }
    times: dict[str, list[float]] = defaultdict(list)
    for number in range(count + 1):
        for name in random.sample(list(ways), len(ways)):
            began = time.perf_counter()
            removal = await ways[name]()
            took_ms = (time.perf_counter() - began) * 1000
            await removal
            if number:
                times[name].append(took_ms)
    return dict(times)


async def cold(fleet: Fleet) -> Removal:
    sandbox = await fleet.backend.create(SPEC, name=fleet.name())
    await first_call(sandbox)
    return sandbox.destroy()


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
