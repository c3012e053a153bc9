"""The sandbox backends of this machine, as the operator's settings want them."""

import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from sandboxes.base import SandboxBackend, SandboxError
from sandboxes.docker import DockerBackend
from sandboxes.pool import SandboxPool
from sandboxes.process import ProcessBackend
from sandboxes.starting import StartLimits
from service.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backends:
    """Those that answer, by name, and what each counts. None at all is allowed: tasks without tools need no sandbox."""

    offered: dict[str, SandboxBackend] = field(default_factory=dict)
    limits: dict[str, StartLimits] = field(default_factory=dict)
    pools: dict[str, SandboxPool] = field(default_factory=dict)


async def open_backends(settings: Settings, deployment_id: str, stack: AsyncExitStack, *, worker: str = "") -> Backends:
    """They are closed with `stack`. `worker`: who keeps sandboxes warm; nobody where it is empty."""
    docker = DockerBackend(deployment_id=deployment_id, docker_host=settings.docker_host, limits=start_limits(settings))
    found = Backends()
    if not (worker and settings.sandbox_pool):
        await _offer(found, docker, docker.limits, stack)
    else:
        pool = SandboxPool(docker, deployment_id=deployment_id, worker=worker, size=settings.sandbox_pool)
        if await _offer(found, pool, pool.limits, stack):
            found.pools[pool.name] = pool
    if settings.process_backend:
        process = ProcessBackend(deployment_id=deployment_id, root=settings.data_dir / "sandboxes", limits=start_limits(settings))
        await _offer(found, process, process.limits, stack)
    return found


async def _offer(found: Backends, backend: SandboxBackend, limits: StartLimits, stack: AsyncExitStack) -> bool:
    """Whether it answers."""
    stack.push_async_callback(backend.aclose)
    try:
        await backend.ping()
    except SandboxError as error:
        logger.warning("sandbox backend %s is not offered: %s", backend.name, error)
        return False
    found.offered[backend.name], found.limits[backend.name] = backend, limits
    return True


def start_limits(settings: Settings) -> StartLimits:
    """One backend's; a burst is what a second allows."""
    burst = max(1, round(settings.sandbox_starts_per_s))
    return StartLimits(max_starting=settings.max_starting, starts_per_s=settings.sandbox_starts_per_s, burst=burst)
