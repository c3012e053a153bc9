"""Batches for the trainer, one after another: as many leased ahead as it wants, all kept alive until it is done with them.

What always holds: a batch that was leased is acked, or handed back when the block is left; or its lease ended by itself, and it says so.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from service.trainer.gateway import GONE, Drained, Gateway, GatewayError

logger = logging.getLogger(__name__)

EMPTY_PAUSE_S = 0.2
"""Between two leases of a job that says it is drained while its feed is not."""
HAND_BACK_S = 10.0


@dataclass(slots=True, eq=False)
class Held:
    """A leased batch. policy_version: the job's at the lease. trains_version: that which the step begins from. lost: no longer ours.
    publishing: it is being acked, so that a renewal may find it gone.
    """

    batch_id: str
    policy_version: int
    trains_version: int
    groups: list[Mapping[str, Any]]
    lost: bool = False
    publishing: bool = False

    @property
    def staleness(self) -> list[int]:
        """Of each group, in the version that trains it."""
        ahead = max(0, self.trains_version - self.policy_version)
        return [group["staleness"] + ahead for group in self.groups]

    @property
    def samples(self) -> int:
        return sum(len(trajectory["samples"]) for group in self.groups for trajectory in group["trajectories"])

    @property
    def tokens(self) -> int:
        """Sampled ones."""
        trajectories = [trajectory for group in self.groups for trajectory in group["trajectories"]]
        return sum(sum(sample["loss_mask"]) for trajectory in trajectories for sample in trajectory["samples"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to lease. version: the first that is trained from; steps_per_version: batches trained from each."""

    job_id: str
    groups: int
    lease_s: float
    prefetch: int
    version: int
    steps_per_version: int


class Leaser:
    """`async with`: leases while the block runs. fed: whether every task was submitted, so that a drained job is at its end."""

    def __init__(self, gateway: Gateway, order: Order, *, fed: Callable[[], bool]) -> None:
        self._gateway = gateway
        self._order = order
        self._fed = fed
        self._wanted = asyncio.Semaphore(order.prefetch)
        self._ready: asyncio.Queue[Held | None] = asyncio.Queue()
        self._held: set[Held] = set()
        self._trained = 0

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._lease_all()), asyncio.create_task(self._renew())]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(HAND_BACK_S):
                await hand_back(self._gateway, self._order.job_id)
        except (GatewayError, TimeoutError) as problem:
            logger.warning("batches of %s may be left to their leases: %r", self._order.job_id, problem)

    async def next(self) -> Held | None:
        """The next batch; None: the job is at its end.

        Raises:
            GatewayError: the service refused a lease.
        """
        self._wanted.release()
        getting = asyncio.create_task(self._ready.get())
        try:
            await asyncio.wait({getting, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
            for task in self._tasks:
                if task.done():
                    task.result()
            return await getting  # the leasing ended in order: what it put last is there
        finally:
            getting.cancel()

    def trained(self, batch: Held) -> None:
        """The batch was acked."""
        self._held.discard(batch)
        self._trained += 1

    def lost(self, batch: Held) -> None:
        """It is no longer ours."""
        self._held.discard(batch)

    async def _lease_all(self) -> None:
        while True:
            await self._wanted.acquire()
            before = self._trained + len(self._held)
            batch = await self._lease(self._order.version + before // self._order.steps_per_version)
            if batch is not None:
                self._held.add(batch)
            self._ready.put_nowait(batch)
            if batch is None:
                return

    async def _lease(self, trains_version: int) -> Held | None:
        """Wait for a batch; what is left when no full one can come any more is taken as it is. None: nothing is left."""
        order, fewer = self._order, False
        while True:
            try:
                batch = await self._gateway.lease(
                    order.job_id,
                    order.groups,
                    lease_s=order.lease_s,
                    allow_fewer=fewer,
                    trains_version=trains_version if order.prefetch else None,
                )
            except Drained:
                if fewer:
                    return None
                fewer = self._fed()
                await asyncio.sleep(0.0 if fewer else EMPTY_PAUSE_S)
            else:
                if batch is not None:
                    return Held(batch["batch_id"], batch["policy_version"], trains_version, batch["groups"])

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._order.lease_s / 3)
            for batch in list(self._held):
                try:
                    await self._gateway.extend(batch.batch_id, self._order.lease_s)
                except GatewayError as error:
                    if error.status not in GONE:
                        raise
                    if batch.publishing:
                        continue
                    batch.lost = True
                    self._held.discard(batch)
                    logger.warning("batch %s is no longer ours: %s", batch.batch_id, error)


async def hand_back(gateway: Gateway, job_id: str) -> None:
    """Everything that the job's trainer holds, also what was leased in a call whose answer it did not wait for: it comes first again."""
    for batch_id in await gateway.live_batches(job_id):
        await gateway.release(batch_id)
