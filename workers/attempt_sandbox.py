"""The sandbox of one attempt: made at its first need, found again after a take-over, removed at the attempt's end.

Where it is lost, a snapshot of it may stand in for it.

What always holds: its name follows from rollout and attempt, so that a lost reply or a dead worker leaves nothing unknown; it is removed
by whoever ends the attempt, and kept by whoever only leaves it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sandboxes.base import Sandbox, SandboxBackend, SandboxError, SandboxFencedError, SandboxLostError, SandboxSpec
from sandboxes.shielding import to_the_end
from service.journal import Restored, Snapshotted
from service.leases import Lease
from service.progress import Progress
from service.records import TaskSpec
from workers import metrics
from workers.endings import FencedError, RestartError, because
from workers.owners import sandbox_name
from workers.resources import Resources
from workers.tools import sandbox_spec

logger = logging.getLogger(__name__)

TEARDOWN_S = 60.0
"""Removing a sandbox is shielded from cancellation for this long; past it the sweep takes over."""


MAX_RESTORES = 10
"""One attempt goes back to its snapshots so often: what comes after them may be what kills sandboxes and workers."""


class AttemptSandbox:
    """`live`: the sandbox, None before it is made. `keep`: someone else owns it, or will resume in it.

    `over`: the attempt is known to have ended, for everybody, so that nobody goes back to its snapshot.
    """

    def __init__(self, lease: Lease, task: TaskSpec, resources: Resources) -> None:
        self._lease = lease
        self._task = task
        self._resources = resources
        self.name = sandbox_name(resources.deployment_id, lease.rollout_id, lease.attempt)
        self.live: Sandbox | None = None
        self.keep = False
        self.over = False

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

    async def resume(self, progress: Progress) -> SandboxError | None:
        """Find the journaled one again, in the same life: then its calls are asked for by their ids and none runs twice (P5).

        Returns how it was lost, where it is still needed and the task's snapshots may stand in for it.

        Raises:
            RestartError: it is lost, or cannot be had, and still needed.
            FencedError: another worker has it by now.
        """
        needed = progress.scored is None
        if progress.sandbox_id is None:
            return None
        if not progress.boot_id:
            if needed:
                raise RestartError("sandbox: opened by an older version, whose calls have no ids", retry=True, counts=False)
            return None
        try:
            self.live = await self._backend.attach(progress.sandbox_id, name=self.name, fence=self._fence, boot_id=progress.boot_id)
        except SandboxError as error:
            end = because(error, what="lost with its worker")
            if needed and self.stands_in(error):
                return error
            if needed:
                raise end from error
        return None

    def stands_in(self, error: SandboxError) -> bool:
        """Whether a snapshot may help: the sandbox is lost, not to the model's own commands, and the task wants snapshots."""
        lost = isinstance(error, SandboxLostError) and not error.by_command
        return lost and self._task.sandbox.snapshot is not None

    async def snapshot(self, progress: Progress) -> Snapshotted:
        """Take one of `live`, unless processes live in it: they would be missing. One that fails is counted and costs no more than itself.

        Raises:
            FencedError: another worker has the sandbox by now.
        """
        assert self.live is not None
        assert self._task.sandbox.snapshot is not None
        began, taken, lives = time.monotonic(), "", False
        try:
            lives = await self.live.processes() > 0
            if not lives:
                taken = await self.live.snapshot(ttl_s=self._task.sandbox.snapshot.ttl_s)
        except SandboxFencedError as error:
            raise FencedError(str(error)) from error
        except SandboxError as error:
            logger.warning("no snapshot of %s: %s", self.live.id, error)
        metrics.snapshots.labels("taken" if taken else "live" if lives else "failed").inc()
        return Snapshotted(at=time.time(), id=taken, turns=progress.turns, live=lives, seconds=time.monotonic() - began)

    async def restore(self, snapshot: Snapshotted, *, at_index: int) -> Restored:
        """A new sandbox in place of the lost one, whose name it takes; `at_index`: the snapshot's. Raises RestartError, FencedError."""
        if self.live is not None:
            await self.live.detach()
        try:
            box = self.live = await self._backend.restore(snapshot.id, self._spec(), name=self.name, fence=self._fence)
        except SandboxError as error:
            raise because(error, what="its snapshot") from error
        metrics.snapshots.labels("restored").inc()
        return Restored(at=time.time(), id=box.id, boot_id=box.boot_id, cut_to=at_index, seconds=box.start_seconds)

    async def forget(self, snapshot: Snapshotted) -> None:
        """Remove one; what cannot be removed now goes when its time is over."""
        backend = self._resources.backends.get(self._task.sandbox.backend)
        if backend is None:
            return
        try:
            async with asyncio.timeout(TEARDOWN_S):
                await backend.forget_snapshot(snapshot.id)
        except (SandboxError, TimeoutError) as error:
            logger.warning("snapshot %s not removed, left to the sweep: %s", snapshot.id, error)

    @asynccontextmanager
    async def fresh(self) -> AsyncIterator[Sandbox]:
        """Another one from the same spec, for the verifier. Raises SandboxError."""
        sandbox = await self._backend.create(self._spec(), name=f"{self.name}-v", fence=self._fence)
        try:
            yield sandbox
        finally:
            await destroy(sandbox)

    async def leave(self, snapshot: Snapshotted | None) -> None:
        """Remove it, or let go of it where it is kept; and its snapshot, where the attempt is over."""
        if self.live is not None and self.keep:
            await self.live.detach()
        elif self.live is not None:
            await destroy(self.live)
        if snapshot is not None and self.over:
            await to_the_end(self.forget(snapshot))


def way_back(progress: Progress, lost: SandboxError) -> Snapshotted:
    """The snapshot to go on from.

    Raises:
        RestartError: there is none, and why.
    """
    if progress.snapshot is not None and progress.restores < MAX_RESTORES:
        return progress.snapshot
    if progress.snapshot is not None:
        why = f"this attempt went back to its snapshots {MAX_RESTORES} times"
    elif progress.snapshot_due is not None and progress.snapshot_due.live:
        why = "no snapshot was taken, since processes lived in it (a lasting shell is one: set sandbox.shell to per_call)"
    else:
        why = "no snapshot was taken before"
    raise RestartError(f"sandbox: lost: {lost}; {why}", retry=True)


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
