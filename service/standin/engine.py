"""The stand-in's scheduler: what runs, what is paused, which version label samples. No HTTP, no tokens' meaning.

Progress is worked out when something changes (a pause, a label, an abort, the end), never token by token. As in SGLang: requests that
arrive during a pause wait and cannot be aborted; those that wait for a slot can, and come back empty; an abort of a running one is answered
after the pause; abort goes by prefix, and only if the id exists exactly; a new label begins a new span and leaves all else alone.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

PauseMode = Literal["abort", "retract", "in_place"]


class DuplicateRidError(Exception):
    """A request of this id is in flight."""


@dataclass(slots=True)
class Span:
    version: str
    start: int
    end: int


@dataclass(slots=True, eq=False)
class Running:
    """One request: `total` tokens are coming, `done` of them are there."""

    rid: str
    total: int
    done: float = 0.0
    since: float | None = None
    """When sampling last began; None while it stands still."""
    spans: list[Span] = field(default_factory=list)
    aborted: bool = False
    retractions: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> int:
        return int(self.done + 1e-6)

    @property
    def over(self) -> bool:
        return self.tokens >= self.total

    def close_span(self, label: str) -> None:
        """Everything sampled since the last span came from `label`."""
        start = self.spans[-1].end if self.spans else 0
        if self.tokens > start or not self.spans:
            self.spans.append(Span(label, start, self.tokens))


class Engine:
    """`tokens_per_s` of each request; None: a reply is there at once. `max_running` at once, the others wait in line; None: no limit."""

    def __init__(self, *, label: str, tokens_per_s: float | None, max_running: int | None = None) -> None:
        self.label = label
        self.running: dict[str, Running] = {}
        self.waiting: dict[str, Running] = {}
        """In the order of their arrival."""
        self.paused = False
        self._frozen = False
        """Paused and drained: nothing is sampled and no abort is answered."""
        self._loading = False
        self._rate = tokens_per_s or math.inf
        self._max_running = max_running or math.inf
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self, rid: str, total: int) -> Running:
        """Sample up to `total` tokens; fewer when aborted.

        Raises:
            DuplicateRidError: the id is in flight.
        """
        if rid in self.running or rid in self.waiting:
            raise DuplicateRidError(rid)
        running = self.waiting[rid] = Running(rid, total)
        self._admit()
        try:
            await self._finish(running)
        finally:
            self.waiting.pop(rid, None)
            self.running.pop(rid, None)
            if not self.running:
                self._idle.set()
            self._admit()
        running.close_span(self.label)
        return running

    async def _finish(self, running: Running) -> None:
        while not running.over and not (running.aborted and not self._frozen):
            running.changed.clear()
            left_s = None if running.since is None else (running.total - running.done) / self._rate
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await running.changed.wait()
            self._settle(running)

    def _start(self, running: Running) -> None:
        running.changed.set()
        if self._rate == math.inf:
            running.done = running.total
        else:
            running.since = time.monotonic()

    def _settle(self, running: Running) -> None:
        """Bring `done` up to now."""
        if running.since is not None:
            now = time.monotonic()
            running.done = min(running.total, running.done + (now - running.since) * self._rate)
            running.since = now

    def abort(self, rid: str) -> None:
        """Every request in the scheduler whose id begins with `rid`, if there is one that is `rid`."""
        known = self._scheduled()
        if rid in known:
            self._abort([running for name, running in known.items() if name.startswith(rid)])

    def abort_all(self) -> None:
        self._abort(list(self._scheduled().values()))

    def _scheduled(self) -> dict[str, Running]:
        """What an abort can reach: not those that came during a pause, which stand before the scheduler."""
        return self.running if self.paused else self.running | self.waiting

    def _abort(self, found: list[Running]) -> None:
        for running in found:
            running.aborted = True
            running.changed.set()

    async def pause(self, mode: PauseMode) -> None:
        """Admit nothing more. abort: end what runs first; the others: let it stand still where it is."""
        if mode == "abort":
            self.abort_all()
        self.paused = True
        self._admit()
        if mode == "abort":
            await self._idle.wait()
        self._frozen = self.paused
        for running in self.running.values():
            self._settle(running)
            running.since = None
            running.retractions += mode == "retract"
            running.changed.set()

    def resume(self) -> None:
        self.paused = self._frozen = False
        for running in self.running.values():
            if running.since is None:
                self._start(running)
        self._admit()

    async def open_within(self, seconds: float) -> bool:
        """Whether requests are admitted, now or within that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._open.wait()
        return self._open.is_set()

    def _admit(self) -> None:
        """Give the free slots to those that wait, unless nothing is admitted now."""
        if self.paused or self._loading:
            self._open.clear()
            return
        self._open.set()
        while self.waiting and len(self.running) < self._max_running:
            running = self.waiting.pop(next(iter(self.waiting)))
            self.running[running.rid] = running
            self._idle.clear()
            self._start(running)

    def relabel(self, label: str) -> None:
        """What is sampled from now on is `label`'s."""
        for running in self.running.values():
            self._settle(running)
            if running.tokens:
                running.close_span(self.label)
        self.label = label

    @contextlib.asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Hold new requests back until those that run have ended; at once when paused."""
        self._loading = True
        self._admit()
        try:
            if not self.paused:
                await self._idle.wait()
            yield
        finally:
            self._loading = False
            self._admit()
