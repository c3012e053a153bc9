"""A worker: takes leases for its free slots, keeps them alive, drives their rollouts, sweeps what dead workers left.

Every leased rollout leaves exactly one way: finished, restarted, released, or its lease runs out and another worker takes it.
Stopping: lease nothing more; rollouts are handed back at their next step; after `grace_s` what still runs is cancelled and released.
"""

import asyncio
import contextvars
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from sandboxes.base import SandboxBackend, SandboxError
from sandboxes.pool import SandboxPool
from service.errors import LeaseLostError, NotFoundError, UnavailableError
from service.fair_share import fill
from service.jobs import Jobs
from service.leases import Lease
from service.steering import Steering
from service.store import Store
from workers import metrics
from workers.owners import live_owners
from workers.resources import Resources
from workers.rollout import Hold, drive

logger = logging.getLogger(__name__)

IDLE_S = 0.05
"""How long a worker with free slots waits before it asks for work again; doubles up to MAX_IDLE_S while there is none."""
MAX_IDLE_S = 0.4
HEARTBEAT_S = 2.0
ASK_S = 4.0
"""For a backend to say what it has; less than a heartbeat lasts."""
IMAGES_S = 30.0
"""How old what a worker says of its backends may be."""
MAX_IMAGES = 1000
WORK_SHARE, TEARDOWN_SHARE, RELEASE_SHARE = 0.7, 0.15, 0.1
"""Of the grace time, at most: until the next step, for the end of what is cancelled then, and for handing leases back."""
MIN_RELEASE_S = 1.0
"""For handing leases back, however short the grace time is."""
SWEEP_AGE_S = 60.0
"""A sandbox younger than this is never swept: its owner may be about to journal it."""

T = TypeVar("T")

current_rollout: contextvars.ContextVar[str] = contextvars.ContextVar("rollout_id", default="-")


def longest_leave_s(grace_s: float) -> float:
    """The longest that a worker takes to leave: `grace_s`, or what handing leases back adds to one that is too short for that."""
    return max(grace_s, grace_s * (WORK_SHARE + TEARDOWN_SHARE) + MIN_RELEASE_S)


@dataclass(slots=True)
class Held:
    """A lease we hold, the task that drives it, and when (loop time) the lease ends unless renewed."""

    lease: Lease
    task: asyncio.Task[None]
    deadline: float
    hold: Hold


class Worker:
    """One worker process's loop. `run` returns after `resources.stopping` was set and everything is handed back."""

    def __init__(self, store: Store, jobs: Jobs, resources: Resources) -> None:
        self._store = store
        self._jobs = jobs
        self._resources = resources
        self._settings = resources.settings
        self._held: dict[str, Held] = {}
        self._turn = 0
        self.name = resources.worker

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:  # without its renewals a worker only does harm: a bug in any loop ends it
            loops = (self._leasing, self._renewing, self._beating, self._sweeping, self._steering)
            leasing, *background = [group.create_task(loop()) for loop in loops]
            try:
                await self._resources.stopping.wait()
            finally:
                await self._drain(leasing)
                for task in (leasing, *background):
                    task.cancel()

    # --------------------------------------------------------------------------------------------------------------- leasing

    async def _leasing(self) -> None:
        pause = IDLE_S
        while not self._resources.stopping.is_set():
            try:
                taken = await self._take()
            except UnavailableError as error:
                logger.warning("no leases: %s", error)
                taken = 0
            pause = IDLE_S if taken else min(pause * 2, MAX_IDLE_S)
            await self._wait(pause)

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._resources.stopping.wait()
        except TimeoutError:
            pass

    async def _take(self) -> int:
        """Fill the free slots, each job with its share."""
        free = self._settings.worker_rollouts - len(self._held)
        if free <= 0:
            return 0
        job_ids = await self._jobs.ids()
        await self._resources.contexts.forget(frozenset(job_ids) | {held.lease.job_id for held in self._held.values()})
        self._turn = (self._turn + 1) % max(1, len(job_ids))
        turns = job_ids[self._turn :] + job_ids[: self._turn]  # of two with the same load, now the one and now the other is first
        return await fill(free, await self._resources.leases.loads(turns), self._take_from)

    async def _take_from(self, job_id: str, n: int) -> int:
        asked_at = asyncio.get_running_loop().time()
        try:
            leases = await self._resources.leases.take(job_id, self.name, n=n)
        except NotFoundError:
            await self._jobs.free(job_id)
            return 0
        except UnavailableError as error:
            await self._store.ping()  # only one node of a cluster is away, or the job's slot on its way: the others' jobs go on
            logger.warning("no leases of %s: %s", job_id, error)
            return 0
        for lease in leases:
            older = self._held.get(lease.rollout_id)
            if older is not None:  # our own lease ran out and came back to us
                self._let_go([older])
            hold = Hold()
            task = asyncio.create_task(self._drive(lease, hold), name=lease.rollout_id)
            self._held[lease.rollout_id] = Held(lease, task, asked_at + self._settings.lease_s, hold)
        return len(leases)

    async def _drive(self, lease: Lease, hold: Hold) -> None:
        current_rollout.set(lease.rollout_id)
        try:
            await drive(lease, self._resources, hold)
        finally:
            held = self._held.get(lease.rollout_id)
            if held is not None and held.lease.fence == lease.fence:
                del self._held[lease.rollout_id]

    async def _steering(self) -> None:
        """Decide on the caps of adaptive jobs, each where nobody did lately."""
        steering = Steering(self._store, self._jobs, every_s=self._settings.steer_s)
        while True:
            await asyncio.sleep(self._settings.steer_s)
            for context in self._resources.contexts.open():
                try:
                    await steering.steer(context.record, context.pool.loads)
                except (UnavailableError, NotFoundError) as error:
                    logger.warning("the rollouts in flight of %s stay as they are: %s", context.record.job_id, error)

    # --------------------------------------------------------------------------------------------------------------- renewing

    async def _renewing(self) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_s / 6)
            by_job: dict[str, list[Held]] = defaultdict(list)
            for held in self._held.values():
                by_job[held.lease.job_id].append(held)
            await asyncio.gather(*(self._renew(job_id, helds) for job_id, helds in by_job.items()))
            self._let_go(held for held in list(self._held.values()) if held.deadline <= asyncio.get_running_loop().time())

    async def _renew(self, job_id: str, helds: list[Held]) -> None:
        asked_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._settings.lease_s / 3):  # a store that only stalls must not keep us past our deadlines
                renewal = await self._resources.leases.renew(job_id, [held.lease for held in helds])
        except (UnavailableError, NotFoundError, TimeoutError) as error:
            logger.warning("%d leases of %s not renewed: %r", len(helds), job_id, error)  # the old deadlines stand
            return
        gone = renewal.lost | renewal.cancelled
        for held in helds:
            held.hold.cancelled = held.lease.rollout_id in renewal.cancelled
            if held.lease.rollout_id not in gone:
                held.deadline = asked_at + self._settings.lease_s
        self._let_go(held for held in helds if held.lease.rollout_id in gone)

    def _let_go(self, helds: Iterable[Held]) -> None:
        """Stop what is no longer ours. The sandbox of a lost lease is left: the next owner resumes in it, or the sweep removes it."""
        for held in helds:
            if not (held.task.done() or held.task.cancelling() or held.hold.ended):
                metrics.lost_leases.inc()
                why = "was ended by others" if held.hold.cancelled else "is no longer ours"
                logger.info("%s %s: stopping it", held.lease.rollout_id, why)
                held.task.cancel()

    async def _beating(self) -> None:
        images: dict[str, frozenset[str]] = {}
        disk: dict[str, str] = {}
        pools = [backend.prefix for backend in self._resources.backends.values() if isinstance(backend, SandboxPool)]
        looked_at = -IMAGES_S
        while True:
            if time.monotonic() - looked_at >= IMAGES_S:
                images, disk = await asyncio.gather(
                    self._told("images", lambda backend: backend.images()), self._told("disk limits", lambda backend: backend.disk_limits())
                )
                looked_at = time.monotonic()
            info: dict[str, Any] = {"backends": sorted(self._resources.backends), "disk": disk, "pools": pools}
            info["images"] = {name: sorted(references)[:MAX_IMAGES] for name, references in images.items()}
            await self._resources.contexts.refresh()
            info["unwell_generators"] = self._resources.contexts.unwell()
            info |= {"rollouts": len(self._held), "slots": self._settings.worker_rollouts}
            try:
                await self._store.heartbeat(self.name, info, HEARTBEAT_S * 4)
            except UnavailableError as error:
                logger.warning("no heartbeat: %s", error)
            await asyncio.sleep(HEARTBEAT_S)

    async def _told(self, what: str, ask: Callable[[SandboxBackend], Awaitable[T]]) -> dict[str, T]:
        """What each backend says, for the gateway to tell clients. One that does not answer has nothing to say."""
        found: dict[str, T] = {}

        async def told(name: str, backend: SandboxBackend) -> None:
            try:
                async with asyncio.timeout(ASK_S):
                    found[name] = await ask(backend)
            except (SandboxError, TimeoutError) as error:
                logger.warning("%s of %s are not known: %s", what, name, error)

        await asyncio.gather(*(told(name, backend) for name, backend in self._resources.backends.items()))
        return found

    # ----------------------------------------------------------------------------------------------------------------- sweep

    async def _sweeping(self) -> None:
        """From the start: the workers before us may have left something."""
        while True:
            try:
                metrics.swept.inc(await self.sweep())
            except (UnavailableError, SandboxError) as error:
                logger.warning("sweep put off: %s", error)
            await asyncio.sleep(self._settings.sweep_s)

    async def sweep(self, *, older_than_s: float = SWEEP_AGE_S) -> int:
        """Destroy the sandboxes of this deployment that no live rollout or worker owns; how many. Also drops what has ended for long."""
        for job_id in await self._jobs.ids():
            await self._resources.groups.purge(job_id)
        deployment_id = self._resources.deployment_id
        count = 0
        for backend in self._resources.backends.values():
            seen = frozenset(info.name for info in await backend.list())  # before who owns it: a sandbox that is claimed now stays
            owners = await live_owners(self._store, self._jobs, self._resources.leases, deployment_id=deployment_id)
            count += await backend.sweep(keep=owners.names, older_than_s=older_than_s, keep_prefixes=owners.prefixes, only=seen)
        return count

    # --------------------------------------------------------------------------------------------------------------- stopping

    async def _drain(self, leasing: asyncio.Task[None]) -> None:
        """Rollouts hand themselves back at their next step, those too that come while we are told to leave; what does not within the grace
        time is cancelled and released. Nothing here takes longer, whatever engine and store do."""
        grace_s, now = self._settings.grace_s, time.monotonic
        deadline = now() + grace_s * WORK_SHARE
        while (tasks := self._at_work(leasing)) and now() < deadline:
            await asyncio.wait(tasks, timeout=min(0.5, max(0.0, deadline - now())))
        left = list(self._held.values())
        for held in left:
            held.task.cancel()
        if left:  # a teardown that an engine holds up must not hold up the release
            await asyncio.wait([held.task for held in left], timeout=grace_s * TEARDOWN_SHARE)
        try:
            async with asyncio.timeout(max(MIN_RELEASE_S, grace_s * RELEASE_SHARE)):
                await asyncio.gather(*(self._release(held.lease) for held in left))
        except TimeoutError:
            logger.warning("the store does not answer: leases that were not handed back run out")

    def _at_work(self, leasing: asyncio.Task[None]) -> list[asyncio.Task[None]]:
        return [task for task in (leasing, *(held.task for held in self._held.values())) if not task.done()]

    async def _release(self, lease: Lease) -> None:
        try:
            await self._resources.leases.release(lease)
        except (LeaseLostError, UnavailableError) as error:
            logger.info("%s not handed back: %s", lease.rollout_id, error)
