"""One process sandbox as the backend sees it: connections to the socket of its agent, its first process's health, its removal."""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

from sandboxes import cgroups, process_box
from sandboxes.base import SandboxError
from sandboxes.line import Health
from sandboxes.process_box import Box

_PAUSE_S = 0.005
_DIE_S = 10.0


class AgentConnection(asyncio.Protocol):
    """A `Connection` over a Unix socket."""

    def __init__(self, received: Callable[[bytes], None]) -> None:
        self._received = received
        self._transport: asyncio.Transport | None = None
        self.lost: Callable[[str], None] | None = None

    @property
    def broken(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        self.lost = None
        if self._transport is not None:
            self._transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        self._received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        lost = self.lost
        self.close()
        if lost is not None:
            lost(f"the agent's connection broke off: {exc}" if exc else "the agent closed the connection")


class ProcessLine:
    """A `Line` to the sandbox of an id. Its directory is looked up, since its name may change."""

    def __init__(self, root: Path, sandbox_id: str, *, answer_s: float) -> None:
        self._root = root
        self._id = sandbox_id
        self._answer_s = answer_s

    @property
    def id(self) -> str:
        return self._id

    async def connect(self, received: Callable[[bytes], None], lost: Callable[[str], None]) -> AgentConnection:
        found = process_box.find(self._root, self._id)
        if found is None:
            raise SandboxError(f"sandbox {self._id}: its directory is gone")
        connection = AgentConnection(received)
        try:
            async with asyncio.timeout(self._answer_s):
                with process_box.socket_path(found[0]) as path:
                    await asyncio.get_running_loop().create_unix_connection(lambda: connection, path)
        except (OSError, TimeoutError) as error:
            raise SandboxError(f"the agent of {self._id} cannot be reached: {error} {process_box.last_words(found[0])}") from error
        if connection.broken:
            raise SandboxError(f"the agent of {self._id} closed the connection: {process_box.last_words(found[0])}")
        connection.lost = lost
        return connection

    async def health(self) -> Health:
        found = process_box.find(self._root, self._id)
        if found is None or process_box.doomed(found[0]):
            return Health(present=False, alive=False, detail="no such sandbox")
        if process_box.first_process(found[0]) is None:
            said = process_box.last_words(found[0])
            return Health(present=True, alive=False, by_itself=True, detail=f"its first process ended {said}".strip())
        return Health(present=True, alive=True)

    async def remove(self) -> None:
        """Kill the first process, which takes all others along, then the files. Finding nothing is the aim."""
        if (found := process_box.find(self._root, self._id)) is not None:
            await discard(*found)

    async def snapshot(self, ttl_s: float) -> str:
        raise SandboxError("process sandboxes have no snapshots: use the docker backend")


async def discard(directory: Path, box: Box | None) -> None:
    """Remove what a sandbox, or a failed start, left in processes, on disk and in control groups."""
    process_box.doom(directory)
    pid = process_box.first_process(directory)
    if pid is not None:
        await _killed(pid)
    if box is not None:
        await cgroups.existing(box.key).remove()
    (directory / "box.json").unlink(missing_ok=True)  # first: what is left of it must not look like one that died by itself
    await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


async def _killed(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    until = time.monotonic() + _DIE_S
    while process_box.exists(pid) and time.monotonic() < until:  # noqa: ASYNC110  the kernel tells nobody but its parent
        await asyncio.sleep(_PAUSE_S)
