"""The sandbox of one attempt: made at its first need, found again after a take-over, removed at the attempt's end.

What always holds: its name follows from rollout and attempt, so that a lost reply or a dead worker leaves nothing unknown; it is removed
by whoever ends the attempt, and kept by whoever only leaves it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sandboxes.base import Sandbox, SandboxBackend, SandboxError, SandboxFencedError, SandboxSpec
from sandboxes.shielding import to_the_end
from service.journal import Progress
from service.leases import Lease
from service.records import TaskSpec
from workers import metrics
from workers.endings import RestartError, because
from workers.owners import sandbox_name
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

    @property
    def _fence(self) -> int:
        return int(self._lease.fence)

    def call_id(self, call_id: str) -> str:
        """What a tool call of this attempt is called in the sandbox."""
        return f"{self._lease.rollout_id}/a{self._lease.attempt}/{call_id}"

    def _spec(self) -> SandboxSpec:
        labels = {
            "tenant": self._lease.tenant,
            "job": self._lease.job_id,
            "rollout": self._lease.rollout_id,
            "attempt": str(self._lease.attempt),
        }
        return sandbox_spec(self._task, labels=labels, start_s=self._resources.settings.sandbox_start_s)

    async def create(self) -> Sandbox:
        """Make it; its name must be journaled before. Raises RestartError, FencedError."""
        try:
            self.live = await self._backend.create(self._spec(), name=self.name, fence=self._fence)
        except SandboxError as error:
            raise because(error, what="the sandbox") from error
        metrics.sandbox_seconds.observe(self.live.start_seconds)
        return self.live

    async def resume(self, progress: Progress) -> None:
        """Find the journaled one again, in the same life: then its calls are asked for by their ids and none runs twice (P5).

        Raises:
            RestartError: it is lost, and still needed.
            FencedError: another worker has it by now.
        """
        needed = progress.scored is None
        if progress.sandbox_id is None:
            return
        if not progress.boot_id:
            if needed:
                raise RestartError("sandbox: opened by an older version, whose calls have no ids", retry=True, counts=False)
            return
        try:
            self.live = await self._backend.attach(progress.sandbox_id, name=self.name, fence=self._fence, boot_id=progress.boot_id)
        except SandboxError as error:
            end = because(error, what="lost with its worker")
            if needed:
                raise end from error

    @asynccontextmanager
    async def fresh(self) -> AsyncIterator[Sandbox]:
        """Another one from the same spec, for the verifier. Raises SandboxError."""
        sandbox = await self._backend.create(self._spec(), name=f"{self.name}-v", fence=self._fence)
        try:
            yield sandbox
        finally:
            await destroy(sandbox)

    async def leave(self) -> None:
        """Remove it, or let go of it where it is kept."""
        if self.live is None:
            return
        if self.keep:
            await self.live.detach()
        else:
            await destroy(self.live)


async def destroy(sandbox: Sandbox) -> None:
    """Remove it whatever happens to us; what cannot be removed now is the sweep's."""
    await to_the_end(_destroy(sandbox))


async def _destroy(sandbox: Sandbox) -> None:
    try:
        async with asyncio.timeout(TEARDOWN_S):
            await sandbox.destroy()
    except SandboxFencedError:
        logger.info("sandbox %s is another worker's: left alone", sandbox.id)
    except (SandboxError, TimeoutError) as error:
        metrics.leaks.inc()
        logger.warning("sandbox %s not removed, left to the sweep: %s", sandbox.id, error)
