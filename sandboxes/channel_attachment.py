"""Keeps a channel attached to its agent: connects, connects again within its patience, and knows when it is over for good."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from sandboxes.base import SandboxError, SandboxFencedError, SandboxLostError
from sandboxes.channel_link import Link
from sandboxes.frames import Frame
from sandboxes.line import Line

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.02
_LAST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long, in seconds, a channel waits for what should be there at once."""

    connect_s: float = 10.0
    """For the agent's WELCOME."""
    reconnect_s: float = 30.0
    """For a connection, all tries together."""
    paused_s: float = 300.0
    """The same, while the sandbox is paused: somebody takes a snapshot of it."""
    tick_s: float = 5.0
    """An agent that is silent this long while it works is asked for a sign; after three times that the connection is given up."""
    slack_s: float = 30.0
    """A call's result is due so long after its time-out: the agent needs some of it to kill what was started."""
    kill_s: float = 10.0
    """For the end of a call that was cancelled."""


class Attachment:
    """`attached` is called with every new connection, `lost` when one broke, `failed` with why there is none, `handle` with every frame."""

    def __init__(
        self,
        line: Line,
        *,
        fence: int,
        boot_id: str | None,
        patience: Patience,
        handle: Callable[[Frame], None],
        attached: Callable[[Link], None],
        lost: Callable[[str], None],
        failed: Callable[[SandboxError], None],
    ) -> None:
        self.boot_id = boot_id
        self.link: Link | None = None
        self.over: SandboxError | None = None
        """Set once nothing can be done any more."""
        self._line = line
        self._fence = fence
        self._patience = patience
        self._handle = handle
        self._attached = attached
        self._lost = lost
        self._failed = failed
        self._recovery: asyncio.Task[None] | None = None
        self._pause_s = 0.0

    async def open(self) -> None:
        """
        Raises:
            SandboxLostError, SandboxFencedError: and nothing else from now on.
            SandboxError: not within the patience.
        """
        try:
            await self._recover()
        except (SandboxLostError, SandboxFencedError) as error:
            self.over = error
            raise

    def recover(self) -> None:
        """Begin to connect again, where that is not under way."""
        if self._recovery is None:
            self._recovery = asyncio.ensure_future(self._recovering())

    def progressed(self) -> None:
        """A call was answered: when this connection breaks, the next is had at once."""
        self._pause_s = 0.0

    def cut(self, reason: str) -> None:
        """Let go of the connection."""
        if self.link is not None:
            logger.debug("the connection to %s ended: %s", self._line.id, reason)
            self.link.close()
            self.link = None

    def end(self, error: SandboxError) -> None:
        """For good."""
        self.over = self.over or error
        self.cut(str(error))
        self._failed(self.over)

    async def aclose(self, why: SandboxError) -> None:
        recovery = self._recovery
        self.end(why)
        if recovery is not None:
            recovery.cancel()
            await asyncio.gather(recovery, return_exceptions=True)

    async def _recovering(self) -> None:
        try:
            await self._recover()
            logger.info("connected to %s again", self._line.id)
        except (SandboxLostError, SandboxFencedError) as error:
            self.end(error)
        except SandboxError as error:
            self._failed(error)
        finally:
            self._recovery = None

    async def _recover(self) -> None:
        """Connect, again and again within the patience; with pauses that grow until a call is answered, whatever the agent does."""
        now = asyncio.get_running_loop().time
        began = now()
        while True:
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s + _FIRST_PAUSE_S, _LAST_PAUSE_S)
            try:
                return await self._connect()
            except (SandboxLostError, SandboxFencedError):
                raise
            except SandboxError as error:
                patience_s = self._patience.paused_s if await self._paused(error) else self._patience.reconnect_s
                if now() + self._pause_s > began + patience_s:
                    raise

    async def _paused(self, error: SandboxError) -> bool:
        """Ask the backend before a sandbox is called lost: whether it is only paused."""
        try:
            health = await self._line.health()
        except SandboxError:
            return False  # the backend is out of reach: it may come back within the patience
        if not health.alive:
            raise SandboxLostError(f"sandbox {self._line.id} is gone ({health.detail or error})", by_command=health.by_itself) from error
        return health.paused

    async def _connect(self) -> None:
        link = Link(self._line.id, self._handle, self._broken)
        welcome = await link.open(self._line, self._fence, self._patience.connect_s)
        if self.boot_id not in (None, welcome.boot_id):
            link.close()
            raise SandboxLostError(f"sandbox {self._line.id} was restarted: what ran in it is gone")
        self.boot_id, self.link = welcome.boot_id, link
        self._attached(link)

    def _broken(self, link: Link, reason: str) -> None:
        if link is self.link:
            self._lost(reason)
