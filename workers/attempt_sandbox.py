"""The sandbox of one attempt: made at its first need, found again after a take-over, removed at the attempt's end.

What always holds: its name follows from rollout and attempt, so that a lost reply or a dead worker leaves nothing unknown; it is removed
by whoever ends the attempt, and kept by whoever only leaves it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sandboxes.base import Sandbox, SandboxBackend, SandboxError, SandboxSpec
from service.leases import Lease
from service.records import TaskSpec
from workers import metrics
from workers.endings import RestartError, because
from workers.resources import Resources
from workers.tools import sandbox_spec

logger = logging.getLogger(__name__)

TEARDOWN_S = 60.0
"""Removing a sandbox is shielded from cancellation for this long; past it the sweep takes over."""


class AttemptSandbox:
    """`live`: the sandbox, None before it is made. `keep`: someone else owns it, or will resume in it."""

    def __init__(self, lease: Lease, task: TaskSpec, resources: Resources) -> None:
        self._lease = lease
        self._task = task
        self._resources = resources
        self.name = sandbox_name(resources.deployment_id, lease.rollout_id, lease.attempt)
        self.live: Sandbox | None = None
        self.keep = False

    @property
    def _backend(self) -> SandboxBackend:
        name = self._task.sandbox.backend
        backend = self._resources.backends.get(name)
        if backend is None:
            raise RestartError(f"sandbox: backend {name!r} is not offered by worker {self._resources.worker}", retry=True)
        return backend

    def _spec(self) -> SandboxSpec:
        labels = {
            "tenant": self._lease.tenant,
            "job": self._lease.job_id,
            "rollout": self._lease.rollout_id,
            "attempt": str(self._lease.attempt),
        }
        return sandbox_spec(self._task, labels=labels, start_s=self._resources.settings.sandbox_start_s)

    async def create(self) -> Sandbox:
        """Make it; its name must be journaled before. Raises RestartError."""
        try:
            self.live = await self._backend.create(self._spec(), name=self.name)
        except SandboxError as error:
            raise because(error, what="the sandbox") from error
        metrics.sandbox_seconds.observe(self.live.start_seconds)
        return self.live

    async def attach(self, sandbox_id: str, *, needed: bool) -> None:
        """Find it again. One that is lost ends the attempt, if it is still `needed` (RestartError)."""
        try:
            self.live = await self._backend.attach(sandbox_id)
        except SandboxError as error:
            if needed:
                raise RestartError(f"sandbox: lost with its worker: {error}", retry=True) from error

    @asynccontextmanager
    async def fresh(self) -> AsyncIterator[Sandbox]:
        """Another one from the same spec, for the verifier. Raises SandboxError."""
        sandbox = await self._backend.create(self._spec(), name=f"{self.name}-v")
        try:
            yield sandbox
        finally:
            await destroy(sandbox)

    async def leave(self) -> None:
        if self.live is not None and not self.keep:
            await destroy(self.live)


def sandbox_name(deployment_id: str, rollout_id: str, attempt: int) -> str:
    """The name of an attempt's sandbox; its verifier's has `-v` behind it."""
    return f"rw-{deployment_id}-{rollout_id}-a{attempt}"


async def destroy(sandbox: Sandbox) -> None:
    """Remove it whatever happens to us; what cannot be removed now is the sweep's."""
    removal = asyncio.ensure_future(_destroy(sandbox))
    try:
        await asyncio.shield(removal)
    except asyncio.CancelledError:
        await removal
        raise


async def _destroy(sandbox: Sandbox) -> None:
    try:
        async with asyncio.timeout(TEARDOWN_S):
            await sandbox.destroy()
    except (SandboxError, TimeoutError) as error:
        metrics.leaks.inc()
        logger.warning("sandbox %s not removed, left to the sweep: %s", sandbox.id, error)
