"""What a backend must be able to do for `CommandSandbox`: start a command, talk to the first process, say whether it lives."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from sandboxes.guest import Command

STDOUT = 1
STDERR = 2


class Running(Protocol):
    """A started command."""

    def output(self) -> AsyncGenerator[tuple[int, bytes], None]:
        """Pieces of (`STDOUT` or `STDERR`, bytes) until both are at their end."""
        ...

    async def feed(self, data: bytes) -> None:
        """Write `data` to stdin, then end-of-file. A command that does not read is no error."""
        ...

    async def exit_code(self) -> int | None:
        """None while the command's own process lives, whoever else holds its output."""
        ...

    async def close(self) -> None:
        """Let go of the streams. The command is not killed by this."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """`present`: the backend knows it. `alive`: commands can run. `by_itself`: it died from something inside."""

    present: bool
    alive: bool
    by_itself: bool = False
    detail: str = ""


class Carrier(Protocol):
    """One sandbox as its backend sees it. Every method has its own deadline and raises only SandboxError."""

    @property
    def id(self) -> str: ...

    async def start(self, command: Command) -> Running: ...

    async def ask(self, *words: str) -> str:
        """Send a line to the first process (`sandboxes/init.bash`) and return its answer."""
        ...

    async def health(self) -> Health: ...

    async def remove(self) -> None: ...
