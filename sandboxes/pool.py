"""Warm sandboxes: started before they are asked for, given to one owner, never taken back.

What always holds:

* Every unclaimed sandbox is known by its name from before its start until after its removal, and there are never more than `size`.
* A warm sandbox is taken once, without a task switch: it becomes its claimer's, or it is destroyed.
* Nothing that somebody waits for stands behind a refill: refills begin only while a place to start is free.
* All background work belongs to one task, the keeper, which `aclose` ends. A worker that dies leaves its warm sandboxes under `prefix`,
  for the sweep of others.
"""

import asyncio
import contextlib
import contextvars
import itertools
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sandboxes.base import (
    Sandbox,
    SandboxError,
    SandboxInfo,
    SandboxSpec,
    SandboxSpecError,
    SandboxStartError,
)
from sandboxes.demand import Demand, targets
from sandboxes.poolable import Poolable, PoolableBackend, bare, kind
from sandboxes.shielding import to_the_end
from sandboxes.starting import StartLimits

logger = logging.getLogger(__name__)

ALIVE_S = 1.0
"""A warm sandbox that does not answer within this is not worth the wait: a cold start takes a tenth of it."""
CLAIM_TRIES = 3
"""Warm sandboxes that one claim looks at; where so many are dead, so is most likely the rest."""
REMOVAL_S = 60.0
CLOSE_S = 20.0
"""For removing what is warm when the pool closes; the sweep of others has the rest."""
MAX_KINDS = 1024
"""Kinds that are remembered; past it new ones start cold until others were idle for long."""
BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0

_BUSY_S = 0.05
"""How often the keeper looks for a free place while something is wanted, and _QUIET_S for what is too old or wanted no more."""
_QUIET_S = 1.0


@dataclass(slots=True)
class PoolCounts:
    """What became of what was asked for and of what was kept warm; `warm` goes up and down."""

    claimed: int = 0
    """Given out warm."""
    cold: int = 0
    """Started for who asked, since nothing was warm."""
    refilled: int = 0
    refills_failed: int = 0
    dead_at_claim: int = 0
    """Warm ones that did not answer."""
    broken_at_claim: int = 0
    """Warm ones that answered and could not be made their claimer's."""
    removed: int = 0
    """Warm ones destroyed unclaimed: wanted no more, too old, or dead."""
    warm: int = 0
    """Ready to be claimed now."""


@dataclass(slots=True, eq=False)
class _Warm:
    """One sandbox that is nobody's. `since`: monotonic seconds."""

    name: str
    sandbox: Poolable
    since: float


@dataclass(slots=True, eq=False)
class _Shelf:
    """The sandboxes of one kind. `ready`: the oldest first. `not_before`: when a refill may be tried again, infinity for never."""

    spec: SandboxSpec
    demand: Demand
    ready: deque[_Warm] = field(default_factory=deque)
    filling: int = 0
    failures: int = 0
    not_before: float = 0.0

    @property
    def held(self) -> int:
        return len(self.ready) + self.filling


class SandboxPool:
    """A `SandboxBackend` that gives out warm sandboxes of `backend`, which it closes with itself.

    size: unclaimed sandboxes in all. idle_s: a kind that was not asked for in so long keeps none. max_age_s: a warm sandbox older than
    this is replaced. prefix: what the names of unclaimed ones begin with, for other workers' sweeps to keep while this one lives; it is
    new with every pool, so that a restarted worker of the same name does not keep what it lost.
    """

    def __init__(
        self,
        backend: PoolableBackend,
        *,
        deployment_id: str,
        worker: str,
        size: int = 16,
        idle_s: float = 300.0,
        max_age_s: float = 1800.0,
    ) -> None:
        self.name = backend.name
        self.prefix = f"rw-{deployment_id}-pool-{worker}-{secrets.token_hex(3)}-"
        self._backend = backend
        self._worker = worker
        self._size = size
        self._idle_s = idle_s
        self._max_age_s = max_age_s
        self._counts = PoolCounts()
        self._numbers = itertools.count()
        self._shelves: dict[Hashable, _Shelf] = {}
        self._unclaimed: set[str] = set()
        """Names, from before the start until the claim begins, or after the removal."""
        self._claiming: set[str] = set()
        """Names of those that were taken, until they are their claimer's."""
        self._discarded: deque[_Warm] = deque()
        self._wake = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def limits(self) -> StartLimits:
        return self._backend.limits

    @property
    def counts(self) -> PoolCounts:
        self._counts.warm = sum(len(shelf.ready) for shelf in self._shelves.values())
        return self._counts

    async def __aenter__(self) -> "SandboxPool":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    # ----------------------------------------------------------------------------------------------------------------- claiming

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, *, name: str, fence: int = 0) -> AsyncIterator[Sandbox]:
        yield await self.create(spec, name=name, fence=fence)

    async def create(self, spec: SandboxSpec, *, name: str, fence: int = 0) -> Sandbox:
        """A warm sandbox made `spec`'s own; a cold start where none is warm, or the warm one failed."""
        warm = await self._living(kind(spec))
        sandbox = None if warm is None else await self._adopted(warm, spec, name, fence)
        if sandbox is not None:
            self._counts.claimed += 1
            self._note(spec, used_warm=True)
            return sandbox
        sandbox = await self._backend.create(spec, name=name, fence=fence)
        self._counts.cold += 1
        self._note(spec, used_warm=False)
        return sandbox

    async def _living(self, wanted: Hashable) -> _Warm | None:
        """Take a warm sandbox that answers. What does not is the keeper's to remove."""
        for _ in range(CLAIM_TRIES):
            shelf = self._shelves.get(wanted)
            if shelf is None or not shelf.ready:
                return None
            warm = shelf.ready.popleft()
            self._unclaimed.discard(warm.name)
            self._claiming.add(warm.name)
            answers = False
            try:
                answers = await _answers(warm.sandbox)
            finally:
                if not answers:  # dead, or we are cancelled
                    self._claiming.discard(warm.name)
                    self._discard(warm)
            if answers:
                return warm
            self._counts.dead_at_claim += 1
        return None

    async def _adopted(self, warm: _Warm, spec: SandboxSpec, name: str, fence: int) -> Sandbox | None:
        """The sandbox under its new name; None when the backend failed. Unless it is returned it is gone."""
        adopted, deadline = None, asyncio.timeout(spec.start_s)
        try:
            async with deadline:
                await warm.sandbox.detach()  # a second reader of its stream would cost both
                adopted = await self._backend.adopt(warm.sandbox, spec, name=name, fence=fence)
            return adopted
        except SandboxSpecError:
            raise
        except SandboxError as error:
            self._counts.broken_at_claim += 1
            logger.warning("the warm sandbox %s could not become %s, which starts cold: %s", warm.name, name, error)
            return None
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise SandboxStartError(f"sandbox {name} was not ready within {spec.start_s:g} s of its claim") from error
        finally:
            if adopted is None:
                await _destroyed(warm)
            self._claiming.discard(warm.name)

    def _note(self, spec: SandboxSpec, *, used_warm: bool) -> None:
        """Demand counts what worked: a kind that never starts is never kept warm."""
        wanted = kind(spec)
        if wanted not in self._shelves and len(self._shelves) < MAX_KINDS:
            spec = bare(spec, worker=self._worker, max_age_s=self._max_age_s)
            self._shelves[wanted] = _Shelf(spec, Demand(window_s=self._idle_s))
        if shelf := self._shelves.get(wanted):
            shelf.demand.note(time.monotonic(), used_warm=used_warm)
        if self._keeper is None and self._size > 0:
            nobodys = contextvars.Context()  # what it logs is not its first caller's
            self._keeper = asyncio.create_task(self._keep(), name=f"{self.prefix}keeper", context=nobodys)
        self._wake.set()

    # ------------------------------------------------------------------------------------------------------------ the keeper

    async def _keep(self) -> None:
        """Bring what is warm to what is wanted, whenever either changes."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                pause_s = self._settle(group, time.monotonic())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._wake.wait()

    def _settle(self, group: asyncio.TaskGroup, now: float) -> float | None:
        """One round, without a task switch: in how many seconds to look again at the latest, None when there is nothing to look after."""
        shelves = [shelf for shelf in self._shelves.values() if shelf.not_before < math.inf]
        short = []
        for shelf, target in zip(shelves, targets([shelf.demand for shelf in shelves], self._size, now), strict=True):
            self._trim(shelf, target, now)
            if shelf.held < target and now >= shelf.not_before:
                short.append(shelf)
        while self._discarded:
            group.create_task(self._remove(self._discarded.popleft()))
        for shelf in short:
            if self._may_refill():
                self._unclaimed.add(name := f"{self.prefix}{next(self._numbers)}")
                shelf.filling += 1
                group.create_task(self._refill(shelf, name))
        self._shelves = {key: shelf for key, shelf in self._shelves.items() if shelf.held or shelf.demand.wanted(now)}
        return _BUSY_S if short else _QUIET_S if self._shelves else None

    def _trim(self, shelf: _Shelf, target: int, now: float) -> None:
        """One that is too old a round: those that started together do not all leave together."""
        while shelf.ready and len(shelf.ready) > target:
            self._discard(shelf.ready.popleft())
        if shelf.ready and now - shelf.ready[0].since >= self._max_age_s:
            self._discard(shelf.ready.popleft())

    def _may_refill(self) -> bool:
        """Half the places at most: whoever comes next to wait for a cold start finds one."""
        filling = sum(shelf.filling for shelf in self._shelves.values())
        limits = self._backend.limits
        return len(self._unclaimed) < self._size and limits.idle and filling < max(1, limits.max_starting // 2)

    async def _refill(self, shelf: _Shelf, name: str) -> None:
        sandbox = None
        try:
            sandbox = await self._backend.create(shelf.spec, name=name)
        except SandboxError as error:
            self._failed(shelf, error)
        finally:
            shelf.filling -= 1
            if sandbox is None:
                self._unclaimed.discard(name)
            else:
                shelf.ready.append(_Warm(name, sandbox, time.monotonic()))
                shelf.failures = 0
                self._counts.refilled += 1
            self._wake.set()

    def _failed(self, shelf: _Shelf, error: SandboxError) -> None:
        self._counts.refills_failed += 1
        shelf.failures += 1
        never = isinstance(error, SandboxSpecError)
        pause_s = math.inf if never else min(MAX_BACKOFF_S, BACKOFF_S * 2 ** min(shelf.failures - 1, 16))
        shelf.not_before = time.monotonic() + pause_s
        logger.warning("no warm sandbox of %s, next try %s: %s", shelf.spec.image, "never" if never else f"in {pause_s:g} s", error)

    def _discard(self, warm: _Warm) -> None:
        self._unclaimed.add(warm.name)
        self._discarded.append(warm)
        self._wake.set()

    async def _remove(self, warm: _Warm) -> None:
        try:
            async with self._backend.limits.removal():
                await _destroyed(warm)
        except asyncio.CancelledError:
            self._discarded.append(warm)  # it may not have been its turn yet; removing twice is no error
            raise
        self._unclaimed.discard(warm.name)
        self._counts.removed += 1
        self._wake.set()

    # ------------------------------------------------------------------------------------------------- the rest of the contract

    async def attach(self, sandbox_id: str, *, name: str | None = None, fence: int = 0, boot_id: str | None = None) -> Sandbox:
        return await self._backend.attach(sandbox_id, name=name, fence=fence, boot_id=boot_id)

    async def restore(self, snapshot: str, spec: SandboxSpec, *, name: str, fence: int = 0) -> Sandbox:
        return await self._backend.restore(snapshot, spec, name=name, fence=fence)

    async def forget_snapshot(self, snapshot: str) -> None:
        await self._backend.forget_snapshot(snapshot)

    async def images(self) -> frozenset[str]:
        return await self._backend.images()

    async def disk_limits(self) -> str:
        return await self._backend.disk_limits()

    async def list(self) -> Sequence[SandboxInfo]:
        return await self._backend.list()

    async def sweep(
        self, *, keep: frozenset[str], older_than_s: float, keep_prefixes: tuple[str, ...] = (), only: frozenset[str] | None = None
    ) -> int:
        """Ours are kept by their very names, whatever `keep_prefixes` says: what we failed to remove is swept like anyone's."""
        return await self._backend.sweep(
            keep=keep | self._unclaimed | self._claiming,
            older_than_s=older_than_s,
            keep_prefixes=tuple(prefix for prefix in keep_prefixes if prefix != self.prefix),
            only=only,
        )

    async def ping(self) -> None:
        await self._backend.ping()

    async def aclose(self) -> None:
        """Destroy what is warm, within `CLOSE_S`, and close the backend. Claimed ones are their claimers'. Idempotent."""
        try:
            await to_the_end(self._emptied())
        finally:
            await self._backend.aclose()

    async def _emptied(self) -> None:
        self._size = 0
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait({keeper}, timeout=CLOSE_S)
        for shelf in self._shelves.values():
            while shelf.ready:
                self._discard(shelf.ready.popleft())
        left = [self._discarded.popleft() for _ in range(len(self._discarded))]
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*(self._remove(warm) for warm in left))
        except TimeoutError:
            logger.warning("%d warm sandboxes are left to the sweep", len(self._discarded))
        if keeper is not None and keeper.done() and not keeper.cancelled():
            keeper.result()  # only a bug ends it otherwise


async def _answers(sandbox: Poolable) -> bool:
    try:
        async with asyncio.timeout(ALIVE_S):
            await sandbox.ping()
    except (SandboxError, TimeoutError):
        return False
    return True


async def _destroyed(warm: _Warm) -> None:
    try:
        async with asyncio.timeout(REMOVAL_S):
            await warm.sandbox.destroy()
    except (SandboxError, TimeoutError) as error:
        logger.warning("the warm sandbox %s was not removed, it is left to the sweep: %s", warm.name, error)
