"""A poolable backend in memory, for what no engine does on request: it dies, refuses and hesitates when told to."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sandboxes.base import Sandbox, SandboxError, SandboxInfo, SandboxLostError, SandboxSpec, SandboxSpecError, SandboxStartError
from sandboxes.shielding import to_the_end
from sandboxes.starting import Budget, StartLimits


@dataclass(eq=False)
class StandinSandbox:
    """`history`: every name it had. `alive` False: it answers no more and is still there."""

    id: str
    backend: "StandinBackend"
    spec: SandboxSpec
    history: list[str]
    alive: bool = True
    attached: bool = True
    start_seconds: float = 0.0
    boot_id: str = "1"

    @property
    def name(self) -> str:
        return self.history[-1]

    async def ping(self) -> None:
        await self.backend.steps()
        if not self.alive or self.id not in self.backend.boxes:
            raise SandboxLostError(f"{self.id} is gone")

    async def detach(self) -> None:
        self.attached = False

    async def destroy(self) -> None:
        await to_the_end(self._destroy())

    async def _destroy(self) -> None:
        if self.backend.removals_held is not None:
            await self.backend.removals_held.wait()
        await self.backend.steps()
        self.backend.boxes.pop(self.id, None)


@dataclass
class StandinBackend:
    """`hesitation`: task switches of each request. `refusals`: raised by the next creates; `broken`: by the next adoptions."""

    limits: StartLimits = field(default_factory=lambda: StartLimits(max_starting=4, starts_per_s=1e6, burst=10_000))
    hesitation: int = 2
    refusals: deque[SandboxError] = field(default_factory=deque)
    broken: deque[SandboxError] = field(default_factory=deque)
    boxes: dict[str, StandinSandbox] = field(default_factory=dict)
    held: asyncio.Event | None = None
    """Creates and adoptions wait for it."""
    removals_held: asyncio.Event | None = None
    closed: bool = False
    name: str = "standin"
    _ids: "itertools.count[int]" = field(default_factory=itertools.count)

    async def steps(self) -> None:
        for _ in range(self.hesitation):
            await asyncio.sleep(0)

    @property
    def names(self) -> list[str]:
        return [box.name for box in self.boxes.values()]

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, *, name: str, fence: int = 0) -> AsyncIterator[Sandbox]:
        yield await self.create(spec, name=name, fence=fence)

    async def create(self, spec: SandboxSpec, *, name: str, fence: int = 0) -> Sandbox:
        async def make(_: None, budget: Budget) -> Sandbox:
            return await self._made(spec, name)

        return await self.limits.start(name, within_s=spec.start_s, prepare=self.steps, make=make)

    async def _made(self, spec: SandboxSpec, name: str) -> Sandbox:
        if name in self.names:
            raise SandboxStartError(f"the name {name} is taken")
        box = StandinSandbox(str(next(self._ids)), self, spec, [name])
        self.boxes[box.id] = box
        made = False
        try:
            if self.held is not None:
                await self.held.wait()
            await self.steps()
            if self.refusals:
                raise self.refusals.popleft()
            _furnish(spec)
            made = True
            return box  # type: ignore[return-value]
        finally:
            if not made:
                await to_the_end(box._destroy())

    async def adopt(self, sandbox: Sandbox, spec: SandboxSpec, *, name: str, fence: int = 0) -> Sandbox:
        box = self.boxes.get(sandbox.id)
        await self.steps()
        if box is None or not box.alive:
            raise SandboxLostError(f"{sandbox.id} is gone")
        assert not box.attached
        if name in self.names:
            raise SandboxStartError(f"the name {name} is taken")
        box.history.append(name)
        if self.held is not None:
            await self.held.wait()
        await self.steps()
        if self.broken:
            raise self.broken.popleft()
        _furnish(spec)
        return sandbox

    async def list(self) -> Sequence[SandboxInfo]:
        return [SandboxInfo(id=box.id, name=box.name, labels=box.spec.labels, age_s=1.0, alive=box.alive) for box in self.boxes.values()]

    async def sweep(
        self, *, keep: frozenset[str], older_than_s: float, keep_prefixes: tuple[str, ...] = (), only: frozenset[str] | None = None
    ) -> int:
        doomed = [
            box
            for box in self.boxes.values()
            if box.name not in keep and not box.name.startswith(keep_prefixes or ("\0",)) and (only is None or box.name in only)
        ]
        for box in doomed:
            await box.destroy()
        return len(doomed)

    async def images(self) -> frozenset[str]:
        return frozenset()

    async def ping(self) -> None:
        """Always here."""

    async def aclose(self) -> None:
        self.closed = True


def _furnish(spec: SandboxSpec) -> None:
    if "exit 1" in spec.setup:
        raise SandboxSpecError("sandbox.setup.0 ended with exit code 1")
