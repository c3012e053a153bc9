"""What a backend must be able to do for a `Channel`: give a byte stream to the sandbox's agent, say whether it lives, remove it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """`present`: the backend knows it. `alive`: its agent runs, or is only `paused`. `by_itself`: it died from something inside."""

    present: bool
    alive: bool
    paused: bool = False
    by_itself: bool = False
    detail: str = ""


class Connection(Protocol):
    """One connection to the agent. After `close`, nothing is called back any more.

    It needs no flow control of its own: what is written and not yet sent is bounded by the windows of the calls, and so is what arrives.
    """

    def write(self, data: bytes) -> None:
        """Queue `data` at once, without a task switch. On a connection that is lost it is dropped."""
        ...

    def close(self) -> None:
        """Let go at once. The sandbox and its calls go on. Idempotent."""
        ...


class Line(Protocol):
    """One sandbox as its backend sees it. Every method has a deadline of its own and raises only SandboxError."""

    @property
    def id(self) -> str: ...

    async def connect(self, received: Callable[[bytes], None], lost: Callable[[str], None]) -> Connection:
        """Attach to the agent.

        `received` gets the bytes of the agent's stdout as they arrive, called from the event loop without a task switch; the engine's
        stream headers are taken off. They may begin in the middle of a frame, where other attachers see the same stream.
        `lost` is called once, with the reason (what the agent wrote to stderr, where it ended), when the connection ends by itself.
        `received` may be called before this returns, `lost` never (then this raises).
        """
        ...

    async def health(self) -> Health: ...

    async def remove(self) -> None:
        """Remove the sandbox and everything in it. Removing what is gone is no error."""
        ...

    async def snapshot(self, ttl_s: float) -> str:
        """What the backend's `restore` takes. Raises SandboxError where it has no snapshots."""
        ...
