"""Starting a sandbox, whatever the backend: a place, a rate, a budget, few retries, then files and setup.

What always holds: at most `max_starting` starts and sweeps' removals are in flight; a start that somebody waits for goes before a
removal; what a start spends in the queue is not taken from its budget, and is bounded by itself; a start that fails is counted once.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from sandboxes.base import Sandbox, SandboxContentError, SandboxError, SandboxFencedError, SandboxSpec, SandboxSpecError, SandboxStartError

RETRIES = 2
"""Tries after the first: what a busy engine refuses is mostly gone within a second, what stays is the caller's to know."""
RETRY_PAUSE_S = 0.2
MAX_WAIT_S = 900.0
"""In the queue for a place. A start fails for the backlog before it only when nothing moves any more."""

_SETUP_OUTPUT_BYTES = 4000

P = TypeVar("P")
T = TypeVar("T")


@dataclass(slots=True)
class StartCounts:
    """What became of the starts. Every `start` adds one to exactly one of the first six; `starting` and `waiting` go up and down."""

    started: int = 0
    failed_spec: int = 0
    """Can never start: the task's fault."""
    failed_engine: int = 0
    """Refused or broken, retries used up: infrastructure."""
    over_budget: int = 0
    """Not ready within `start_s`."""
    over_wait: int = 0
    """No place within `max_wait_s`."""
    cancelled: int = 0
    retried: int = 0
    """Tries after the first one."""
    waited_s: float = 0.0
    """Seconds spent waiting for places and for the rate, in sum."""
    starting: int = 0
    """Places taken now, by starts and by removals."""
    waiting: int = 0
    """Starts and removals in the queue now."""


class TokenBucket:
    """At most `burst` starts at once and `per_s` a second in the long run: in any span of t seconds at most burst + per_s * t. Pure."""

    def __init__(self, *, per_s: float, burst: int) -> None:
        if per_s <= 0 or burst < 1:
            raise ValueError(f"a rate of {per_s:g} per second with a burst of {burst} would start nothing")
        self._per_s = per_s
        self._burst = burst
        self._tokens = float(burst)
        self._seen = 0.0

    def take(self, now: float) -> float:
        """Take one token at `now` (seconds of any clock that does not go back); how many seconds to wait before it is used."""
        if now > self._seen:
            self._tokens = min(self._burst, self._tokens + (now - self._seen) * self._per_s)
            self._seen = now
        self._tokens -= 1
        return max(0.0, -self._tokens / self._per_s)


def retry_pause_s(error: SandboxError, *, tries: int, left_s: float, jitter: float, first_s: float = RETRY_PAUSE_S) -> float | None:
    """Seconds to pause before the next try, or None when there must be none. Pure.

    tries: how many there were. left_s: what is left of the budget. jitter: in [0, 1), spreads those who failed together. first_s: the
    mean pause after the first try, doubled with each.
    """
    if isinstance(error, SandboxSpecError | SandboxFencedError | SandboxContentError) or tries > RETRIES:
        return None
    pause_s = first_s * 2 ** (tries - 1) * (0.5 + jitter)
    return pause_s if pause_s < left_s else None


class Budget:
    """Wall time of one start, spent only inside `running`."""

    def __init__(self, total_s: float) -> None:
        self._total_s = total_s
        self._spent_s = 0.0
        self._since: float | None = None

    @property
    def spent_s(self) -> float:
        """Seconds so far, those of the try that runs now included."""
        return self._spent_s + (0.0 if self._since is None else time.monotonic() - self._since)

    @property
    def left_s(self) -> float:
        return max(0.0, self._total_s - self.spent_s)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Raises _OverBudgetError when the budget ends in the body."""
        deadline = asyncio.timeout(self.left_s)
        self._since = time.monotonic()
        try:
            async with deadline:
                yield
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise _OverBudgetError from error
        finally:
            self._spent_s, self._since = self.spent_s, None


class _OverBudgetError(Exception):
    """The start's budget is spent."""


class _OverWaitError(Exception):
    """No place became free in time."""


class StartLimits:
    """One per backend. `counts` is for metrics to read.

    max_starting: starts and sweeps' removals in flight; engines gain nothing past twice their cores. starts_per_s, burst: the rate of
    starts. max_wait_s: the longest that a start waits for its place. retry_pause_s: see the function.
    """

    def __init__(
        self,
        *,
        max_starting: int = 4,
        starts_per_s: float = 50.0,
        burst: int = 20,
        max_wait_s: float = MAX_WAIT_S,
        retry_pause_s: float = RETRY_PAUSE_S,
    ) -> None:
        self.max_starting = max_starting
        self.counts = StartCounts()
        self._max_wait_s = max_wait_s
        self._bucket = TokenBucket(per_s=starts_per_s, burst=burst)
        self._retry_pause_s = retry_pause_s
        self._queues: tuple[deque[asyncio.Future[None]], deque[asyncio.Future[None]]] = (deque(), deque())
        """Who waits for a place: starts, then removals."""

    @property
    def idle(self) -> bool:
        """Whether a place is free. Nobody waits then, since a place is handed on: work that nobody waits for may start."""
        return self.counts.starting < self.max_starting

    async def start(
        self,
        name: str,
        *,
        within_s: float,
        prepare: Callable[[], Awaitable[P]],
        make: Callable[[P, Budget], Awaitable[T]],
    ) -> T:
        """`make` a sandbox in a place of its own, again after a passing failure, within `within_s` seconds of work.

        prepare: what comes before and holds no place (a pull); has retries of its own, and is not tried again here.
        make: one try, given what `prepare` returned; leaves nothing behind when it fails or is cancelled.

        Raises:
            SandboxSpecError, SandboxFencedError: as `make` did, at once.
            SandboxStartError: everything else that went wrong.
        """
        budget = Budget(within_s)
        try:
            async with budget.running():
                prepared = await prepare()
            made = await self._tried(prepared, make, budget)
        except _OverBudgetError as error:
            self.counts.over_budget += 1
            raise SandboxStartError(f"sandbox {name} did not start within {within_s:g} s") from error
        except _OverWaitError as error:
            self.counts.over_wait += 1
            raise SandboxStartError(
                f"sandbox {name} found no place to start within {self._max_wait_s:g} s: {self.counts.starting} start now, "
                f"{self.counts.waiting} wait; raise ROLLWAY_MAX_STARTING, or run fewer rollouts at once"
            ) from error
        except SandboxError as error:
            told = self._counted(name, error)
            if told is error:
                raise
            raise told from error
        except asyncio.CancelledError:
            self.counts.cancelled += 1
            raise
        self.counts.started += 1
        return made

    async def _tried(self, prepared: P, make: Callable[[P, Budget], Awaitable[T]], budget: Budget) -> T:
        tries = 0
        while True:
            tries += 1
            try:
                async with self._place(start=True), budget.running():
                    return await make(prepared, budget)
            except SandboxError as error:
                pause_s = retry_pause_s(error, tries=tries, left_s=budget.left_s, jitter=random.random(), first_s=self._retry_pause_s)
                if pause_s is None:
                    raise
            async with budget.running():
                await asyncio.sleep(pause_s)
            self.counts.retried += 1

    def _counted(self, name: str, error: SandboxError) -> SandboxError:
        """The error as the contract has it: nothing ran in this sandbox yet, so what its content refuses was asked for by the spec."""
        if isinstance(error, SandboxSpecError | SandboxContentError):
            self.counts.failed_spec += 1
            return error if isinstance(error, SandboxSpecError) else SandboxSpecError(f"sandbox {name} can never start: {error}")
        self.counts.failed_engine += 1
        if isinstance(error, SandboxStartError | SandboxFencedError):
            return error
        return SandboxStartError(f"sandbox {name} did not start: {error}")

    @asynccontextmanager
    async def removal(self) -> AsyncIterator[None]:
        """A place for a removal of the sweep, behind the starts: it costs an engine about what a start does."""
        async with self._place(start=False):
            yield

    @asynccontextmanager
    async def _place(self, *, start: bool) -> AsyncIterator[None]:
        """Raises _OverWaitError when a start has waited `max_wait_s`."""
        began = time.monotonic()
        try:
            await self._taken(start=start)
        finally:
            self.counts.waited_s += time.monotonic() - began
        try:
            if start and (pause_s := self._bucket.take(time.monotonic())):
                self.counts.waited_s += pause_s
                await asyncio.sleep(pause_s)
            yield
        finally:
            self._free()

    async def _taken(self, *, start: bool) -> None:
        if self.idle:
            self.counts.starting += 1
            return
        queue = self._queues[0 if start else 1]
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self.counts.waiting += 1
        try:
            async with asyncio.timeout(self._max_wait_s if start else None):
                await turn
        except (asyncio.CancelledError, TimeoutError) as error:
            if turn.done() and not turn.cancelled():  # the place was ours when we were called away
                self._free()
            elif turn in queue:
                queue.remove(turn)
            if isinstance(error, TimeoutError):
                raise _OverWaitError from error
            raise
        finally:
            self.counts.waiting -= 1

    def _free(self) -> None:
        """Hand the place to the next in the queue, or leave it free."""
        for queue in self._queues:
            while queue:
                turn = queue.popleft()
                if not turn.done():
                    turn.set_result(None)
                    return
        self.counts.starting -= 1


async def furnish(sandbox: Sandbox, spec: SandboxSpec) -> None:
    """Put `spec.files`, run `spec.setup` in order, by bash where the image has it. The caller holds the start budget.

    Raises:
        SandboxSpecError: the first thing that failed, with the end of its output.
    """
    try:
        if spec.files:
            await sandbox.put(spec.files)
    except SandboxContentError as error:
        raise SandboxSpecError(f"sandbox.files could not be written: {error}") from error
    shell = await _shell(sandbox, spec) if spec.setup else ""
    for number, line in enumerate(spec.setup):
        result = await sandbox.exec([shell, "-c", line], timeout_s=spec.start_s, max_output_bytes=_SETUP_OUTPUT_BYTES)
        if result.exit_code != 0:
            said = (result.stdout + result.stderr).decode(errors="replace").strip()[-2000:]
            how = "ran out of time" if result.timed_out else f"ended with exit code {result.exit_code}"
            raise SandboxSpecError(f"sandbox.setup.{number} ({line[:80]!r}) {how}: {said or 'no output'}")


async def _shell(sandbox: Sandbox, spec: SandboxSpec) -> str:
    found = await sandbox.exec(["bash", "-c", ":"], timeout_s=spec.start_s, max_output_bytes=_SETUP_OUTPUT_BYTES)
    return "bash" if found.exit_code == 0 else "sh"
